"""Rules for the whole repository: imports, documents, locks, public names."""
