"""The bus's verbs by role; `bus/event_bus.py` is all of them together.

1. partition.py  one partition, its functions and groups: what the others stand on
2. tasks.py      start, cancel, answer a task
3. topics.py     subscribe, publish
4. taking.py     deliveries: read, find again, adopt, load
5. commits.py    a delivery goes well: record, ask, emit in its middle, then commit
6. failures.py   it does not: retry, quarantine, dead letters
7. owners.py     heartbeat, leadership, leaving
8. timers.py     timers and schedules
9. record.py     the record stream
10. engines.py   who serves an engine, and steps for which nobody comes
11. survey.py    counts for metrics
"""
