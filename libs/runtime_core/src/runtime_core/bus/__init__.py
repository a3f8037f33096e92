"""The broker: `event_bus` (its verbs), `functions/` (each verb, atomic), `resp` or `memory/` (the way there).

`verbs/` holds the verbs by role; `event_bus` is all of them together.
"""
