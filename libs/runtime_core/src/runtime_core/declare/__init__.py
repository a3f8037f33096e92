"""Declared functions: their names, limits, schemas and retry policies, and the manifest of an app."""
