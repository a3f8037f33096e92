"""Runs the calls of agents: a tool-handler those of tools, also of MCP servers, and a gateway those of an engine."""
