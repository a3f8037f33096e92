"""pydantic-ai's agents on durable runs: those of users, and LLMAgent's. Needs the extra `llm`.

1. definition.py    an agent of theirs as an agent of the app: input, conversation, output
2. durability.py    the capability by which their code hands over what it wants done
3. tool_calls.py    what a tool event carries, and how it is done by a tool-handler
"""
