"""The rows of steps that commits write."""
