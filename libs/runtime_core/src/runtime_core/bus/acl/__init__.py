"""The broker's users with least privilege: one per service, and those of publishers, autoscalers and people.

1. users.py  the rights of each function of the bus, read from its source; the table of users: functions, commands, keys
2. rules.py  the table as ACL rules for one server, with digests of a file of passwords
"""
