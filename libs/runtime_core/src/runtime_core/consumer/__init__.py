"""The life of one delivery, in the order in which it happens.

1. `owner`     this process's name on the broker, and its heartbeat; a fenced owner takes a new name
2. `consumer`  takes deliveries (read, adopt, reconcile), bounded in flight, and gives each to its handler
3. handler     `agents.turn_handler` or `tools.call_handler`: runs user code, ends with `effects`
4. `decision`  pure: a failed attempt is retried, dead-lettered, parked or answered
5. `event_bus` (in `bus`) commits effects, state and acknowledgement in one step, fenced
"""
