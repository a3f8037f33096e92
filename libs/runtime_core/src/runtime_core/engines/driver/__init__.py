"""Processes that drive a cluster: each holds the connection to one engine, and runs what it is sent there.

A driver is a process of its own since a lost cluster may take its driver's process along, blocks it for minutes, or
leaves threads in it that never end: the gateway goes on, answers, and starts another one.
"""
