"""Runs tools. Reads `tool` (group `tool-handler`); emits results and records by its commits."""
