"""Declares the unchanged agent under a name. `WEFT_APP=examples.pydantic_agent.app:app`."""

from examples.pydantic_agent.agent import desk
from weft import App

app = App("pydantic-agent")
app.add_pydantic_agent("desk", desk)
