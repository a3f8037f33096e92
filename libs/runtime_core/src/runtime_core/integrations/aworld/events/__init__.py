"""Event-driven runs with AWorld's names.

`message` has messages and queries over them, `manager` the event loop of a run, and `handlers` the default handlers.
"""
