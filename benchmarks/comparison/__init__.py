"""Weft beside other systems: each carries out the same task, in an environment of its own, one after the other."""
