"""Agents of pydantic-ai on durable runs: those of users, and LLMAgents. Needs the extra `llm`.

1. definition.py    a pydantic-ai agent as an agent of the app, with its tools
2. durability.py    the capability that performs an agent's requests as steps; the contents of its tool events
"""
