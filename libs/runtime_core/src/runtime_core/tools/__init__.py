"""Tools: `tool` (declared ones), `source` (others), `call` (a call under its limit), `call_handler` (its delivery)."""
