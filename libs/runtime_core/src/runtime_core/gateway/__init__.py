"""The HTTP gateway: tasks over HTTP for programs without a Redis client.

Reading order: `server` (the process's part, and what every request passes through), `keys` (who may do what), `access`
(what callers read and change, bound to their tenants), `tasks` (the routes of tasks), `requests` (bodies, limits,
errors), `openapi` (the document; `openapi_resources` and `openapi_schemas` are its parts). `console` has the pages for
people.

It holds no state: every replica answers every request.
"""
