"""Settings, by the import names of AWorld."""
