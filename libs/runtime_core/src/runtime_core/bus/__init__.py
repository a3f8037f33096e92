"""The broker: `event_bus` (its verbs), `functions/` (each verb, atomic), `resp` or `memory/` (the way there)."""
