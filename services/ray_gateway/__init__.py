"""Runs engine steps on Ray. Reads `ray` (group `ray-gateway`); emits results and records by its commits."""
