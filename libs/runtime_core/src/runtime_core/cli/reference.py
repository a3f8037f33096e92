"""The page `docs/command.md`, made from the help texts.

Write it again with `python -m runtime_core.cli.reference > docs/command.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from typer.core import TyperGroup

from runtime_core.cli.main import build

WIDTH = 100
_HEAD = """\
# The command `weft`

This page is made from the help texts: `python -m runtime_core.cli.reference > docs/command.md`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | it could not be done, or the task failed; one line on standard error says why and what to do |
| 2 | used wrongly; one line names the command whose `--help` says more |
| 130 | ended by Ctrl-C; a task that was submitted goes on |
| 141 | whoever read the output has gone, as in `weft task list \\| head -1` |

`--json` prints one JSON document; `weft submit --stream --json` and `weft trajectory export` print JSON lines. Times
are epoch milliseconds there.
"""


def reference() -> str:
    """The page's text."""
    sections = [_HEAD]
    for path, text in _helps():
        sections.append(f"## `{path}`\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def _helps() -> Iterator[tuple[str, str]]:
    """Every command with its help, a group before its commands."""
    root = build()
    pending = [("weft", root.make_context("weft", [], resilient_parsing=True, terminal_width=WIDTH))]
    while pending:
        path, context = pending.pop(0)
        yield path, "\n".join(line.rstrip() for line in context.get_help().strip().splitlines())
        group = context.command
        if isinstance(group, TyperGroup):
            inner = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
            pending[:0] = [
                (
                    f"{path} {name}",
                    command.make_context(name, [], parent=context, resilient_parsing=True, terminal_width=WIDTH),
                )
                for name, command in inner
                if command is not None
            ]


if __name__ == "__main__":
    print(reference(), end="")
