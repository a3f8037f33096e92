"""Driver processes: each holds the connection to one cluster and runs what it is sent."""
