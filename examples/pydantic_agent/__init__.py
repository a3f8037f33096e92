"""A travel desk: a pydantic-ai agent as it is, run durably. `agent.py` knows nothing of Weft; `app.py` declares it."""
