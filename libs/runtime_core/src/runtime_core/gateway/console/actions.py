"""What the forms of the pages do."""

from __future__ import annotations

import secrets

from starlette.responses import Response

from runtime_core.gateway.access import Access
from runtime_core.gateway.console.site import HOME, Page, Visit, see
from runtime_core.gateway.keys import ANSWER, OPERATE, SUBMIT
from runtime_core.gateway.requests import NO_TASK, Problem
from runtime_core.wire import codec

CANCELLED = "cancelled in the console"
SELECTED_MAX = 200
"""Tasks that one form cancels."""


class Actions:
    """Each takes a form, and returns a redirect to the page that shows what came of it."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def pages(self) -> list[Page]:
        task = f"{HOME}/tasks/{{task_id}}"
        return [
            Page("POST", f"{HOME}/tasks", self.submit, SUBMIT),
            Page("POST", f"{HOME}/cancel", self.cancel_selected, OPERATE),
            Page("POST", f"{task}/cancel", self.cancel, OPERATE),
            Page("POST", f"{task}/answer", self.answer, ANSWER),
            Page("POST", f"{task}/send", self.send, ANSWER),
            Page("POST", f"{task}/fork", self.fork, SUBMIT),
            Page("POST", f"{task}/redrive", self.redrive, OPERATE),
        ]

    async def submit(self, visit: Visit) -> Response:
        data: dict[str, object] = {
            "agent": visit.field("agent"),
            "input": codec.typed(visit.field("input"), words=True),
        }
        task = await self._access.submit(visit.caller, data, secrets.token_hex(16))
        return see(f"{HOME}/tasks/{task.task_id}", "started")

    async def cancel_selected(self, visit: Visit) -> Response:
        selected = visit.form.get("task", [])[:SELECTED_MAX]
        for task_id in selected:
            try:
                await self._access.cancel(visit.caller, task_id, CANCELLED)
            except Problem as problem:
                if problem.kind is not NO_TASK:
                    raise
        return see(visit.field("back"), "cancelled-many" if selected else "none")

    async def cancel(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        await self._access.cancel(visit.caller, task_id, CANCELLED)
        return see(f"{HOME}/tasks/{task_id}", "cancelled")

    async def answer(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        verdict = visit.field("verdict")
        if verdict:
            value: object = {"verdict": verdict}
            if visit.field("reason"):
                value = {"verdict": verdict, "reason": visit.field("reason")}
            if verdict == "edit" and isinstance(value, dict):
                value = {**value, "value": codec.typed(visit.field("value"), words=True)}
        else:
            value = codec.typed(visit.field("value"), words=True)
        await self._access.answer(visit.caller, task_id, visit.field("request_id"), value)
        return see(visit.field("back") or f"{HOME}/tasks/{task_id}", "answered")

    async def send(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        value = codec.typed(visit.field("value"), words=True)
        await self._access.send(visit.caller, task_id, visit.field("name"), value)
        return see(f"{HOME}/tasks/{task_id}", "sent")

    async def fork(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        at = visit.field("at") or None
        if visit.field("replace"):
            task = await self._access.fork(
                visit.caller, task_id, at=at, input=codec.typed(visit.field("input"), words=True)
            )
        else:
            task = await self._access.fork(visit.caller, task_id, at=at)
        return see(f"{HOME}/tasks/{task.task_id}", "forked")

    async def redrive(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        await self._access.redrive(visit.caller, visit.field("letter"), reopen=True)
        return see(f"{HOME}/tasks/{task_id}", "redriven")
