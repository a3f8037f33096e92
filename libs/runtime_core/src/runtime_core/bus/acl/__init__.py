"""The broker's users with least privilege: one per service, and those of publishers, autoscalers and people.

1. function_rights.py  the commands and keys that each function of the bus may use, read from its source
2. users.py            the table of users: their functions, and further commands and keys
3. rules.py            the table as ACL rules for one server, with digests of a file of passwords
"""
