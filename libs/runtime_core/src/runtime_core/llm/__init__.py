"""Agents that a model drives.

1. `agent` declares one, in user code and in an app.
2. `conversation` runs it as an agent of pydantic-ai, and decides what each call of an answer means; `pydantic_ai` makes
   any such agent durable.
3. `input` reads the model's input, `toolset` collects the tools that it may call, and `tokens` fits requests into its
   window.
4. `model_call` repeats a request until it is answered, and keeps the conversation of an instance for its next task.
   Each `attempt` is a step, by `models` and `client`; `failures` classifies errors.
"""
