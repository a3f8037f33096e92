"""Agents that a model drives.

1. `agent` is the declaration, and `definition` the form in which the runtime knows it.
2. `conversation` runs it as an agent of pydantic-ai; `pydantic_ai` makes any such agent durable.
3. `input`, `toolset`, `window` and `budget` say what the model is asked, what it may call, how much of the conversation
   it gets, and what it may cost.
4. `model_call` makes one call as a step, by `models` and `client`; `failures` says what follows from an error.
"""
