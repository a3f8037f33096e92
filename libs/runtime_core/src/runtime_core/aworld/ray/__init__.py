"""Whole tasks on Ray: the handlers of their app run in workers of a Ray cluster.

`place` starts a driver process, which uses `hosts_backend`. `hosts` keeps the actors that run the handlers.
"""
