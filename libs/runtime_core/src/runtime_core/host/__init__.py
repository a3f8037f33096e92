"""Runs handlers: the services' processes, an app in one process, and supervised services."""
