"""Durable runs of agents: `run` (reading order in its docstring), what surrounds it (`turn_handler`, `turn_commit`),
and what a program declares (`definition`, `agent`).
"""
