"""Periodic work on a partition, done by its leader: sweeps, measures, dead letters, the server's clock and memory."""
