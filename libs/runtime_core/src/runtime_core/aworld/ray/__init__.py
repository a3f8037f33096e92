"""Whole tasks on Ray: the handlers of their app run in workers of a Ray cluster."""
