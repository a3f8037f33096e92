"""Messages, by the import names of AWorld."""
