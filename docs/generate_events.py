"""Write docs/events.md from the code: `python -m docs.generate_events`.

The page shows facts by examples, functions by their header comments, and rows by their fields. A test
compares the file with the output of this module, so the page cannot become stale.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from runtime_core.bus.keys import GROUPS
from runtime_core.bus.library import FUNCTIONS, source_of
from runtime_core.errors import Rejected
from runtime_core.state_manager import schedules
from runtime_core.wire import commands
from runtime_core.wire import commands as submission
from runtime_core.wire import events as facts
from runtime_core.wire import step as steps
from runtime_core.wire.envelope import Envelope

PAGE = Path(__file__).with_name("events.md")

_AT_MS = 1_763_690_000_000
_TASK = "t-1"
_ON_THE_STREAM = "its entry id on the task's stream"


def page() -> str:
    """The whole page."""
    parts = (
        "# Events\n\n"
        "This page lists every event, row and function. `python -m docs.generate_events` writes it from the code:\n"
        "do not edit it. "
        "[`wire.md`](wire.md) explains what clients send and read, [`delivery.md`](delivery.md) what Weft promises.\n",
        _contents(),
        _commands(),
        _facts(),
        _work(),
        _rows(),
        _functions(),
    )
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _contents() -> str:
    titles = ("Commands", "Facts", "Work", "Rows of the record", "Functions on the broker")
    return "".join(f"- [{title}](#{title.lower().replace(' ', '-')})\n" for title in titles)


def _commands() -> str:
    lines = ["## Commands\n", "Clients append these to `weft:tasks`.\n", "| type | read as | fields |", "|---|---|---|"]
    said = [name for name in submission.SUBMIT_FIELDS if name != "conf"]
    said += [f"conf.{name}" for name in submission.CONF_FIELDS]
    lines.append(f"| `{submission.SUBMIT}` | `Submission` | {', '.join(f'`{name}`' for name in said)} |")
    for kind, body in (
        (commands.CANCEL, commands.Cancellation),
        (commands.SIGNAL, commands.Signal),
    ):
        names = ", ".join(f"`{name}`" for name in body.__struct_fields__)
        lines.append(f"| `{kind}` | `{body.__name__}` | {names} |")
    names = ", ".join(f"`{name}`" for name in schedules.FIELDS)
    lines.append(f"| `{schedules.SET}` | `Schedule` | {names} |")
    lines.append(f"| `{schedules.DELETE}` | its id | `schedule_id` |")
    return "\n".join(lines) + "\n"


def _about(function: object) -> str:
    """The first sentence of a docstring, without the type's name before it."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    said = text.partition(": ")[2] or text
    return said[:1].upper() + said[1:]


def _facts() -> str:
    lines = ["## Facts\n", "Weft publishes these. A test compares the examples with what a broker publishes.\n"]
    for kind, id, about, data in EXAMPLES:
        lines += [f"### `{kind}`\n", f"{about}\n", f"Event id: {id}.\n", "```json", data.decode(), "```\n"]
    return "\n".join(lines)


def _ending(status: str, about: str, outcome: str) -> tuple[str, str, str, bytes]:
    data = f'{{"task_id":"t-1","status":"{status}",{outcome},"usage":{{}},"steps":3,"trajectory":"t-1"}}'.encode()
    final = facts.final(_TASK, status, data, at_ms=_AT_MS)
    return final.type, f"`{final.id}`", about, final.data


def _answer(fact: Envelope, builder: object) -> tuple[str, str, str, bytes]:
    return fact.type, f"`{fact.id}`", _about(builder), fact.data


_REFUSAL = Rejected("data.agent", "no agent is named researchr; choose from researcher, writer", None, _TASK)
EXAMPLES = (
    _answer(facts.accepted(_TASK, at_ms=_AT_MS), facts.accepted),
    _answer(facts.rejected("1763690000000-0", _REFUSAL, at_ms=_AT_MS), facts.rejected),
    _ending("completed", "The end of a task that has an answer.", '"output":"An answer."'),
    _ending(
        "failed", "The end of a task that failed.", '"error":{"type":"ToolError","message":"search: no connection"}'
    ),
    _ending(
        "cancelled",
        "The end of a task that was cancelled.",
        '"error":{"type":"Cancelled","message":"no longer needed"}',
    ),
    (
        facts.OUTPUT_DELTA,
        _ON_THE_STREAM,
        "Output of an agent, `text` or `value` (JSON). With `chunk`, it is a piece of an answer that is being written; "
        "with `progress`, a call's progress; with `restart`, the run's output starts over with this attempt.",
        b'{"task_id":"t-1","run_id":"r","attempt":1,"seq":1,"text":"Redis "}',
    ),
    (
        facts.STEP_RECORDED,
        _ON_THE_STREAM,
        "Committed steps, as rows of the record, of a task that streams its steps.",
        b'{"task_id":"t-1","steps":[{"run":"r/2","kind":"tool","name":"search","status":"completed","started":1.0,'
        b'"ended":2.0,"output":[]}]}',
    ),
    (
        facts.HUMAN_REQUESTED,
        _ON_THE_STREAM,
        "A question that a `weft.task.signal` answers; `data` and `default` are JSON. `deadline` is the time until "
        "which it is open.",
        b'{"task_id":"t-1","request_id":"r:4-9b1deb4d3b7d4bad","prompt":"Publish this draft?","data":{"draft":"..."}}',
    ),
)
"""Each fact: its type, its event id, what it says and an example of its data."""


def _work() -> str:
    lines = [
        "## Work\n",
        "Kinds of entries between the services; [the fields](wire.md#work-and-record-streams-internal).\n",
        "| stream | group | kinds |",
        "|---|---|---|",
    ]
    for stream, group in GROUPS.items():
        kinds = "`start`, `resume`" if stream == "agent" else "`call`"
        lines.append(f"| `{stream}` | `{group}` | {kinds} |")
    return "\n".join(lines) + "\n"


def _rows() -> str:
    lines = ["## Rows of the record\n"]
    for struct in (steps.Step, steps.StepFailure, steps.TaskEnd):
        summary = (inspect.getdoc(struct) or "").split("\n")[0]
        lines += [f"### {struct.__name__}\n", f"{summary}\n", "| field | type | default | |", "|---|---|---|---|"]
        lines += [f"| `{name}` | `{kind}` | {default} | {about} |" for name, kind, default, about in _fields_of(struct)]
        lines.append("")
    return "\n".join(lines)


def _fields_of(struct: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and docstring of each field. From the source: the text below a field is lost at run time."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    for place, node in enumerate(body.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        after = body.body[place + 1] if place + 1 < len(body.body) else None
        about = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split())
        default = f"`{ast.unparse(node.value)}`" if node.value is not None else "required"
        kind = ast.unparse(node.annotation).replace("|", "\\|")
        yield node.target.id, kind, default, about


def _functions() -> str:
    lines = [
        "## Functions on the broker\n",
        "Each is one file in `bus/functions/` and one atomic step. `KEYS 1` is the partition's base (`weft:{0}:`).\n",
        "| function | may run at `maxmemory` |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`](#{name}) | {'yes' if allowed else 'no'} |" for name, allowed in FUNCTIONS.items()]
    lines.append("")
    for name in FUNCTIONS:
        lines += [f"### `{name}`\n", "```", *header_of(name), "```\n"]
    return "\n".join(lines)


def header_of(name: str) -> list[str]:
    """The comment right above a function's definition (or at the top of its file), without the comment signs."""
    text = source_of(name)
    before = text[: text.index(f"local function {name}(")]
    blocks = re.findall(r"(?:^--.*\n)+", before, flags=re.MULTILINE)
    # The one that names the keys: helpers above the function have comments of their own.
    chosen = next((block for block in reversed(blocks) if "KEYS" in block), "")
    return [re.sub(r"^-- ?", "", line) for line in chosen.splitlines()]


if __name__ == "__main__":
    main()
