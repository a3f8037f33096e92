"""Used by every package and built on none: background tasks, child processes, lazy imports, text for one line."""
