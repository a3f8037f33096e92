"""Agents, by the import names of AWorld."""
