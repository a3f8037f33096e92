"""Agents that a model drives.

`agent` is declared; `conversation` runs it as an agent of pydantic-ai; `pydantic_ai` makes any such agent durable;
`model_call` is one call within limits."""
