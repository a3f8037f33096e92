"""Custom runners.

    custom_runner.py    pre_run, do_run and post_run around your own logic
    tree_search.py      a depth-first search: an agent proposes actions, and a tool executes them
    clear_parts.py      a runner with one method per part
    event_driven.py     a runner that sends a message, and a function that changes it on its way
    task_with_hooks.py  a task with a swarm, a config, hooks and a stream

Run one with `python -m examples.runners.tree_search`. It uses this process, or with `WEFT_REDIS_URL` the services that
run `WEFT_APP=examples.runners.app:app`.
"""
