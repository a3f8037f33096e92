"""Periodic work on a partition by its leader: sweeps, measurements, dead letters, the clock and memory of the server."""
