"""Agents as objects: requests, topics and state, on `memory://` and on shared servers."""
