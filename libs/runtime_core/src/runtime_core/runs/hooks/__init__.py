"""Hooks, callbacks and questions to humans: what runs around an agent's work, as steps of its run."""
