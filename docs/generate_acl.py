"""Write docs/acl.md and deploy/k8s/base/secrets/users.json from the table of users: `python -m docs.generate_acl`.

A test compares both files with the output of this module, so neither can become stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, rules
from runtime_core.bus.acl.users import KEYS, USERS, Grant, User, own_publisher

PAGE = Path(__file__).with_name("acl.md")
IN_THE_CLUSTER = PAGE.parent.parent / "deploy" / "k8s" / "base" / "secrets" / "users.json"
MOST_PARTITIONS = 10
"""The Secret's rules serve any number of partitions up to this one."""


def page() -> str:
    """The whole page."""
    return "\n".join(_parts()) + "\n"


def in_the_cluster() -> str:
    """Return the rules of every user for the script that creates the Secret, which runs without Weft."""
    target = Target(partitions=MOST_PARTITIONS)
    found = {user.name: " ".join(rules(user, target, [])) for user in USERS.values()}
    return json.dumps({"default": DEFAULT_OFF.partition("default ")[2], **found}, indent=2) + "\n"


def main() -> None:
    """Write both files."""
    PAGE.write_text(page(), encoding="utf-8")
    IN_THE_CLUSTER.write_text(in_the_cluster(), encoding="utf-8")


def _parts() -> Iterator[str]:
    yield (
        "# Users of the broker\n\n"
        "Each service and each kind of program has a separate broker user, with the rights that its work needs.\n"
        "`weft acl` prints them ([how](operations.md#users)). `python -m docs.generate_acl` writes this page: do not\n"
        "edit it.\n\n"
        "`weft` stands for the namespace and `{p}` for a partition. No user but `admin` may use channels. None may\n"
        "pause, list or disconnect clients, run scripts, or change the server's settings and users.\n"
    )
    yield "| user | what it does | what it cannot do |\n|---|---|---|"
    for user in _users():
        yield f"| `{user.name}` | {_named(user.can)} | {_named(user.cannot) or 'nothing: it has every right'} |"
    yield (
        "\n`shop` is an example of an untrusted publisher (`weft acl --publisher shop`). `publisher` writes to the\n"
        "stream that all share: keep it for programs of one trust domain.\n\n"
        "A service that may load functions can change the functions that others run with their own rights. Only\n"
        "services without app code may load them: the state-manager and the trajectory-recorder. The others wait for\n"
        "these. `runtime` is for programs that need no services, so it may load functions too.\n\n"
        "Rules cannot inspect arguments. A user who may append to a stream may also trim it (`XADD … MAXLEN`), so\n"
        "services trust each other not to. If a user has every key with some first letter, the rules name only that\n"
        "letter, because a server compares each key with one pattern after the other, for every task.\n"
    )
    for user in _users():
        yield from _section(user)


def _users() -> list[User]:
    return [*USERS.values(), own_publisher("shop")]


def _section(user: User) -> Iterator[str]:
    if user.everything:
        return
    yield f"## {user.name}\n"
    yield "| keys | commands |\n|---|---|"
    reads, writes = user.keys(MOST_PARTITIONS) if user.functions else ([], [])
    if writes:
        missing = [key for key in KEYS if key not in writes and key not in reads]
        commands = _listed(user.root_commands(MOST_PARTITIONS))
        yield f"| reads and writes in `weft:{{p}}:`: {_listed(writes)} | {commands} |"
        yield f"| reads in `weft:{{p}}:`: {_listed(reads)}; and `weft:settings` | the read-only ones of these |"
        if missing:
            yield f"| nothing in `weft:{{p}}:`: {_listed(missing)} | none |"
    else:
        yield f"| none | {_listed(user.root_commands(1))} |"
    for grant in user.selectors():
        yield f"| {_keys(grant)} | {_listed(grant.commands)} |"
    yield ""


def _keys(grant: Grant) -> str:
    words = {"%R~": "reads", "%W~": "writes", "~": "reads and writes"}
    said = []
    for key in grant.keys:
        prefix = next(one for one in words if key.startswith(one))
        said.append(f"{words[prefix]} `{_named(key.removeprefix(prefix))}`")
    return ", ".join(said)


def _named(text: str) -> str:
    return text.replace("{namespace}", "weft").replace("{base}", "weft:{p}:")


def _listed(names: object) -> str:
    assert isinstance(names, list | tuple)
    return ", ".join(f"`{name}`" for name in sorted(names)).replace("|", "\\|") or "none"


if __name__ == "__main__":
    main()
