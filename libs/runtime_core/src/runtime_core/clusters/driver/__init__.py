"""Driver processes: each holds the connection to one cluster and runs the calls that it gets.

`process` starts one and talks to it. `__main__` starts `host` there, which holds the connection.
"""
