"""A file of passwords, from which only digests reach the broker's rules.

One `AGENT_HANDLER_PASSWORD=…` a line, so that compose and shells read it too; other variables may stand beside them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from runtime_core.errors import ConfigurationError

_LINE = re.compile(r"(?:([A-Z0-9_]+)_PASSWORD=(\S+)|[A-Z0-9_]+=.*)")


def digests(files: Sequence[Path], users: Iterable[str]) -> dict[str, list[str]]:
    """SHA-256 of each user's password in every file; the first file is given a new one where it has none.

    Two files let two passwords in, while one takes the place of the other. Raises ConfigurationError.
    """
    if not files:
        return {}
    kept = [_read(file, may_be_missing=file == files[0]) for file in files]
    missing = [user for user in users if _name(user) not in kept[0]]
    if missing:
        kept[0] |= _add(files[0], missing)
    return {
        user: [hashlib.sha256(found[_name(user)].encode()).hexdigest() for found in kept if _name(user) in found]
        for user in users
    }


def _name(user: str) -> str:
    return user.replace("-", "_").upper()


def _read(file: Path, *, may_be_missing: bool) -> dict[str, str]:
    if may_be_missing and not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigurationError(
                f"{file}, line {number}: write AGENT_HANDLER_PASSWORD=… for the user agent-handler"
            )
        if match[1]:
            found[match[1]] = match[2]
    return found


def _add(file: Path, users: Iterable[str]) -> dict[str, str]:
    made = {_name(user): secrets.token_hex(24) for user in users}
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
        opened.writelines(f"{name}_PASSWORD={password}\n" for name, password in made.items())
    return made
