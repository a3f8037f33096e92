"""Examples that run: see README.md in this folder."""
