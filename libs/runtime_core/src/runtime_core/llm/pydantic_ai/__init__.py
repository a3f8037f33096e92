"""pydantic-ai's agents, as they are, on durable runs. Needs the extra `llm`. Import this where it is used.

1. definition.py    an agent of theirs as an agent of the app: input, conversation, output
2. durability.py    the capability by which their code hands over what it wants done
3. model_calls.py   a model request as a journaled step, with waits by timers
4. tool_calls.py    what a tool event carries, and how it is done by a tool-handler
5. dependencies.py  `RunContext.deps` in each process
"""
