"""Agents as objects: requests, topics and state, on a broker in memory and on a real one."""
