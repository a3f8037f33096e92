"""MCP servers as tools: `app.add_mcp("files", command=[…])`, then `ctx.tool("files.read_file", path="…")`.

In the order of reading:

1. `declared`: what an app says of a server. Nothing of the MCP SDK is loaded for it.
2. `servers`: the servers of an app in one tool-handler: their tools for calls, their names and schemas for the broker.
3. `connection`: one server, kept connected for as long as the process lives: listed, listed again, restarted.
4. `session`: one connection, from the first byte until it is lost; shared by all calls.
5. `streams`: how a server is reached: a process of ours, or a URL.
6. `listing`, `arguments`: from a server's list to tools that may be called.
7. `tool`, `answer`, `failures`: one call, and what may become of it.

The services that run agents read `declared` only: an agent-handler starts no server.
"""
