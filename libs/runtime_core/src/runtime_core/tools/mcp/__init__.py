"""MCP servers as tools: `app.add_mcp("files", command=[…])`, then `ctx.tool("files.read_file", path="…")`.

`server` is what an app declares; `servers` serve calls in a tool-handler; `connection`, `transport` and `tool`
reach them."""
