"""The broker. event_bus.py has the verbs of one partition; each verb is one function of functions/.

1. connector.py reads the broker's URL and connects. connection.py sends commands. embedded.py and private_server.py run
   the servers that Weft starts itself. library.py loads the functions. keys.py has every key.
2. namespace.py opens a namespace, and partition.py is the base of all verbs. The verbs and their types are in tasks.py,
   topics.py, deliveries.py and commits.py; event_bus.py joins them.
3. replies.py reads what callers wait for, and spans.py traces events.
"""
