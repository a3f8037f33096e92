"""The command `weft`: `main`, then one file per group of commands."""
