"""Keeps a partition from growing without end, and its timers true: chores that one leader does now and then.

1. sweeps.py    forgets what is past its time: tasks of the index, submits, deaths of entries that are no more
2. clock.py     the server's clock: a step of it moves no timer
3. memory.py    the server's memory: submits are refused before it is full
4. ends.py      follows the record: counts and tells the tasks that ended
5. measures.py  what metrics show of a partition; lag.py says how far a group is behind
6. engines.py   steps of engines that no gateway serves: they end when they have waited long enough
7. keeper.py    the chores of a namespace without services; with them, the state-manager does all of these
"""
