"""Agents that a model drives.

1. `agent` declares one, in user code and in an app.
2. `conversation` runs it as an agent of pydantic-ai; `pydantic_ai` makes any such agent durable.
3. `input`, `toolset` and `tokens` hold what the model is asked, what it may call, and what fits into a request.
4. `model_call` makes one call as a step, by `models` and `client`; `failures` classifies errors.
"""
