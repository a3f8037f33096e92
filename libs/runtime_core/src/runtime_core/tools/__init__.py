"""Tools: `tool` (what is declared), `call` (one call under its limit), `call_handler` (one delivery of a call)."""
