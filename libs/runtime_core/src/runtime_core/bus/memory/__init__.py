"""`memory://`: a broker in this process, which runs the same functions as a server through an embedded Lua.

1. `server`, `waiters`: commands, transports, blocking reads
2. `keyspace`, then one file per kind of value
3. `streams`, `stream_commands`, `groups`
4. `functions`, `lua` and the three Lua files: the world that scripts see
"""
