"""Agents as objects: requests, topics and state, on `memory://` and on a server that others share."""
