"""What holds for the whole repository: imports, documents, locks, public names."""
