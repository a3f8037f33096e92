"""The bus's verbs by role; `bus/event_bus.py` is all of them together.

1. partition.py  one partition, its functions and groups: what the others stand on
2. durability.py until what was accepted is on disk or on a replica
3. tasks.py      start, cancel, answer a task
4. topics.py     subscribe, publish
5. taking.py     deliveries: read, find again, adopt, load
6. commits.py    a delivery goes well: record, ask, emit in its middle, then commit
7. failures.py   it does not: retry, quarantine, dead letters
8. owners.py     heartbeat, leadership, leaving
9. timers.py     timers and schedules
10. record.py     the record stream
11. engines.py   who serves an engine, and steps for which nobody comes
12. survey.py    counts for metrics
"""
