"""Whole tasks on Ray: the handlers of their app run in workers of a Ray cluster.

`target` starts a driver process, and `hosts` keeps the actors that run the handlers.
"""
