"""The operations of forks, trajectories, usage, dead letters and schedules in the OpenAPI document."""

from __future__ import annotations

import msgspec

from runtime_core.gateway.openapi_schemas import (
    ANY,
    CURSOR,
    MOMENT,
    NAME,
    TASK_ID,
    TEXT,
    Json,
    body_of,
    error_schema,
    idempotency_key,
    json_of,
    like,
    list_of,
    object_of,
    operation,
    page_of,
    query,
    ref,
    started,
    task_id,
    whole_of,
)
from runtime_core.gateway.requests import (
    CONFLICT,
    LINES,
    NO_APP,
    NO_LETTER,
    NO_SCHEDULE,
    NO_STORE,
    NO_TASK,
    NO_TRAJECTORY,
    PARAMETER,
    REPLAY,
    STREAMS,
)
from runtime_core.gateway.resources import GROUPS, PAGE, PAGE_MAX, USAGE_BY, USAGE_DAYS
from runtime_core.state_manager.dead_letters import REASONS
from runtime_core.state_manager.schedules import SCHEDULE_ID
from runtime_core.trajectory.reading import ExportedStep
from runtime_core.trajectory.tree import TreeDict
from runtime_core.wire.step import ENDED

_LIMIT = query("limit", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}, "The most rows.")
_LETTER = "1731240000000-0"
_LETTER_ROW: Json = {
    "letter_id": _LETTER, "time": 1731240000000, "reason": "attempts_used_up", "stream": "tool", "name": "search",
    "task_id": "order-7", "run_id": "r", "attempt": 3, "bytes": 812,
    "error": {"type": "TimeoutError", "message": "no answer within 30 s"},
}  # fmt: skip
_SCHEDULE: Json = {
    "schedule_id": "digest", "agent": "writer", "input": {"topic": "news"}, "every_seconds": None,
    "cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin", "overlap": "skip", "catch_up": True,
    "next": 1763690000000, "last": None, "last_task_id": None, "started": 0, "skipped": 0, "error": None,
}  # fmt: skip
COMPARED = ("missing", "kind", "name", "key", "input", "status", "output", "error")
"""What may differ between two tasks, as `first_difference` names it."""
_STEP: Json = {
    "run": "r", "step": "2", "kind": "tool", "name": "search", "key": "", "status": "completed", "attempt": 1,
    "input": {"query": "streams"}, "output": ["a"], "error": None,
}  # fmt: skip
_TREE: Json = {
    "namespace": "weft", "task": "order-7", "complete": True, "steps": 1, "expected_steps": 1, "status": "completed",
    "agent": "writer", "session": "", "created": 1763690000000.0, "ended": 1763690004200.0, "error": None,
    "fork": None, "runs": [],
}  # fmt: skip


def schemas() -> Json:
    """Return the schemas of what these routes show."""
    text = {"type": "string"}
    texts = ("key", "session_id", "cron", "last_task_id", "error")
    schedule: Json = {name: {"type": ["string", "null"]} for name in texts}
    schedule |= {name: {"type": ["number", "null"]} for name in ("every_seconds", "next", "last")}
    schedule |= {name: {"type": ["object", "null"]} for name in ("conf", "hooks", "metadata")} | {"input": ANY}
    times = {"at": "When it failed.", "started": "When the attempt began, if known."}
    error: Json = {"type": "object", "properties": {"type": text, "message": text, "traceback": text}}
    error["properties"] |= {name: {"type": "number", "description": told} for name, told in times.items()}
    details: Json = {"errors": {"type": "array", "items": error}, "data": ANY, "event": {"type": "object"}}
    details |= {"context": {"type": ["object", "null"]}, "cut": {"type": "object"}}
    _, trees = msgspec.json.schema_components(
        [TreeDict, ExportedStep],
        ref_template="#/components/schemas/{name}",
        schema_hook=lambda _: ANY,
    )
    trees["ExportedStep"]["properties"] |= {"input": ANY, "output": ANY}
    return {
        "DeadLetter": like(_LETTER_ROW, error=error, group=text, kind=text, delivery=text, **details),
        "Schedule": like(_SCHEDULE, **schedule),
        **trees,
    }


def paths() -> Json:
    """Return the paths of these routes."""
    letter = _in_path("letter_id", _LETTER, "^([0-9]{1,4}:)?[0-9]{1,19}-[0-9]{1,19}$")
    schedule = _in_path("schedule_id", "digest", f"^{SCHEDULE_ID.pattern}$")
    task = "/v1/tasks/{task_id}"
    return {
        f"{task}/forks": {"post": _fork()},
        f"{task}/replay": {"post": _replay()},
        f"{task}/trajectory": {"get": _show_trajectory()},
        f"{task}/difference": {"get": _difference()},
        "/v1/steps": {"get": _export()},
        "/v1/usage": {"get": _usage()},
        "/v1/dead-letters": {"get": _list_letters()},
        "/v1/dead-letter-groups": {"get": _groups()},
        "/v1/dead-letters/{letter_id}": {
            "get": operation(
                "showDeadLetter", "Show a dead letter with its event and all errors", [letter],
                {"200": json_of("The dead letter.", ref("DeadLetter"), _LETTER_ROW)}, PARAMETER, NO_LETTER,
            ),
            "delete": operation(
                "dropDeadLetter", "Delete a dead letter permanently", [letter],
                {"204": {"description": "It is deleted."}}, PARAMETER, NO_LETTER,
            ),
        },
        "/v1/dead-letters/{letter_id}/redrive": {"post": _redrive(letter)},
        "/v1/schedules": {"get": _list_schedules()},
        "/v1/schedules/{schedule_id}": {
            "get": operation(
                "showSchedule", "Show a schedule", [schedule],
                {"200": json_of("The schedule.", ref("Schedule"), _SCHEDULE)}, PARAMETER, NO_SCHEDULE,
            ),
            "put": _set_schedule(schedule),
            "delete": operation(
                "deleteSchedule", "Remove a schedule; its running tasks continue", [schedule],
                {"204": {"description": "It is removed."}}, PARAMETER, NO_SCHEDULE,
            ),
        },
        "/v1/schedules/{schedule_id}/run": {
            "post": operation(
                "runSchedule", "Start a task of a schedule now", [schedule],
                {"202": started("The task.", "digest-1763690000000")}, NO_SCHEDULE,
                about="The times of the schedule stay. The task counts neither in its `started` nor as its "
                "`last_task_id`.",
                body=body_of(object_of({}), {}, required=False),
            )
        },
    }  # fmt: skip


def _fork() -> Json:
    members = {
        "at": {
            "type": ["string", "null"],
            "description": "A step of the trajectory: the `run` of its node and, if it has one, its `step`, joined "
            "by `/`, as `r/3.0.1`, or `r/2/1` for step 1 of run `r/2`. The leading `r/` may be left out.",
        },
        "input": {"description": "Replaces the result of step `at`; without `at`, the input of the task."},
        "task_id": {**TASK_ID, "type": ["string", "null"], "description": "Your own id of the new task."},
        "session_id": {"type": ["string", "null"], "minLength": 1, "maxLength": 256},
    }
    return operation(
        "forkTask", "Run a task again, from a step or from its beginning", [task_id(), idempotency_key()],
        {"202": started("The new task.", "fork-5f0c2b9a7d3e1f60")},
        PARAMETER, NO_TASK, CONFLICT,
        about="A new task starts with the results that the task had before step `at`, and runs the later "
        "steps. Without `at` it runs all steps.",
        body=body_of(object_of(members), {"at": "2", "input": {"hits": 3}}, required=False),
    )  # fmt: skip


def _replay() -> Json:
    found = {
        "agent": "writer", "run": "r", "step": "2", "recorded": 'ctx.tool("search", query="streams")',
        "now": 'ctx.tool("search", query="Redis Streams")', "line": "desk.py:12 in writer",
    }  # fmt: skip
    difference = like(found)
    schema = {
        "task_id": TASK_ID,
        "follows": {
            "type": ["boolean", "null"],
            "description": "Whether the code requests the recorded steps; null if no run could be compared.",
        },
        "runs": {"type": "integer"},
        "difference": {
            "anyOf": [difference, {"type": "null"}],
            "description": "The first difference: what the task did and what the code does now, in words. An empty "
            "`step` is the run as a whole; an empty `line` is not known.",
        },
        "further": list_of(difference),
        "skipped": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Runs by why they were not compared: the app has no such agent, or the state of an agent "
            "with a key is not recorded.",
        },
    }
    example = {"task_id": "order-7", "follows": False, "runs": 1, "difference": found, "further": [], "skipped": {}}
    return operation(
        "replayTask", "Run the code of the app on an ended task", [task_id()],
        {"200": json_of("Whether it follows the record.", whole_of(schema), example)},
        PARAMETER, NO_TASK, NO_TRAJECTORY, CONFLICT, NO_STORE, NO_APP, REPLAY,
        about="The code gets the recorded results and calls no tool, agent or model. Nothing changes. It runs "
        "in a separate process, for at most 30 seconds; a replica runs two at once, and one for a tenant. `runs` "
        "were compared, `skipped` were not. `further` are steps that the code adds after the end of a run.",
        body=body_of(object_of({}), {}, required=False),
    )  # fmt: skip


def _show_trajectory() -> Json:
    return operation(
        "showTrajectory", "Show the recorded steps of a task as a tree", [task_id()],
        {"200": json_of("The runs, each with its steps.", ref("TreeDict"), _TREE)},
        PARAMETER, NO_TASK, NO_TRAJECTORY, NO_STORE,
    )  # fmt: skip


def _difference() -> Json:
    example = {"run": "r", "step": "2", "members": ["output"], "one": _STEP, "other": {**_STEP, "output": ["b"]}}
    failed = {"anyOf": [error_schema(), {"type": "null"}]}
    either = {"anyOf": [like(_STEP, input=ANY, output=ANY, error=failed), {"type": "null"}]}
    members = {"type": "array", "items": {"enum": list(COMPARED)}}
    found = {"anyOf": [like(example, members=members, one=either, other=either), {"type": "null"}]}
    schema = whole_of({"difference": found})
    other = {**query("with", {**NAME, "maxLength": 200}, "The id of the other task."), "required": True}
    return operation(
        "compareTasks", "Find the first difference between two tasks", [task_id(), other],
        {"200": json_of("Where they differ first; null: nowhere.", schema, {"difference": example})},
        PARAMETER, NO_TASK, NO_TRAJECTORY, NO_STORE,
    )  # fmt: skip


def _export() -> Json:
    parameters = [
        query("task_id", {"type": "string", "maxLength": 200}, "Only this task."),
        query("status", {"enum": list(ENDED)}, "Only tasks with this end."),
        query("agent", TEXT, "Only tasks of this agent."),
        query("session_id", TEXT, "Only tasks of this session."),
        query("since", MOMENT, "Only tasks that ended at this time or later."),
    ]
    one = "One line for each step, by task: a JSON object of the schema `x-line`."
    example = '{"task":"order-7","run":"r","step":"2","kind":"tool"}\n'
    lines = {"schema": {"type": "string"}, "x-line": ref("ExportedStep"), "example": example}
    return operation(
        "exportSteps", "Export recorded steps as JSON lines", parameters,
        {"200": {"description": one, "content": {LINES: lines}}},
        PARAMETER, STREAMS, NO_STORE,
    )  # fmt: skip


def _usage() -> Json:
    parameters = [
        query("by", {"type": "string", "maxLength": 64, "default": "agent"}, f"A list of {', '.join(USAGE_BY)}."),
        query(
            "since", MOMENT, f"Tasks that ended then or later. Default: the day (UTC) {USAGE_DAYS} days before `until`."
        ),
        query("until", MOMENT, "Tasks that ended before this time. Default: now."),
        query("tenant", {"type": "string", "maxLength": 63}, "Only tasks whose ids begin with this tenant."),
    ]
    amounts = like({"tasks": 3, "usage": {}}, **{name: {"type": "string"} for name in USAGE_BY})
    row = {"agent": "writer", "tasks": 3, "usage": {"tokens": 4210, "cost": 0.12}}
    example = {"since": "2030-01-01T00:00:00Z", "until": "2030-01-08T00:00:00Z", "rows": [row], "complete": True}
    schema = whole_of({"since": MOMENT, "until": MOMENT, "rows": list_of(amounts), "complete": {"type": "boolean"}})
    return operation(
        "summariseUsage", "Sum up the usage of ended tasks", parameters,
        {"200": json_of("The sums. `complete` is false if more is to be added up.", schema, example)},
        PARAMETER, NO_STORE,
    )  # fmt: skip


def _list_letters() -> Json:
    return operation(
        "listDeadLetters", "List dead letters, the newest first", [*_letter_filters(), _LIMIT, CURSOR],
        {"200": page_of("dead_letters", "DeadLetter", _LETTER_ROW)}, PARAMETER,
    )  # fmt: skip


def _groups() -> Json:
    row = {"error": "TimeoutError: no answer within … s", "count": 12, "bytes": 9744, "newest": _LETTER}
    groups = like({name: row[name] for name in row if name != "error"}, **{key: {"type": "string"} for key in GROUPS})
    schema = whole_of({"groups": list_of(groups)})
    by = query("by", {"enum": list(GROUPS), "default": "error"}, "What the letters of a group share.")
    return operation(
        "groupDeadLetters", "Count dead letters by error, name, reason or stream",
        [*_letter_filters(), by, _LIMIT],
        {"200": json_of("The groups, the largest first, of equal ones the newest.", schema, {"groups": [row]})},
        PARAMETER,
        about="A group by error is the type of the error and the first line of its message, in which `…` "
        "stands for each quoted text, number and id. The parameter `error` of `listDeadLetters` takes it back. "
        "`newest` is the id of the newest letter.",
    )  # fmt: skip


def _letter_filters() -> list[Json]:
    texts = {
        "name": "Only letters of this agent or tool.",
        "task_id": "Only letters of this task.",
        "error": "Only letters of this group: the `error` of a group by error.",
    }
    return [
        query("reason", {"enum": list(REASONS)}, "Only letters with this reason."),
        *(query(name, TEXT, text) for name, text in texts.items()),
    ]


def _redrive(letter: Json) -> Json:
    members = {
        "reopen": {"type": ["boolean", "null"], "description": "Let a task that has ended continue."},
        "data": {"description": "Replaces the input or the arguments of the delivery."},
    }
    schema = whole_of({"letter_id": NAME, "task_id": {"type": ["string", "null"]}})
    return operation(
        "redriveDeadLetter", "Send a dead letter to its consumer again", [letter],
        {"200": json_of("It is sent.", schema, {"letter_id": _LETTER, "task_id": "order-7"})},
        NO_LETTER, CONFLICT,
        body=body_of(object_of(members), {"reopen": True, "data": {"query": "streams"}}, required=False),
    )  # fmt: skip


def _list_schedules() -> Json:
    return operation(
        "listSchedules", "List schedules by id", [_LIMIT, CURSOR],
        {"200": page_of("schedules", "Schedule", _SCHEDULE)}, PARAMETER,
    )  # fmt: skip


def _set_schedule(schedule: Json) -> Json:
    number, text, members_of = ({"type": [kind, "null"]} for kind in ("number", "string", "object"))
    members = {
        "agent": NAME,
        "input": ANY,
        **dict.fromkeys(("key", "session_id", "cron", "timezone"), text),
        **dict.fromkeys(("conf", "hooks", "metadata"), members_of),
        **dict.fromkeys(("every_seconds", "delay_seconds"), number),
        "at": {**text, "format": "date-time", "description": "Once. A time in the past starts the task at once."},
        "overlap": {"enum": ["skip", "start", None]},
        "catch_up": {"type": ["boolean", "null"]},
    }
    example = {"agent": "writer", "input": {"topic": "news"}, "cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin"}
    return operation(
        "setSchedule", "Create or replace a schedule", [schedule],
        {"200": json_of("The schedule.", ref("Schedule"), _SCHEDULE)}, NO_SCHEDULE,
        about="Give exactly one of `every_seconds`, `cron`, `at` and `delay_seconds`.",
        body=body_of(object_of(members, "agent", "input"), example),
    )  # fmt: skip


def _in_path(name: str, example: str, pattern: str) -> Json:
    return {
        "name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": pattern},
        "example": example,
    }  # fmt: skip
