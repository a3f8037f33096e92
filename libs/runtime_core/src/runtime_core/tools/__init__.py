"""Tools: declared functions, their calls under a limit, and MCP servers."""
