"""Runs handlers: the services' processes, an app in one process, and supervised services.

1. `services` starts a service by its name (`__main__`), as a process (`service`) that carries roles (`host`).
2. `agent_handler`, `tool_handler`, `gateway`, `manager` and `recorder` wire one service each; `apps` has what hosts of
   an app share.
3. `local` and `task_host` run an app inside another program; `stack` and `supervisor` run all services of a machine.
"""
