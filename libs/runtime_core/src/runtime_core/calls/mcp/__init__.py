"""MCP servers as tools: `app.add_mcp("files", command=[…])`, then `ctx.tool("files.read_file", path="…")`.

`server` is what an app declares. In a tool-handler `servers` holds its servers and calls their tools. `connection`
keeps one server connected by `transport` and classifies failed calls; `listing` checks the tools that it offers.
"""
