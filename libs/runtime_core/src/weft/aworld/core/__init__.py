"""Tasks, agents and messages, by the import names of AWorld."""
