"""Users of the broker: their rights, and who may load functions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

USERS = "bus/acl/users.py"
LINES = "bus/acl/rules.py"

MUTANTS: tuple[Mutant, ...] = (
    python(
        USERS,
        "own_ingress",
        'Grant(("xadd",), (f"%W~{{namespace}}:tasks:{name}",)),',
        'Grant(("xadd",), ("%W~{namespace}:tasks*",)),',
        "a publisher writes commands to its own stream only",
        "integration/bus/acl:function_rights",
    ),
    python(
        USERS,
        "loads_functions",
        "        if self.loads_functions:\n",
        "        if self.functions:\n",
        "services that run code of apps load no functions",
        "integration/bus/acl:function_rights",
    ),
    python(
        USERS,
        "own_streams",
        "found -= {*(_OWN_STREAM if self.serves else ()), *self.never}",
        "found -= {*self.never}",
        "a handler reads and settles its own streams only",
        "integration/bus/acl:function_rights",
    ),
    python(
        USERS,
        "leader_admit",
        '            writes.discard("leader:admit")\n',
        "            pass\n",
        "only state-managers may write the leader",
        "unit/bus/acl:rules",
    ),
    python(
        "bus/acl/users.py",
        "unnamed_keys",
        "for helper in reached.keys() & _UNNAMED.keys():",
        "for helper in ():",
        "a function has the rights to keys with computed names, and does not stop halfway",
        "unit/bus/acl:rules",
        "contracts:idle",
    ),
    python(
        LINES,
        "reset",
        'words = ["reset", "on", *passwords]',
        'words = ["on", *passwords]',
        "an existing user keeps no earlier right",
        "unit/bus/acl:rules",
    ),
    python(
        LINES,
        "literal",
        "return _GLOB.sub(",
        "return (lambda *given: given[1])(",
        "a namespace is not a pattern",
        "unit/bus/acl:rules",
    ),
    python(
        "bus/acl/rules.py",
        "mode",
        "os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)",
        "other users cannot read the file of passwords",
        "unit/bus/acl:rules",
    ),
    python(
        "bus/partition.py",
        "waits_for_library",
        '            if str(error).startswith("NOPERM"):\n',
        "            if False:\n",
        "a handler waits for a service that may load functions",
        "integration/bus/acl:function_rights",
    ),
)
