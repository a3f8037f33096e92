"""Writes each step of every task once. Reads `record` (group `trajectory-recorder`) by a cursor that is stored in the
transaction that writes the rows. One replica is active per partition; the others stand by. The role itself is
`runtime_core.trajectory`, which a LocalApp uses too.
"""
