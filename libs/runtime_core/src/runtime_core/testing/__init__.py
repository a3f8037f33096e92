"""What the tests of an app import. Production code never does.

`local` runs an app whole in one process, on a broker in memory: the same agents, tools and functions of the bus.
"""
