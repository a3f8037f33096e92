"""Backends for tests of driver processes and gateways without Ray and Spark.

1. files.py      what a test and a backend tell each other: files in a folder
2. scripted.py   does what the name of a call says, in the driver itself
3. folder.py     runs registered functions on a cluster that is a folder; worker.py is its worker
4. gateway.py    a gateway's service over that
5. world.py      services with such gateways, or with real ones
"""
