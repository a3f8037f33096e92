"""Agents that a model drives.

`agent` is declared; `loop` is the conversation of one run; `model_call` is one call within limits."""
