"""The settings of a process, read from the environment once."""
