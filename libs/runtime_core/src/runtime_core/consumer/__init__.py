"""The life of a delivery.

1. `consumer` reads an entry from a work stream. `in_flight` passes it to its handler and holds it until it is settled.
   It skips tasks that have ended.
2. `heartbeat` keeps the owner alive. If it stops, the consumers of other processes reclaim this one's deliveries.
3. The handler returns its `effects` as values. Its commit writes them and acknowledges the entry in one step; `settle`
   commits the results of tool calls and engine steps.
4. If the handler fails, `settle` decides what follows and does it: a retry, an error as the answer, a dead letter.
5. `announcements` has what apps publish about themselves: handlers look up names there that they do not have.
6. `progress` finds a process that is stuck, and code that blocks its event loop. `leader` elects one process for each
   role and partition.
"""
