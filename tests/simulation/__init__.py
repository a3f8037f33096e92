"""Seeded, deterministic simulation of whole histories. Reading order: `history.py`, `scheduler.py`, then the rest."""
