"""What declared functions have in common: names, limits, schemas, JSON, retry policy, and the manifest of an app."""
