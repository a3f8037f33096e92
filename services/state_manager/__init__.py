"""Admits tasks in order, relays answers, trims and sweeps. One replica leads at a time; the others stand by.

1. `admitter`     `weft:tasks` → a started task, or a rejection and a dead letter
   `publisher_streams`   the same for `weft:tasks:<publisher>`, each stream by itself
2. `relay`        answers on their way to a `replyto` outside their partition
3. `runtime_core.maintenance.keeper`  the chores of a partition: trims, sweeps, watches, measures
"""
