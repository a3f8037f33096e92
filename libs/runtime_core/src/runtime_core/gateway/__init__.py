"""The HTTP gateway: tasks over HTTP for programs without a Redis client.

Reading order: `server` (the process's part), `application` (routes, and what every request passes through), `tasks` and
`streams` (what the routes do), `problems` (errors), `openapi` (the document).

It holds no state: every replica answers every request. It speaks to the broker through `runtime_core.client` alone.
"""
