"""The record of each task's steps: `steps` (as they travel), `store` (where they are kept), `tree` and `export`."""
