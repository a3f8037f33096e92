"""The event manager, by the import names of AWorld."""
