"""Runs the calls of agents: a tool-handler those of tools, including MCP servers', and a gateway those of an engine."""
