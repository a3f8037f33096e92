"""Compares Weft with other systems: each runs the same task, in a separate environment, one after another."""
