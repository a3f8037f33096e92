"""The command `weft`: `main`, then one file, or folder, per group of commands."""
