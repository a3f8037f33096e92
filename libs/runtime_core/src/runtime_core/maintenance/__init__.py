"""Housekeeping of a partition by its leader: sweeps, metrics of the broker, dead letters, stuck work."""
