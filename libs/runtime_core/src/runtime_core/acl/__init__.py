"""The broker's users: one per service with least rights, and those of publishers, autoscalers and people.

1. function_rights.py  which commands and keys each function of the bus may use, read from its source
2. users.py            the table: who calls which functions, and which commands and keys besides
3. lines.py            the table as ACL rules for one server
4. passwords.py        a file of passwords, of which only digests are printed
"""
