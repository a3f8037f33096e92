"""Periodic work on a partition, done by its leader: sweeps, measurements, dead letters, the server's clock and
memory."""
