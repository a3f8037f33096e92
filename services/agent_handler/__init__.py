"""Runs turns of agents. Reads `agent` (group `agent-handler`); emits calls, output and records by its commits."""
