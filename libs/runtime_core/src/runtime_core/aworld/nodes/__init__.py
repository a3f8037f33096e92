"""What runs and what has run, as nodes with a status: `StateManager` and its parts."""
