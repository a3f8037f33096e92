"""The HTTP gateway: tasks over HTTP for programs without a Redis client.

Reading order: `server` (the process's part, and what every request passes through), `keys` (who may do what), `tasks`
(what the routes do), `requests` (bodies, limits, errors), `openapi` (the document).

It holds no state: every replica answers every request. It speaks to the broker through `runtime_core.client` alone.
"""
