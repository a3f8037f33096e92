"""Declared functions.

1. `declaration` has what all declarations share: places, names, limits, retry policies. `schema` reads and checks JSON
   by declared types.
2. `function` is the base of tools and engine functions; `tool` has tools and their calls, `mcp_server` MCP servers.
3. `manifest` has the names and schemas of an app for the broker. `loading` finds an app by its reference.
"""
