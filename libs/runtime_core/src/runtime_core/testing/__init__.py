"""What the tests of an app import. Production code never does.

`local` is `runtime_core.host.local`: an app whole in one process, on a broker in memory, with the functions of the bus.
"""
