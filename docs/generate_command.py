"""Write docs/command.md from the command's help texts: `python -m docs.generate_command`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typer.core import TyperGroup

from runtime_core.cli.main import build

PAGE = Path(__file__).with_name("command.md")
WIDTH = 100
_HEAD = """\
# The command `weft`

`python -m docs.generate_command` writes this page from the help texts: do not edit it.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | the command or the task failed; one line on standard error gives the reason and the remedy |
| 2 | wrong usage; one line on standard error names the command whose `--help` explains it |
| 130 | interrupted by Ctrl-C; a submitted task continues |
| 141 | the reader of the output has exited, as in `weft task list \\| head -1` |

`--json` prints one JSON document; `weft submit --stream --json` and `weft trajectory export` print JSON lines. Times
in JSON are milliseconds since 1970.
"""


def page() -> str:
    """Return the whole page."""
    sections = [_HEAD]
    for path, text in _helps():
        sections.append(f"## `{path}`\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _helps() -> Iterator[tuple[str, str]]:
    """Yield every command with its help, a group before its commands."""
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
    main()
