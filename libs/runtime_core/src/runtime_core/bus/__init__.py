"""The broker: `event_bus` has the verbs of one partition.

Each is one function of `functions/`, called over `connection`."""
