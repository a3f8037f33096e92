"""The OpenAPI 3.1 document of the gateway, with the operations of tasks."""

from __future__ import annotations

from collections.abc import Mapping

from runtime_core.gateway.openapi_schemas import (
    ANY,
    CURSOR,
    MOMENT,
    NAME,
    TASK_ID,
    TEXT,
    Json,
    body_of,
    delta_schema,
    end_schema,
    event_schema,
    idempotency_key,
    item_schema,
    json_of,
    like,
    list_of,
    object_of,
    operation,
    page_of,
    problem_schema,
    query,
    question_schema,
    ref,
    started,
    step_schema,
    submit_schema,
    task_id,
    task_schema,
    traceparent,
    whole_of,
)
from runtime_core.gateway.requests import (
    BATCH_MAX_BYTES,
    BODY_MAX_BYTES,
    BODY_SECONDS,
    CONFLICT,
    FIELD,
    NO_TASK,
    PARAMETER,
    STREAMS,
)
from runtime_core.gateway.tasks import BATCH_MAX, BATCHED, MODES, PAGE, PAGE_MAX, STATUSES, STRUCTURED
from runtime_core.gateway.tasks import MEDIA_TYPE as STREAM_TYPE
from runtime_core.telemetry.metrics import version
from runtime_core.wire.commands import SUBMIT
from runtime_core.wire.events import HUMAN_REQUESTED, OUTPUT_DELTA, STEP_RECORDED
from runtime_core.wire.step import ENDED

_ABOUT = f"""\
Start tasks of agents, follow them, answer their questions, and handle failures. Times that are numbers are milliseconds
since 1970 (UTC).

**Who may call.** With keys, each operation takes the role in its `x-role`: `submit`, `read`, `answer` or `operate`. A
key with a tenant reaches that tenant only: ids of tasks and schedules get the prefix `<tenant>.`, in answers too; you
may send them with or without it.

**From a browser.** `WEFT_HTTP_ORIGINS` of the gateway lists the origins whose pages may call it (CORS). `EventSource`
sends no key: read streams with `fetch`.

**Limits.** A body has at most {BODY_MAX_BYTES >> 20} MiB, one with several tasks {BATCH_MAX_BYTES >> 20} MiB, and
arrives within {BODY_SECONDS:g} seconds. The gateway may limit the requests of a caller and its open streams of events
and of steps (429). Answers 429 and 503 say in `Retry-After` when to send the same request again.

**New tasks.** An answer 202 has the path of the task in `Location`."""


def document(resources: Json, schemas: Json, roles: Mapping[tuple[str, str], str]) -> Json:
    """Return the whole document; `resources` are the paths of resources other than tasks, with their `schemas`.

    `roles` has the role of each method and path; empty: none is needed.
    """
    found = _document(resources, schemas)
    for (method, path), role in roles.items():
        if role:
            found["paths"][path][method.lower()]["x-role"] = role
    return found


def _document(resources: Json, schemas: Json) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": version(), "description": _ABOUT},
        "paths": {
            "/v1/tasks": {"post": _submit(), "get": _list()},
            "/v1/batches": {"post": _batch()},
            "/v1/events": {"post": _receive()},
            "/v1/tasks/{task_id}": {"get": _show()},
            "/v1/tasks/{task_id}/cancel": {"post": _cancel()},
            "/v1/tasks/{task_id}/answers": {"post": _answer()},
            "/v1/tasks/{task_id}/messages": {"post": _send()},
            "/v1/agents": {"get": _agents()},
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
                "Submit": submit_schema(),
                "BatchItem": item_schema(),
                "Event": event_schema(),
                "Started": whole_of({"task_id": TASK_ID}),
                "Task": task_schema(),
                "OutputDelta": delta_schema(),
                "RecordedSteps": whole_of({"task_id": TASK_ID, "steps": list_of(ref("Step"))}),
                "Step": step_schema(),
                "TaskEnd": end_schema(),
                "Question": question_schema(),
                "Problem": problem_schema(),
                **schemas,
            },
        },
    }


# -- operations --------------------------------------------------------------------------------------------------


_ACCEPTED = "The task will be handled, and is as durable as WEFT_DURABILITY says."
_TWO_INPUTS = ({"topic": "Redis Streams"}, {"topic": "Valkey"})


def _submit() -> Json:
    example = {"agent": "writer", "input": _TWO_INPUTS[0], "conf": {"max_steps": 50}}
    return operation(
        "submit", "Start a task", [idempotency_key(), traceparent()], {"202": started(_ACCEPTED)}, PARAMETER, CONFLICT,
        about="A repeat with the same Idempotency-Key and content returns the first one's task and starts nothing. "
        "With different content it is refused (409).",
        body=body_of(ref("Submit"), example),
    )  # fmt: skip


def _results() -> tuple[Json, Json]:
    """Return the schema of the results of a batch, and an example."""
    result = {"oneOf": [whole_of({"task_id": TASK_ID}), whole_of({"problem": ref("Problem")})]}
    problem = {
        "type": f"urn:weft:problem:{FIELD.name}",
        "title": FIELD.title,
        "status": FIELD.status.value,
        "detail": "a task with this id has a different input",
        "field": "task_id",
    }
    example = {"results": [{"task_id": "c87e2d1168d4a1a2e44105c45477bf49"}, {"problem": problem}]}
    return whole_of({"results": list_of(result)}), example


def _receive() -> Json:
    first, second = (
        {"specversion": "1.0", "type": SUBMIT, "source": "shop", "id": id, "data": {"agent": "writer", "input": input}}
        for id, input in zip(("order-7", "order-8"), _TWO_INPUTS, strict=True)
    )
    required = "In binary mode (application/json) required. "
    attributes = {
        "specversion": ({"const": "1.0"}, required + "The version of CloudEvents.", "1.0"),
        "type": ({"const": SUBMIT}, required + "The type of the event.", SUBMIT),
        "source": (NAME, required + "The sender. With `id` it identifies repeats, for each tenant.", "shop"),
        "id": (NAME, required + "The id of the event.", "order-7"),
        "deadline": (MOMENT, "The work is not wanted after this moment.", "2030-01-01T00:00:00Z"),
        "tenant": (NAME, "Only for keys without a tenant: the tenant of the task.", None),
    }
    headers = [
        {"name": f"ce-{name}", "in": "header", "description": text, "schema": schema}
        | ({} if example is None else {"example": example})
        for name, (schema, text, example) in attributes.items()
    ]
    batch = {"type": "array", "maxItems": BATCH_MAX, "items": ref("Event")}
    contents = {
        STRUCTURED: {"schema": ref("Event"), "example": first},
        BATCHED: {"schema": batch, "example": [first, second]},
        "application/json": {"schema": ref("Submit"), "example": first["data"]},  # with the headers above
    }
    schema, example = _results()
    return operation(
        "receiveEvents", "Start tasks by CloudEvents", [*headers, traceparent()],
        {"202": started(_ACCEPTED), "200": json_of("The result of each event of the batch.", schema, example)},
        PARAMETER, CONFLICT,
        about="Takes a `weft.task.submit` in binary or structured mode, or a batch of them. A repeat with the same "
        "source, id and data starts nothing. Each event of a batch is accepted or refused individually.",
        body={"required": True, "content": contents},
    )  # fmt: skip


def _batch() -> Json:
    schema, example = _results()
    tasks = {"type": "array", "minItems": 1, "maxItems": BATCH_MAX, "items": ref("BatchItem")}
    return operation(
        "submitBatch", "Start many tasks", [idempotency_key(), traceparent()],
        {"200": json_of("The result of each task.", schema, example)}, PARAMETER,
        about="Each task is accepted or refused individually; the results are in the order of the tasks. With an "
        "Idempotency-Key, the task at place n has the key `<key>/<n>`, unless it has its own.",
        body=body_of(
            whole_of({"tasks": tasks}), {"tasks": [{"agent": "writer", "input": input} for input in _TWO_INPUTS]}
        ),
    )  # fmt: skip


def _list() -> Json:
    filters: dict[str, tuple[Json, str]] = {
        "status": ({"enum": list(STATUSES)}, "Only tasks with this status."),
        "agent": (TEXT, "Only tasks of this agent."),
        "key": (TEXT, "Only tasks of this instance of an agent."),
        "session_id": (TEXT, "Only tasks of this session."),
        "tenant": (TEXT, "Only tasks of this tenant."),
        "since": (MOMENT, "Only tasks created at this time or later."),
        "until": (MOMENT, "Only tasks created before this time."),
        "text": (TEXT, "Only tasks with this text in their input or error."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}, "The most tasks."),
    }
    row = {"task_id": "order-7", "status": "running", "agent": "writer", "created": 1763690000000, "steps": 0}
    return operation(
        "listTasks", "List tasks, the newest first",
        [*(query(name, schema, text) for name, (schema, text) in filters.items()), CURSOR],
        {"200": page_of("tasks", "Task", row)}, PARAMETER,
        about="The tasks on the broker: open ones, and ended ones until their retention time is over. A page may have "
        "fewer tasks than `limit`; the list ends where `next_cursor` is null.",
    )  # fmt: skip


def _show() -> Json:
    example = {
        "task_id": "order-7", "status": "completed", "agent": "writer", "created": 1763690000000, "steps": 7,
        "ended": 1763690004200, "input": {"topic": "Redis Streams"}, "output": "Redis Streams are …", "usage": {},
    }  # fmt: skip
    found = json_of("The task, with its output or error, or what it waits for.", ref("Task"), example)
    return operation("showTask", "Show a task", [task_id()], {"200": found}, PARAMETER, NO_TASK)


def _cancel() -> Json:
    reason = {"type": ["string", "null"], "minLength": 1, "maxLength": 1000}
    ended = json_of(
        "The status that the task has ended with.",
        whole_of({"task_id": TASK_ID, "status": {"type": "string"}}),
        {"task_id": "order-7", "status": "cancelled"},
    )
    return operation(
        "cancelTask", "Cancel a task", [task_id()], {"200": ended}, NO_TASK,
        about="The task ends now. Cancelling an ended task changes nothing.",
        body=body_of(object_of({"reason": reason}), {"reason": "no longer needed"}, required=False),
    )  # fmt: skip


def _answer() -> Json:
    answered = {"task_id": "order-7", "request_id": "r:4-9b1deb4d3b7d4bad"}
    return operation(
        "answerQuestion", "Answer a question of a task", [task_id()],
        {"200": json_of("The answer counts.", whole_of({"task_id": TASK_ID, "request_id": NAME}), answered)},
        NO_TASK, CONFLICT,
        about="Of two answers, one counts; the other is refused (409).",
        body=body_of(
            whole_of({"request_id": NAME, "value": ANY}), {"request_id": answered["request_id"], "value": True}
        ),
    )  # fmt: skip


def _send() -> Json:
    sent = {"task_id": "order-7", "name": "price-changed"}
    return operation(
        "sendMessage", "Send a message to a running task", [task_id(), idempotency_key()],
        {"200": json_of("The task has the message.", whole_of({"task_id": TASK_ID, "name": NAME}), sent)},
        PARAMETER, NO_TASK, CONFLICT,
        about="The task receives it with `ctx.receive(name)`, now or later. A repeat with the same Idempotency-Key and "
        "value sends nothing; with a different value it is refused (409), as is a message to a task that has ended or "
        "keeps too many messages.",
        body=body_of(whole_of({"name": NAME, "value": ANY}), {"name": sent["name"], "value": {"price": 12.5}}),
    )  # fmt: skip


def _agents() -> Json:
    schema = {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}
    agent = {"name": "writer", "app": "desk", "description": "Writes about a topic.", "input": schema}
    maybe = {"type": ["object", "null"], "description": "The JSON schema of the input; null: any JSON."}
    found = json_of("The agents.", whole_of({"agents": list_of(like(agent, input=maybe))}), {"agents": [agent]})
    return operation(
        "listAgents", "List the agents to which you may submit, by name", [], {"200": found}, PARAMETER,
        about="As their handlers have declared them; the handlers need not run now. Internal agents and those of the "
        "runtime are left out. A key with a tenant gets the agents that it lists, else none: it may submit to others, "
        "but their names are not shown to tenants.",
    )  # fmt: skip


def _questions() -> Json:
    question = {
        "task_id": "order-7", "request_id": "r:4-9b1deb4d3b7d4bad", "prompt": "Publish it?", "data": {"words": 640},
        "agent": "writer", "created": 1763690000000,
    }  # fmt: skip
    limit = {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}
    about = "The questions, each with the agent of its task and when the task was created."
    cursor = query("cursor", TEXT, "`next_cursor` of the page before.")
    return operation(
        "listQuestions", "List open questions, those of the oldest tasks first",
        [query("limit", limit, "The most questions."), cursor],
        {"200": page_of("questions", "Question", question, about)}, PARAMETER,
    )  # fmt: skip


EVENT_DATA = {
    OUTPUT_DELTA: "OutputDelta",
    HUMAN_REQUESTED: "Question",
    STEP_RECORDED: "RecordedSteps",
    **{f"weft.task.{status}": "TaskEnd" for status in ENDED},
}
"""The schema of the data of each event of a task."""
_FOLLOW = """\
Server-sent events: output, questions, steps on request, and the final event, which ends the stream.
The first block has only `retry: 1000`; each later one has `id`, `event` and `data`, which is JSON. A comment breaks
a silence of 15 seconds.

| event | data | comes |
|---|---|---|
| `weft.output.delta` | OutputDelta | for each piece of output |
| `weft.human.requested` | Question | for each question; answer it with `answerQuestion` |
| `weft.step.recorded` | RecordedSteps | for each commit with finished steps, only on request |
| `weft.task.completed`, `weft.task.failed`, `weft.task.cancelled` | TaskEnd | once, at the end |

A task writes its steps if its `conf.streaming_mode` is `core` or `all`, or from the moment that a reader follows it
with such a `mode`. `mode` selects what this reader gets, besides questions and the end: `core` steps; `chunk` deltas
with `chunk` or `progress`; `output` the other deltas; `chunk_output` all deltas; `all` everything. Without `mode` a
reader gets all that the task writes.

Output of a run with a higher `attempt` replaces the output of its lower attempts.

No event says that a question was answered or has expired: read the task again, whose `questions` are the open ones.

The id is that of the stream's entry; send it as `Last-Event-ID` to resume after it. An id that is later than the last
event, as after a broker has lost its last second, starts the stream from its beginning: discard the ids that you have.

The `EventSource` of browsers sends no `Authorization`: read the stream with `fetch` instead."""


def _events() -> Json:
    text = {"type": "string"}
    members = {"retry": {"type": "integer"}, "id": text, "event": {"enum": list(EVENT_DATA)}, "data": text}
    data = '{"task_id":"order-7","run_id":"r","attempt":1,"seq":1,"text":"Redis "}'
    content = {
        "schema": object_of(members),
        "example": {"id": "1763690000000-0", "event": OUTPUT_DELTA, "data": data},
        "x-event-data": {event: ref(schema) for event, schema in EVENT_DATA.items()},
    }
    last = {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "The id of the last event that you have.",
        "schema": {"type": "string", "pattern": r"^[0-9]{1,19}-[0-9]{1,19}(-end)?$"},
    }
    mode = query("mode", {"enum": list(MODES)}, "Selects events. Default: all that the task writes.")
    responses = {
        "200": {"description": "The events, until the task has ended.", "content": {STREAM_TYPE: content}},
        "204": {"description": "The task has ended, and you have its final event."},
    }
    return operation(
        "taskEvents", "Follow the events of a task", [task_id(), mode, last], responses, PARAMETER, NO_TASK, STREAMS,
        about=_FOLLOW,
    )  # fmt: skip


def _describe() -> Json:
    return operation("describe", "This document", [], {"200": json_of("OpenAPI 3.1.", {"type": "object"})}) | {
        "security": []
    }
