"""What the forms of the pages do, and forms that follow a JSON schema."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from runtime_core.base.text import utc
from runtime_core.declare.manifest import TOOL_AGENTS
from runtime_core.errors import InvalidInput
from runtime_core.gateway.access import Access
from runtime_core.gateway.console import views
from runtime_core.gateway.console.site import HOME, Form, Page, Visit, see
from runtime_core.gateway.console.views import digest
from runtime_core.gateway.keys import ANSWER, OPERATE, READ, SUBMIT, Caller
from runtime_core.gateway.requests import CONFLICT, NO_LETTER, NO_TASK, Problem, ProblemKind
from runtime_core.state_manager.dead_letters import LetterFilter
from runtime_core.wire import codec
from runtime_core.wire.codec import readable
from runtime_core.wire.step import Status

CANCELLED = "cancelled in the console"
SELECTED_MAX = 200
"""Tasks or dead letters that one form changes."""
LETTERS_MAX = 5_000
"""The newest dead letters, among which those of the selected tasks are."""

ANSWERED = ProblemKind(CONFLICT.name, CONFLICT.status, "This question was already answered")
ENDED = ProblemKind(CONFLICT.name, CONFLICT.status, "The task has ended")
ANSWER_SHOWN = 200
"""Characters of the answer that was first."""

FIELDS_MAX = 30
"""Members of a schema that a form has; more make it one field of JSON."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form. Its name tells `value_of` how to read it: `kind.member`, or `kind?.member` if it may be
    empty; without a member, it is the whole value.
    """

    name: str
    kind: str
    """`text`, `whole`, `number`, `choice`, `json`, or `any`: JSON if it looks like it, else text."""
    label: str
    required: bool
    value: str = ""
    hint: str = ""
    options: tuple[tuple[str, str], ...] = ()
    """Values (JSON) and labels of a choice."""


def fields_of(schema: Mapping[str, Any] | None, label: str = "Input") -> list[Field]:  # Any: JSON
    """Return the fields of a form for a JSON schema: one for each member of an object, else a single one."""
    schema = _resolved(schema or {}, schema or {})
    members = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(members, dict) or not 0 < len(members) <= FIELDS_MAX:
        kind, options = _kind(schema)
        if kind == "json":
            return [Field("input", "any", f"{label}: text, or JSON", False)]
        return [Field(f"{kind}.", kind, label, kind != "text", options=options)]
    required = schema.get("required", ())
    found = []
    for name, member in members.items():
        member = _resolved(member, schema) if isinstance(member, dict) else {}
        if name not in required:
            member = _without_null(member, schema)
        kind, options = _kind(member)
        default = member.get("default")
        found.append(
            Field(
                f"{kind}{'' if name in required else '?'}.{name}", kind, name, name in required,
                default if isinstance(default, str) and kind == "text" else "" if default is None
                else codec.encode(default).decode(),
                str(member.get("description", "")), options if name in required else (("", "-"), *options),
            )
        )  # fmt: skip
    return found


def _resolved(member: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """Return a part of a schema, with what it refers to among the definitions of the whole."""
    name = str(member.get("$ref", "")).removeprefix("#/$defs/")
    found = schema.get("$defs", {}).get(name) if name else None
    return {**found, **member} if found else member


def _without_null(member: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """Return the only alternative to null, if there is one: a field may be left empty."""
    others = [each for each in member.get("anyOf", ()) if each != {"type": "null"}]
    return {**member, **_resolved(others[0], schema)} if len(others) == 1 else member


def _kind(schema: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, str], ...]]:  # Any: JSON
    if isinstance(values := schema.get("enum"), list) and values:
        return "choice", tuple(
            (codec.encode(value).decode(), value if isinstance(value, str) else codec.encode(value).decode())
            for value in values
        )
    if schema.get("type") == "boolean":
        return "choice", (("true", "yes"), ("false", "no"))
    kinds = {"string": "text", "integer": "whole", "number": "number"}
    return kinds.get(str(schema.get("type")), "json"), ()


def value_of(form: Form, what: str = "input") -> object:
    """Return what the fields of `fields_of` hold. Raises InvalidInput with the member, or `what` for the whole."""
    for name in ("input", "any."):
        if name in form:
            return codec.typed(form[name][0], words=True, field=what)
    members: dict[str, object] = {}
    for name, values in form.items():
        kind, dot, member = name.partition(".")
        optional = kind.endswith("?")
        if not dot or kind.rstrip("?") not in _READERS or (optional and not values[0].strip()):
            continue
        try:
            value = _READERS[kind.rstrip("?")](values[0])
        except (ValueError, RecursionError, InvalidInput):
            raise InvalidInput(member or what, f"{codec.quoted(values[0])} is not {_WORDS[kind.rstrip('?')]}") from None
        if not member:
            return value
        members[member] = value
    return members


def edited(form: Form, what: str) -> Any:  # Any: JSON, or an ellipsis
    """Return what a person made of the value that the macro `editable` shows; `...` if it is as it was.

    Raises InvalidInput.
    """
    shown = [form[name][0] for name in ("text.", "json.", "any.") if name in form]
    return ... if not shown or digest(shown[0]) == form.get("before", [""])[0] else value_of(form, what)


def _json(text: str) -> object:
    return codec.decode(text.strip().encode()) if text.strip() else None


_READERS: Mapping[str, Callable[[str], object]] = {
    "text": str, "whole": int, "number": float, "choice": _json, "json": _json,
}  # fmt: skip
_VERDICTS = {"approve": "approved", "edit": "edited", "deny": "denied"}
_WORDS = {"whole": "a whole number", "number": "a number", "choice": "one of the choices", "json": "JSON"}


class Actions:
    """Handlers of forms. Each returns a redirect to the page that shows the result."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def pages(self) -> list[Page]:
        task = f"{HOME}/tasks/{{task_id}}"
        return [
            Page("POST", f"{HOME}/tasks", self.submit, SUBMIT),
            Page("POST", f"{HOME}/cancel", self.cancel_selected, OPERATE),
            Page("POST", f"{HOME}/redrive", self.redrive_selected, OPERATE),
            Page("POST", f"{HOME}/dead", self.letters_selected, OPERATE),
            Page("POST", f"{HOME}/compare", self.compare_selected, READ),
            Page("POST", f"{task}/cancel", self.cancel, OPERATE),
            Page("POST", f"{task}/answer", self.answer, ANSWER),
            Page("POST", f"{task}/send", self.send, ANSWER),
            Page("POST", f"{task}/fork", self.fork, OPERATE),
            Page("POST", f"{HOME}/tools", self.call_tool, OPERATE, every_tenant=True),
            Page("POST", f"{task}/redrive", self.redrive, OPERATE),
        ]

    async def submit(self, visit: Visit) -> Response:
        data: dict[str, object] = {
            "agent": visit.field("agent"),
            "input": value_of(visit.form),
        }
        task = await self._access.submit(visit.caller, data, secrets.token_hex(16))
        return see(f"{HOME}/tasks/{task.task_id}", "started")

    async def call_tool(self, visit: Visit) -> Response:
        """Start the agent that makes one call of a tool."""
        arguments = value_of(visit.form)
        if not isinstance(arguments, dict):
            raise InvalidInput("input", "is not a JSON object, with the arguments by name")
        call = {"tool": visit.field("tool"), "arguments": arguments}
        data: dict[str, object] = {"agent": TOOL_AGENTS + visit.field("app"), "input": call}
        task = await self._access.submit(visit.caller, data, secrets.token_hex(16))
        return see(f"{HOME}/tasks/{task.task_id}", "started")

    async def cancel_selected(self, visit: Visit) -> Response:
        selected = visit.form.get("task", [])[:SELECTED_MAX]
        done = 0
        for task_id in selected:
            with _passed(NO_TASK):
                done += await self._access.cancel(visit.caller, task_id, CANCELLED) == "cancelled"
        return _seen_many(visit.field("back"), "cancelled", done, len(selected) - done)

    async def redrive_selected(self, visit: Visit) -> Response:
        """Redrive the dead letters of the selected tasks. Tasks without any are left as they are."""
        selected = frozenset(visit.form.get("task", [])[:SELECTED_MAX])
        found, _ = await self._access.letters(visit.caller, LetterFilter(), LETTERS_MAX) if selected else ([], "")
        done = []
        for letter in found:
            if letter["task_id"] in selected:
                with _passed(NO_LETTER, CONFLICT):
                    await self._access.redrive(visit.caller, letter["letter_id"], reopen=True)
                    done.append(letter["task_id"])
        return _seen_many(visit.field("back"), "redriven-of", len(done), len(selected.difference(done)))

    async def compare_selected(self, visit: Visit) -> Response:
        selected = visit.form.get("task", [])
        if len(selected) != 2:
            return see(visit.field("back"), "two")
        # The list has the newest first, and the older one is what the other differs from.
        return see(f"{HOME}/compare?{urlencode({'one': selected[1], 'other': selected[0]})}")

    async def letters_selected(self, visit: Visit) -> Response:
        """Redrive or drop the selected dead letters, or the newest ones of an error."""
        error = visit.field("error")
        selected = visit.form.get("letter", [])[:SELECTED_MAX]
        if visit.field("all") and error:
            found, _ = await self._access.letters(visit.caller, LetterFilter(error=error), SELECTED_MAX)
            selected = [letter["letter_id"] for letter in found]
        drop = visit.field("do") == "drop"
        count = 0
        for letter_id in selected:
            with _passed(NO_LETTER, CONFLICT):
                if drop:
                    await self._access.drop(visit.caller, letter_id)
                else:
                    await self._access.redrive(visit.caller, letter_id, reopen=True)
                count += 1
        return _seen_many(f"{HOME}/dead", "dropped" if drop else "redriven", count, len(selected) - count)

    async def cancel(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        status = await self._access.cancel(visit.caller, task_id, CANCELLED)
        return see(f"{HOME}/tasks/{task_id}", "cancelled" if status == Status.CANCELLED else f"had-{status}")

    async def answer(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        verdict = visit.field("verdict")
        value: Any  # JSON
        if not verdict:
            value = visit.form.get("value")
            value = value_of(visit.form) if value is None else codec.typed(value[0], words=True, field="value")
        else:
            value = {"verdict": verdict}
            changed = edited(visit.form, "value") if verdict == "approve" else ...
            if changed is not ...:
                value = {"verdict": "edit", "value": changed}
            if visit.field("reason"):
                value["reason"] = visit.field("reason")
        request_id = visit.field("request_id")
        try:
            await self._access.answer(visit.caller, task_id, request_id, value)
        except Problem as problem:
            if problem.kind is not CONFLICT:
                raise
            raise await _late_answer(self._access, visit.caller, task_id, request_id, problem) from None
        notice = _VERDICTS[value["verdict"]] if verdict in _VERDICTS else "answered"
        return see(visit.field("back") or f"{HOME}/tasks/{task_id}", notice)

    async def send(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        value = codec.typed(visit.field("value"), words=True, field="value")
        await self._access.send(visit.caller, task_id, visit.field("name"), value)
        return see(f"{HOME}/tasks/{task_id}", "sent")

    async def fork(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        at = visit.field("at") or None
        if visit.field("replace"):
            task = await self._access.fork(visit.caller, task_id, at=at, input=value_of(visit.form))
        else:
            task = await self._access.fork(visit.caller, task_id, at=at)
        return see(f"{HOME}/tasks/{task.task_id}", "forked" if at else "again")

    async def redrive(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        await self._access.redrive(visit.caller, visit.field("letter"), reopen=True)
        return see(f"{HOME}/tasks/{task_id}", "redriven")


def _seen_many(back: str, notice: str, done: int, left: int) -> Response:
    """Return a redirect to a page that says how many of the selected things were done, and how many were not."""
    return see(back, f"{notice}-many", done=done, left=left) if done or left else see(back, "none")


@contextmanager
def _passed(*kinds: ProblemKind) -> Iterator[None]:
    """Pass over problems of these kinds: of many selected things, some may have gone meanwhile."""
    try:
        yield
    except Problem as problem:
        if problem.kind not in kinds:
            raise


async def _late_answer(access: Access, caller: Caller, task_id: str, request_id: str, problem: Problem) -> Problem:
    """Return why a question took no answer, in words for the person who sent it."""
    try:
        recorded = await access.trajectory(caller, task_id)
    except Problem:
        recorded = None  # not recorded yet, or there is no store
    run, _, step = views.path_of_request(request_id).rpartition("/")
    for each in recorded.steps if recorded is not None else ():
        if (each.run, each.step) == (run, step) and each.status == Status.COMPLETED:
            answer = views.preview(readable(bytes(each.output)), ANSWER_SHOWN)
            first = f"The answer was {answer}" if answer else "It was answered"
            return Problem(ANSWERED, f"{first}, at {utc(each.ended)}. Yours was not used.")
    if problem.field == "request_id" and "was already answered" in problem.detail:
        return Problem(ANSWERED, "Somebody else has answered it, or its deadline has passed. Yours was not used.")
    if problem.field == "task_id":
        return Problem(ENDED, f"{problem.detail[:1].upper()}{problem.detail[1:]}, so it no longer asks.")
    return problem
