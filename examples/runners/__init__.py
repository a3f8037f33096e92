"""Runners of one's own: the code of a custom runner, a tree search, a runner in clear parts, a task with hooks.

    custom_runner.py    pre_run, do_run, post_run around logic of one's own
    tree_search.py      a depth-first search over what an agent proposes and a tool does
    clear_parts.py      one runner, a method for each part
    event_driven.py     one that sends a message, and a function that changes it on its way
    task_with_hooks.py  a task with a swarm, a config, hooks and a stream

Each is run as `python -m examples.runners.tree_search`; with `WEFT_REDIS_URL` set, and services that run
`WEFT_APP=examples.runners.app:app`, on those.
"""
