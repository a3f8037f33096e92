"""MCP servers as tools: `app.add_mcp("files", command=[…])`, then `ctx.tool("files.read_file", path="…")`.

`declare/mcp_server.py` is what an app declares. In a tool-handler `servers` holds its servers and calls their tools.
`connection` keeps one server connected by `transport`, checks the tools that it offers, and classifies failed calls.
"""
