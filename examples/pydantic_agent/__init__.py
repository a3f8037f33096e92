"""A travel desk: an unchanged pydantic-ai agent, run durably. `agent.py` does not use Weft; `app.py` declares it."""
