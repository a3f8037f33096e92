"""The context, by the import names of AWorld."""
