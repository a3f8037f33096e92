"""The schemas of the gateway's OpenAPI document, and the parts that its operations are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime_core.gateway.requests import (
    BODY,
    FIELD,
    FORBIDDEN,
    KINDS,
    MEDIA,
    METHOD,
    NO_HOST,
    OVERLOADED,
    RATE,
    SLOW,
    TOO_LARGE,
    UNAUTHORIZED,
    ProblemKind,
)
from runtime_core.gateway.requests import MEDIA_TYPE as PROBLEM_TYPE
from runtime_core.gateway.tasks import MODES, STATUSES
from runtime_core.wire.commands import SUBMIT
from runtime_core.wire.step import ENDED

Json = dict[str, Any]
"""A part of the document. (Any: JSON.)"""

_EVERY = (METHOD, UNAUTHORIZED, FORBIDDEN, NO_HOST, RATE, OVERLOADED)
_WITH_BODY = (BODY, SLOW, TOO_LARGE, MEDIA, FIELD)
NAME = {"type": "string", "minLength": 1, "maxLength": 256}
TASK_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._@+=-]{0,199}$"}
ANY: Json = {"description": "Any JSON."}
MOMENT = {"type": "string", "format": "date-time"}
TEXT = {"type": "string", "maxLength": 512}
_RETRY_AFTER: Json = {
    "Retry-After": {"description": "Seconds, if a later request may succeed.", "schema": {"type": "integer"}}
}
USAGE: Json = {
    "type": "object",
    "properties": {"models": {"type": "object", "additionalProperties": {"type": "object"}}},
    "additionalProperties": {"type": "number"},
    "description": "Amounts by name; in `models` those of each model.",
}
_WAIT: Json = {
    "name": {"type": "string", "description": "The agent or tool."},
    "since": {"type": "number"},
    "due": {"type": "number", "description": "When it ends or is tried again."},
    "attempt": {"type": "integer"},
    "errors": {"type": "array", "items": {"type": "object"}, "description": "Of the attempts so far."},
    "handler": {"type": "string", "description": "The process that has the call; empty: none has taken it yet."},
    "holder": {"type": "string", "description": "The task that holds the agent's instance."},
    "place": {
        "enum": ["queue", "mail", "nest", "pend", "park"],
        "description": "Where a run waits: for its tenant's turn, in a mailbox, as a nested call, on one, parked.",
    },
    "limit": {"type": "string", "description": "The limit for whose slot it waits."},
    "task_id": {"type": "string", "description": "The task of a called agent in another partition."},
}


def event_schema() -> Json:
    return {
        "type": "object",
        "required": ["specversion", "type", "source", "id", "data"],
        "properties": {
            "specversion": {"const": "1.0"},
            "type": {"const": SUBMIT},
            "source": NAME,
            "id": NAME,
            "time": {"type": "string", "format": "date-time"},
            "datacontenttype": {"const": "application/json"},
            "deadline": MOMENT,
            "tenant": NAME,
            "traceparent": NAME,
            "data": ref("Submit"),
        },
    }


def submit_schema() -> Json:
    optional_name = {"type": ["string", "null"], "minLength": 1, "maxLength": 256}
    conf = {
        "max_steps": {"type": ["integer", "null"], "minimum": 1},
        "timeout_seconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "max_cost": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1},
        "engine": {"type": ["string", "null"], "description": "`local`, `ray`, `spark`, or an engine of the app."},
        "engine_wait_seconds": {
            "type": ["number", "null"],
            "minimum": 0,
            "description": "How long a step waits for an engine that does not run, before it fails. Default: 60.",
        },
        "streaming_mode": {
            "enum": [*MODES, None],
            "description": "`core` and `all` also write steps to the stream. Default: output and questions.",
        },
        "priority": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
    }
    members = {
        "agent": {**NAME, "description": "The agent's name."},
        "input": {"description": "The agent's input: any JSON, at most 1 MiB."},
        "key": {**optional_name, "description": "The instance of the agent, which keeps its own state."},
        "task_id": {
            **TASK_ID,
            "type": ["string", "null"],
            "description": "Your own id. Default: derived from the Idempotency-Key.",
        },
        "session_id": {**optional_name, "description": "Groups tasks."},
        "conf": {**object_of(conf), "type": ["object", "null"]},
        "hooks": {
            "type": ["object", "null"],
            "description": "Names of hooks of the agent's app, by hook point.",
            "additionalProperties": {"type": "array", "items": NAME},
        },
        "metadata": {"type": ["object", "null"], "description": "Your data, passed to the agent."},
    }
    return object_of(members, "agent", "input")


def item_schema() -> Json:
    schema = submit_schema()
    own = {"type": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "The key of this task."}
    return {**schema, "properties": {**schema["properties"], "idempotency_key": own}}


def task_schema() -> Json:
    milliseconds = {"type": "integer"}
    return {
        "type": "object",
        "required": ["task_id", "status", "agent", "created", "steps"],
        "properties": {
            "task_id": {"type": "string"},
            "status": {"enum": list(STATUSES)},
            "agent": {"type": "string"},
            "key": {"type": "string"},
            "session_id": {"type": "string"},
            "tenant": {"type": "string"},
            "created": milliseconds,
            "ended": milliseconds,
            "steps": {"type": "integer"},
            "parked": {"type": "boolean", "description": "In a list: whether its first run is parked."},
            "input": ANY,
            "output": ANY,
            "error": {"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
            "usage": USAGE,
            "limits": {"type": "object"},
            "max_steps": {"type": "integer"},
            "time_limit_at": milliseconds,
            "waits_for": {"type": "array", "items": like({"run": "r", "step": "1", "kind": "timer"}, **_WAIT)},
            "without_handler": {"type": "array", "items": like({"kind": "", "name": ""}, pool={"type": "string"})},
            "questions": {"type": "array", "items": ref("Question")},
            "forked_from": like({"task": "order-6"}, step={"type": ["string", "null"]}),
        },
    }


def delta_schema() -> Json:
    marks = {
        "chunk": "A piece of an output that is being written.",
        "progress": "A report of a call.",
        "restart": "The run's output starts over with this attempt: drop that of lower ones.",
    }
    return object_of(
        {
            "task_id": TASK_ID,
            "run_id": {"type": "string", "description": "The run, or for a model's answer the call, as in `r/3`."},
            "attempt": {"type": "integer"},
            "seq": {"type": "integer", "description": "Counts within the task."},
            **{name: {"const": True, "description": text} for name, text in marks.items()},
            "text": {"type": "string"},
            "value": {"description": "Output that is not text: any other JSON."},
        },
        "task_id", "run_id", "attempt", "seq",
    )  # fmt: skip


def end_schema() -> Json:
    return object_of(
        {
            "task_id": TASK_ID,
            "status": {"enum": list(ENDED)},
            "output": {"description": "Of a completed task: any JSON."},
            "error": error_schema(),
            "usage": USAGE,
            "steps": {"type": "integer", "description": "How many steps its trajectory has."},
            "trajectory": {"type": "string", "description": "The id of its trajectory: that of the task."},
        },
        "task_id", "status", "usage", "steps", "trajectory",
    )  # fmt: skip


def step_schema() -> Json:
    """Return the schema of a row of the record, as in events; `ExportedStep` is that of exports."""
    text, number, error = {"type": "string"}, {"type": "number"}, ref("StepError")
    example = {"run": "r", "kind": "tool", "name": "search", "status": "completed", "started": 0.0, "ended": 0.0}
    more = dict.fromkeys(("step", "key", "cause", "owner", "input_after"), text)
    return like(
        example, **more, attempt={"type": "integer"}, input=ANY, output=ANY, error=error, committed=number,
        errors={"type": "array", "items": error}, usage={"type": "object", "additionalProperties": number},
        attributes={"type": "object"}, fork={"type": "object"},
    )  # fmt: skip


def error_schema() -> Json:
    return object_of({"type": {"type": "string"}, "message": {"type": "string"}}, "type", "message")


def question_schema() -> Json:
    return {
        "type": "object",
        "required": ["task_id", "request_id", "prompt"],
        "properties": {
            "task_id": {"type": "string"},
            "request_id": {"type": "string"},
            "prompt": {"type": "string"},
            "data": ANY,
            "expects": {
                "const": "verdict",
                "description": "The answer is true, false, or an object with `verdict` (`approve`, `deny`, `edit`), "
                "`value` and `reason`.",
            },
            "schema": {"type": "object", "description": "The JSON schema of the answer; without it, any JSON."},
            "agent": {"type": "string", "description": "In a list: the agent of the task."},
            "created": {"type": "number", "description": "In a list: when the task was created (epoch ms)."},
            "deadline": {
                "type": ["number", "string"],
                "description": "When the default becomes the answer, or the question fails: in an event as RFC 3339.",
            },
            "default": ANY,
        },
    }


def problem_schema() -> Json:
    return {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"enum": [f"urn:weft:problem:{kind.name}" for kind in KINDS]},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "field": {
                "type": "string",
                "description": "What is wrong: a path in the body (`conf.max_steps`), a parameter or a header.",
            },
            "retry_after_seconds": {"type": "number"},
        },
    }


# -- parts -------------------------------------------------------------------------------------------------------


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(properties: Json, *required: str) -> Json:
    found = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": list(required)} if required else found


def whole_of(properties: Json) -> Json:
    """Return the schema of objects with exactly these members."""
    return object_of(properties, *properties)


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def page_of(name: str, item: str, example: object, description: str = "A page of the list.") -> Json:
    """Return the response with a page of a list, whose items have the schema `item`."""
    next_cursor = {"type": ["string", "null"], "description": "null at the end of the list."}
    schema = whole_of({name: list_of(ref(item)), "next_cursor": next_cursor})
    return json_of(description, schema, {name: [example], "next_cursor": None})


def like(example: Json, **more: Json) -> Json:
    """Return the schema of objects with the members of an example; null there is any type. `more` may be absent."""
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    members: Json = {name: {} if each is None else {"type": types[type(each)]} for name, each in example.items()}
    return {"type": "object", "required": list(example), "properties": {**members, **more}}


def body_of(schema: Json, example: object, *, required: bool = True) -> Json:
    return {"required": required, "content": {"application/json": {"schema": schema, "example": example}}}


def json_of(description: str, schema: Json, example: object = None) -> Json:
    content: Json = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {"description": description, "content": {"application/json": content}}


def started(description: str, task: str = "order-7") -> Json:
    """Return the response of an operation that starts a task."""
    location = {"description": "The path of the task.", "schema": {"type": "string"}}
    return {**json_of(description, ref("Started"), {"task_id": task}), "headers": {"Location": location}}


def problems(*kinds: ProblemKind) -> Json:
    """Return the responses of an operation with these problems, and with those of every operation."""
    by_status: dict[int, list[ProblemKind]] = {}
    for kind in (*kinds, *_EVERY):
        if kind not in by_status.setdefault(kind.status.value, []):
            by_status[kind.status.value].append(kind)
    return {
        str(status): {
            "description": "; ".join(kind.title for kind in found) + ".",
            "content": {PROBLEM_TYPE: {"schema": ref("Problem"), "example": _example(found[0])}},
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status, found in sorted(by_status.items())
    }


def _example(kind: ProblemKind) -> Json:
    return {
        "type": f"urn:weft:problem:{kind.name}",
        "title": kind.title,
        "status": kind.status.value,
        "detail": "what is wrong, with its value, and the remedy",
    }


def operation(
    name: str,
    summary: str,
    parameters: Sequence[Json],
    responses: Json,
    *kinds: ProblemKind,
    about: str = "",
    body: Json | None = None,
) -> Json:
    """Return an operation. `kinds` are its problems, besides those of its body and of every operation."""
    found: Json = {"operationId": name, "summary": summary}
    if about:
        found["description"] = about
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"], kinds = body, (*_WITH_BODY, *kinds)
    return {**found, "responses": {**responses, **problems(*kinds)}}


def query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": schema}


CURSOR = query("cursor", {"type": "string", "maxLength": 400}, "`next_cursor` of the page before.")


def task_id() -> Json:
    return {"name": "task_id", "in": "path", "required": True, "schema": TASK_ID}


def idempotency_key() -> Json:
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "Identifies repeats of this request for 24 hours. Choose it before the first attempt.",
        "schema": NAME,
    }


def traceparent() -> Json:
    text = "The trace that the task belongs to (W3C Trace Context)."
    return {"name": "traceparent", "in": "header", "description": text, "schema": NAME}
