"""MCP servers for tests, made with the MCP SDK, each a process of its own.

`desk` does what a server may do well or badly while it is called; `odd` lists what may not be listed so; `running`
starts one that listens on a port, `stdio` forks those that clients start.
"""
