"""Agents as objects that handle messages by type, send requests and publish to topics.

Reading order: `identity`, `message`, `serialization`, `context`, `subscription`, `base_agent`, `routed`,
`closure`, `vocabulary` (whose types the engine speaks), `instances`, `actor` (a handler as a durable run),
`host`, `requests`, `publishing`, `saved`, `runtime` (what a program calls)."""
