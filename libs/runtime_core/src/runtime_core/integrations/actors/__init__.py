"""Agents as objects that handle messages by type, send requests and publish to topics.

Reading order: `identity`, `message` (also what a handler can ask about it), `serialization`, `subscription`,
`protocol` (what agent and runtime are to each other), `agents` (the classes that a program writes), `vocabulary` (whose
types the engine speaks), `instances`, `actor` (a handler as a durable run), `errors`, `checks` (of callers' arguments),
`host`, `messaging`, `saved`, `runtime` (the API of a program). `autogen` offers AutoGen's own types on the same engine.
"""
