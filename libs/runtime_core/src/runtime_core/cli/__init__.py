"""The command `weft`: `main`, then one file or folder for each group of commands."""
