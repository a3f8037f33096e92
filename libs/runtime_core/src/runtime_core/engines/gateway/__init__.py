"""Gateways: services that run engine steps of tasks on a cluster.

1. served.py        what a gateway knows of its engine
2. gateway.py       the service's role: a worker on the engine's streams, and a driver process
3. step_handler.py  one step, from its delivery to its result
"""
