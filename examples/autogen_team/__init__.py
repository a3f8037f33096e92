"""AutoGen programs that run on Weft with one line changed: a team of AgentChat, and two agents of AutoGen Core.

`make .venv-autogen/.setup`, then `.venv-autogen/bin/python -m examples.autogen_team`.
"""
