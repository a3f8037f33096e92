"""Hooks, callbacks and questions to humans: what runs around an agent's work without being its code.

They run inside the agent's own run, as steps of it: recorded once, replayed, adopted with the run.

    1. points.py        where a hook may run, and the older names of the points
    2. verdicts.py      what a hook is told, and what it may answer
    3. declared.py      a hook as an app declares it, and the table of an app's hooks
    4. callbacks.py     what looks at a tool's result
    5. selection.py     which hooks one run has, fixed when the run begins
    6. pipeline.py      one point's hooks, in order: their steps, their verdicts, their failures
    7. guarded.py       an awaitable that does the guarded work in a branch of its own
    8. around.py        the points around a run, a tool call, a model call, a delta, a question
    9. ended.py         the points of a task that has ended without being completed: in a task of their own
"""
