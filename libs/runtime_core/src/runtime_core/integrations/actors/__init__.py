"""Agents as objects that handle messages by type, send requests and publish to topics.

Reading order: `identity`, `message` (also what a handler can ask about it), `serialization`, `protocol` (subscriptions,
what agent and runtime are to each other, and whose types agents see), `agents` (the classes that a program writes),
`instances`, `actor` (a handler as a durable run), `errors` (and checks of callers' arguments), `host`, `messaging`,
`watch` (messages that wait long), `runtime` (the API of a program). `integrations/autogen/` offers AutoGen's own types
on the same engine.
"""
