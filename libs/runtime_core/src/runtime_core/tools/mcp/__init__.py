"""MCP servers as tools: `app.add_mcp("files", command=[…])`, then `ctx.tool("files.read_file", path="…")`.

`server` is what an app declares. In a tool-handler `servers` holds its servers and `tool` calls their tools.
`connection` keeps one server connected by `transport`, `listing` checks the tools that it offers, and `failures`
classifies failed calls.
"""
