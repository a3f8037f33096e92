"""The OpenAPI 3.1 document of the gateway."""

from __future__ import annotations

from typing import Any

from runtime_core.gateway.requests import (
    BODY,
    CONFLICT,
    FIELD,
    FORBIDDEN,
    KINDS,
    MEDIA,
    METHOD,
    NO_HOST,
    NO_TASK,
    OVERLOADED,
    PARAMETER,
    RATE,
    SLOW,
    STREAMS,
    TOO_LARGE,
    UNAUTHORIZED,
    Kind,
)
from runtime_core.gateway.requests import MEDIA_TYPE as PROBLEM_TYPE
from runtime_core.gateway.tasks import BATCH_MAX, BATCHED, MODES, PAGE, PAGE_MAX, STATUSES, STRUCTURED
from runtime_core.gateway.tasks import MEDIA_TYPE as STREAM_TYPE
from runtime_core.telemetry.metrics import version
from runtime_core.wire.commands import SUBMIT

Json = dict[str, Any]
"""A part of the document. (Any: JSON.)"""

_EVERY = (METHOD, UNAUTHORIZED, FORBIDDEN, NO_HOST, RATE, OVERLOADED)
WITH_BODY = (BODY, SLOW, TOO_LARGE, MEDIA, FIELD)
NAME = {"type": "string", "minLength": 1, "maxLength": 256}
TASK_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._@+=-]{0,199}$"}
MOMENT = {"type": "string", "format": "date-time"}
_WAIT: Json = {name: {"type": "string"} for name in ("name", "holder")}
_WAIT |= {"since": {}, "due": {}, "attempt": {"type": "integer"}, "errors": {}}


def document(resources: Json, schemas: Json) -> Json:
    """Return the whole document; `resources` are the paths of resources beside tasks, with their `schemas`."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Weft",
            "version": version(),
            "description": "Start tasks of agents, follow them, answer their questions, and look after what failed. "
            "Times that are numbers are milliseconds since 1970 (UTC).",
        },
        "paths": {
            "/v1/tasks": {"post": _submit(), "get": _list()},
            "/v1/batches": {"post": _batch()},
            "/v1/events": {"post": _receive()},
            "/v1/tasks/{task_id}": {"get": _show()},
            "/v1/tasks/{task_id}/cancel": {"post": _cancel()},
            "/v1/tasks/{task_id}/answers": {"post": _answer()},
            "/v1/tasks/{task_id}/messages": {"post": _send()},
            "/v1/questions": {"get": _questions()},
            "/v1/tasks/{task_id}/events": {"get": _events()},
            **resources,
            "/openapi.json": {"get": _describe()},
        },
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, or a token of the identity provider; nothing if the gateway is open.",
                }
            },
            "schemas": {
                "Submit": _submit_schema(),
                "BatchItem": _item_schema(),
                "Event": _event_schema(),
                "Started": object_of({"task_id": TASK_ID}, "task_id"),
                "Task": _task_schema(),
                "Question": _question_schema(),
                "Problem": _problem_schema(),
                **schemas,
            },
        },
    }


# -- operations --------------------------------------------------------------------------------------------------


def _submit() -> Json:
    return {
        "operationId": "submit",
        "summary": "Start a task",
        "description": "A repeat with the same Idempotency-Key and content returns the first one's task and starts "
        "nothing. With other content it is refused (409).",
        "parameters": [idempotency_key(), _traceparent()],
        "requestBody": body_of(
            ref("Submit"), {"agent": "writer", "input": {"topic": "Redis Streams"}, "conf": {"max_steps": 50}}
        ),
        "responses": {
            "202": {
                **json_of("The task is durable and will be handled.", ref("Started"), {"task_id": "order-7"}),
                "headers": {"Location": {"description": "The task.", "schema": {"type": "string"}}},
            },
            **problems(*WITH_BODY, PARAMETER, CONFLICT),
        },
    }


def _results() -> tuple[Json, Json]:
    """Return the schema of the results of a batch, and an example."""
    result = {"oneOf": [object_of({"task_id": TASK_ID}, "task_id"), object_of({"problem": ref("Problem")}, "problem")]}
    problem = {
        "type": f"urn:weft:problem:{FIELD.name}",
        "title": FIELD.title,
        "status": FIELD.status.value,
        "detail": "no agent is named nobody",
        "field": "agent",
    }
    example = {"results": [{"task_id": "c87e2d1168d4a1a2e44105c45477bf49"}, {"problem": problem}]}
    return object_of({"results": {"type": "array", "items": result}}, "results"), example


def _receive() -> Json:
    event = {
        "specversion": "1.0", "type": SUBMIT, "source": "shop", "id": "order-7",
        "data": {"agent": "writer", "input": {"topic": "Redis Streams"}},
    }  # fmt: skip
    attributes = {
        "specversion": ({"const": "1.0"}, "In binary mode, the attributes of the event are headers."),
        "type": ({"const": SUBMIT}, "The type of the event."),
        "source": (NAME, "The sender. With `id` it identifies repeats, for each tenant."),
        "id": (NAME, "The id of the event."),
        "deadline": (MOMENT, "The work is not wanted after this moment."),
        "tenant": (NAME, "Only for keys without a tenant: the tenant of the task."),
    }
    schema, example = _results()
    return {
        "operationId": "receiveEvents",
        "summary": "Start tasks by CloudEvents",
        "description": "Takes a `weft.task.submit` in binary or structured mode, or a batch of them. A repeat with the "
        "same source, id and data starts nothing. Each event of a batch is accepted or refused individually.",
        "parameters": [
            *({"name": f"ce-{name}", "in": "header", "description": text, "schema": schema}
              for name, (schema, text) in attributes.items()),
            _traceparent(),
        ],
        "requestBody": {
            "required": True,
            "content": {
                STRUCTURED: {"schema": ref("Event"), "example": event},
                BATCHED: {
                    "schema": {"type": "array", "maxItems": BATCH_MAX, "items": ref("Event")},
                    "example": [event, {**event, "id": "order-8", "data": {"agent": "nobody", "input": "b"}}],
                },
                "application/json": {"schema": ref("Submit"), "example": event["data"]},
            },
        },
        "responses": {
            "202": {
                **json_of("The task is durable and will be handled.", ref("Started"), {"task_id": "order-7"}),
                "headers": {"Location": {"description": "The task.", "schema": {"type": "string"}}},
            },
            "200": json_of("What came of each event of a batch.", schema, example),
            **problems(*WITH_BODY, PARAMETER, CONFLICT),
        },
    }  # fmt: skip


def _event_schema() -> Json:
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


def _batch() -> Json:
    schema, example = _results()
    return {
        "operationId": "submitBatch",
        "summary": "Start many tasks",
        "description": "Each task is accepted or refused individually; the results are in the order of the tasks. "
        "With an Idempotency-Key, the task at place n has the key `<key>/<n>`, unless it has its own.",
        "parameters": [idempotency_key(), _traceparent()],
        "requestBody": body_of(
            object_of(
                {"tasks": {"type": "array", "minItems": 1, "maxItems": BATCH_MAX, "items": ref("BatchItem")}}, "tasks"
            ),
            {"tasks": [{"agent": "writer", "input": "a"}, {"agent": "nobody", "input": "b"}]},
        ),
        "responses": {
            "200": json_of("What came of each task.", schema, example),
            **problems(*WITH_BODY, PARAMETER),
        },
    }


def _list() -> Json:
    filters: dict[str, tuple[Json, str]] = {
        "status": ({"enum": list(STATUSES)}, "Only tasks with this status."),
        "agent": ({"type": "string", "maxLength": 512}, "Only tasks of this agent."),
        "key": ({"type": "string", "maxLength": 512}, "Only tasks of this instance of an agent."),
        "session_id": ({"type": "string", "maxLength": 512}, "Only tasks of this session."),
        "tenant": ({"type": "string", "maxLength": 512}, "Only tasks of this tenant."),
        "since": (MOMENT, "Only tasks created at this time or later."),
        "until": (MOMENT, "Only tasks created before this time."),
        "text": ({"type": "string", "maxLength": 512}, "Only tasks with this text in their input or error."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}, "The most tasks."),
        "cursor": ({"type": "string", "maxLength": 400}, "`next_cursor` of the page before."),
    }
    page = object_of(
        {
            "tasks": {"type": "array", "items": ref("Task")},
            "next_cursor": {"type": ["string", "null"], "description": "null at the end of the list."},
        },
        "tasks",
        "next_cursor",
    )
    row = {"task_id": "order-7", "status": "running", "agent": "writer", "created": 1763690000000, "steps": 0}
    return {
        "operationId": "listTasks",
        "summary": "List tasks, the newest first",
        "description": "The tasks on the broker: open ones, and ended ones until their retention time is over. A page "
        "may have fewer tasks than `limit`; the list ends where `next_cursor` is null.",
        "parameters": [query(name, schema, text) for name, (schema, text) in filters.items()],
        "responses": {
            "200": json_of("A page of the list.", page, {"tasks": [row], "next_cursor": None}),
            **problems(PARAMETER),
        },
    }


def _show() -> Json:
    example = {
        "task_id": "order-7", "status": "completed", "agent": "writer", "created": 1763690000000, "steps": 7,
        "ended": 1763690004200, "input": {"topic": "Redis Streams"}, "output": "Redis Streams are …", "usage": {},
    }  # fmt: skip
    return {
        "operationId": "showTask",
        "summary": "Show a task",
        "parameters": [task_id()],
        "responses": {
            "200": json_of("The task, with its output or error, or what it waits for.", ref("Task"), example),
            **problems(PARAMETER, NO_TASK),
        },
    }


def _cancel() -> Json:
    return {
        "operationId": "cancelTask",
        "summary": "Cancel a task",
        "description": "The task ends now. Cancelling an ended task changes nothing.",
        "parameters": [task_id()],
        "requestBody": body_of(
            object_of({"reason": {"type": ["string", "null"], "minLength": 1, "maxLength": 1000}}),
            {"reason": "no longer needed"},
        ),
        "responses": {
            "200": json_of(
                "The status that the task has ended with.",
                object_of({"task_id": TASK_ID, "status": {"type": "string"}}, "task_id", "status"),
                {"task_id": "order-7", "status": "cancelled"},
            ),
            **problems(*WITH_BODY, NO_TASK),
        },
    }


def _answer() -> Json:
    answered = {"task_id": "order-7", "request_id": "r:4-9b1deb4d3b7d4bad"}
    return {
        "operationId": "answerQuestion",
        "summary": "Answer a question of a task",
        "description": "Of two answers, one counts; the other is refused (409).",
        "parameters": [task_id()],
        "requestBody": body_of(
            object_of({"request_id": NAME, "value": {"description": "Any JSON."}}, "request_id", "value"),
            {"request_id": "r:4-9b1deb4d3b7d4bad", "value": True},
        ),
        "responses": {
            "200": json_of(
                "The answer counts.",
                object_of({"task_id": TASK_ID, "request_id": NAME}, "task_id", "request_id"),
                answered,
            ),
            **problems(*WITH_BODY, NO_TASK, CONFLICT),
        },
    }


def _send() -> Json:
    return {
        "operationId": "sendMessage",
        "summary": "Send a message to a running task",
        "description": "The task receives it with `ctx.receive(name)`, now or later. A repeat with the same "
        "Idempotency-Key and value sends nothing; with another value it is refused (409), as is a message to a task "
        "that has ended or keeps too many messages.",
        "parameters": [task_id(), idempotency_key()],
        "requestBody": body_of(
            object_of({"name": NAME, "value": {"description": "Any JSON."}}, "name", "value"),
            {"name": "price-changed", "value": {"price": 12.5}},
        ),
        "responses": {
            "200": json_of(
                "The task has the message.",
                object_of({"task_id": TASK_ID, "name": NAME}, "task_id", "name"),
                {"task_id": "order-7", "name": "price-changed"},
            ),
            **problems(*WITH_BODY, PARAMETER, NO_TASK, CONFLICT),
        },
    }


def _questions() -> Json:
    question = {
        "task_id": "order-7", "request_id": "r:4-9b1deb4d3b7d4bad", "prompt": "Publish it?", "data": {"words": 640},
        "agent": "writer", "created": 1763690000000,
    }  # fmt: skip
    return {
        "operationId": "listQuestions",
        "summary": "List open questions, those of the oldest tasks first",
        "parameters": [
            query(
                "limit", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}, "The most questions."
            )
        ],
        "responses": {
            "200": json_of(
                "The questions, each with the agent of its task and when the task was created.",
                object_of({"questions": {"type": "array", "items": ref("Question")}}, "questions"),
                {"questions": [question]},
            ),
            **problems(PARAMETER),
        },
    }


def _events() -> Json:
    text = {"type": "string"}
    event = object_of({"id": text, "event": text, "data": {**text, "description": "JSON."}}, "id", "event", "data")
    data = '{"task_id":"order-7","run_id":"r","attempt":1,"seq":1,"text":"Redis "}'
    example = {"id": "1763690000000-0", "event": "weft.output.delta", "data": data}
    return {
        "operationId": "taskEvents",
        "summary": "Follow the events of a task",
        "description": "Server-sent events: output, steps, questions, and the final event, which ends the stream. The "
        "id is that of the stream's entry; send it as `Last-Event-ID` to continue behind it. Output of a run with a "
        "higher `attempt` replaces the output of its lower attempts. Silence is broken by comments.\n\n"
        "| event | data |\n|---|---|\n"
        "| `weft.task.accepted` | `task_id` |\n"
        "| `weft.output.delta` | `run_id`, `attempt`, `seq`, and `text` or `value`; `progress` marks a report of a "
        "tool, `restart` that the run's output starts over |\n"
        "| `weft.human.requested` | a Question; answer it with `answerQuestion` |\n"
        "| `weft.step.recorded` | a step: `run_id`, `step`, `kind`, `name`, `status` |\n"
        "| `weft.task.completed`, `weft.task.failed`, `weft.task.cancelled` | the end: `status`, `output` or `error`, "
        "`usage`, `steps` |",
        "parameters": [
            task_id(),
            query("mode", {"enum": list(MODES)}, "Selects events. Default: all that the task writes."),
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "The id of the last event that you have.",
                "schema": {"type": "string", "pattern": r"^[0-9]{1,19}-[0-9]{1,19}(-end)?$"},
            },
        ],
        "responses": {
            "200": {
                "description": "The events, until the task has ended.",
                "content": {STREAM_TYPE: {"schema": event, "example": example}},
            },
            "204": {"description": "The task has ended, and you have its final event."},
            **problems(PARAMETER, NO_TASK, STREAMS),
        },
    }


def _describe() -> Json:
    return {
        "operationId": "describe",
        "summary": "This document",
        "security": [],
        "responses": {"200": json_of("OpenAPI 3.1.", {"type": "object"}), **problems()},
    }


# -- schemas -----------------------------------------------------------------------------------------------------


def _submit_schema() -> Json:
    optional_name = {"type": ["string", "null"], "minLength": 1, "maxLength": 256}
    conf = {
        "max_steps": {"type": ["integer", "null"], "minimum": 1},
        "timeout_seconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "max_cost": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1},
        "engine": {"type": ["string", "null"], "description": "`local`, `ray`, `spark`, or an engine of the app."},
        "engine_wait_seconds": {"type": ["number", "null"], "minimum": 0},
        "streaming_mode": {"enum": [*MODES, None], "description": "Which events the stream has."},
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


def _item_schema() -> Json:
    schema = _submit_schema()
    own = {"type": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "The key of this task."}
    return {**schema, "properties": {**schema["properties"], "idempotency_key": own}}


def _task_schema() -> Json:
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
            "input": {},
            "output": {},
            "error": {"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
            "usage": {"type": "object", "description": "Amounts by name; in `models` those of each model."},
            "limits": {"type": "object"},
            "max_steps": {"type": "integer"},
            "time_limit_at": milliseconds,
            "waits_for": {"type": "array", "items": like({"run": "r", "step": "1", "kind": "timer"}, **_WAIT)},
            "without_handler": {"type": "array", "items": like({"kind": "", "name": ""}, pool={"type": "string"})},
            "questions": {"type": "array", "items": ref("Question")},
            "forked_from": like({"task": "order-6"}, step={}),
        },
    }


def _question_schema() -> Json:
    return {
        "type": "object",
        "required": ["task_id", "request_id", "prompt"],
        "properties": {
            "task_id": {"type": "string"},
            "request_id": {"type": "string"},
            "prompt": {"type": "string"},
            "data": {},
            "expects": {
                "const": "verdict",
                "description": "The answer is true, false, or an object with `verdict` (`approve`, `deny`, `edit`), "
                "`value` and `reason`.",
            },
            "schema": {"type": "object", "description": "The JSON schema of the answer; without it, any JSON."},
            "agent": {"type": "string", "description": "In a list: the agent of the task."},
            "created": {"type": "number", "description": "In a list: when the task was created (epoch ms)."},
            "deadline": {"description": "When the default becomes the answer, or the question fails."},
            "default": {},
        },
    }


def _problem_schema() -> Json:
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


def like(example: Json, **more: Json) -> Json:
    """Return the schema of objects with the members of an example; null there is any type. `more` may be absent."""
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    members: Json = {name: {} if each is None else {"type": types[type(each)]} for name, each in example.items()}
    return {"type": "object", "required": list(example), "properties": {**members, **more}}


def body_of(schema: Json, example: object) -> Json:
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def json_of(description: str, schema: Json, example: object = None) -> Json:
    content: Json = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {"description": description, "content": {"application/json": content}}


def problems(*kinds: Kind) -> Json:
    """Return the responses of an operation with these problems, and with those of every operation."""
    by_status: dict[int, list[Kind]] = {}
    for kind in (*kinds, *_EVERY):
        if kind not in by_status.setdefault(kind.status.value, []):
            by_status[kind.status.value].append(kind)
    return {
        str(status): {
            "description": "; ".join(kind.title for kind in found) + ".",
            "content": {PROBLEM_TYPE: {"schema": ref("Problem"), "example": _example(found[0])}},
        }
        for status, found in sorted(by_status.items())
    }


def _example(kind: Kind) -> Json:
    return {
        "type": f"urn:weft:problem:{kind.name}",
        "title": kind.title,
        "status": kind.status.value,
        "detail": "what is wrong, with its value, and the remedy",
    }


def query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def task_id() -> Json:
    return {"name": "task_id", "in": "path", "required": True, "schema": TASK_ID}


def idempotency_key() -> Json:
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "Identifies repeats of this request for 24 hours. Choose it before the first attempt.",
        "schema": NAME,
    }


def _traceparent() -> Json:
    text = "The trace that the task belongs to (W3C Trace Context)."
    return {"name": "traceparent", "in": "header", "description": text, "schema": NAME}
