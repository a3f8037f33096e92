"""Periodic work of a partition's leader: sweeps, measurements, dead letters, the clock and memory of the server."""
