"""Rows of the trajectory, as commits write them to the record stream."""
