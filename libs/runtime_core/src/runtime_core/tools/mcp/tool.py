"""A server's tools, called as the app's own are."""

from __future__ import annotations

import functools
from concurrent.futures import Executor
from typing import Any

from mcp_types import CallToolResult, TextContent

from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.schema import encode
from runtime_core.errors import NotReady, Reject
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.mcp.connection import Connection, Progress, Session
from runtime_core.tools.mcp.failures import Lost, NotSent, Refused
from runtime_core.tools.mcp.listing import ListedTool
from runtime_core.tools.tool import AbandonedThreads, ToolContext, run_limited

IDEMPOTENCY_KEY = "dev.weft/idempotency-key"
TASK_ID = "dev.weft/task-id"
ATTEMPT = "dev.weft/attempt"


def value_of(result: CallToolResult) -> object:
    """Structured content where there is some; else the text; else each part of the content as typed JSON.

    A part is `{"type": "text" | "image" | "audio" | "resource" | "resource_link", …}`, as MCP writes it. No content
    at all is None.
    """
    if result.structured_content is not None:
        return result.structured_content
    if not result.content:
        return None
    if all(isinstance(part, TextContent) for part in result.content):
        return text_of(result)
    return [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in result.content]


def text_of(result: CallToolResult) -> str:
    """The parts that are text, one below the other."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


class MCPTool:
    """One tool of a connected server."""

    def __init__(self, listed: ListedTool, connection: Connection, metrics: Metrics) -> None:
        self.name = listed.name
        self.what = f"tool {listed.name!r}"
        self.repeatable = listed.repeatable
        self.retry = connection.declared.retry
        self._listed = listed
        self._connection = connection
        self._count = functools.partial(_count, metrics, connection.declared.name)

    def entry(self) -> ToolEntry:
        """What the manifest says of it."""
        return ToolEntry(
            arguments=self._listed.arguments,
            result=self._listed.result,
            pool=self._connection.declared.pool,
            description=self._listed.description,
            repeatable=self.repeatable,
        )

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the tool with `arguments` (a JSON object) and give its result as JSON.

        Raises InvalidInput (`arguments.…`, `result`), Reject with the server's own error, NotReady where the server
        has not seen the call. Where that is not known: TimeoutError or ConnectionError for a tool that may be repeated,
        else Reject of type UnknownOutcome.
        """
        given = self._listed.check.decode(arguments)
        session = self._connection.session
        if session is None:
            raise NotReady(f"{self._connection.declared.what} is away: {self._connection.trouble}")
        call = functools.partial(session.call, self._listed.own_name, given, _meta(context), _progress_to(context))
        try:
            result = await run_limited(self.what, self._connection.declared.timeout_seconds, call)
        except (TimeoutError, NotSent, Lost, Refused) as error:
            raise self._failure(error, session) from None
        except BaseException:
            context.cancel()
            self._count("cancelled")
            raise
        assert isinstance(result, CallToolResult)  # what the session gives
        self._connection.answered()
        if result.is_error:
            self._count("error")
            # Shortened where its secrets are taken out: half of a key would not be found there.
            raise Reject(text_of(result) or "the tool failed without a word", "ToolError")
        self._count("completed")
        return encode(value_of(result), "result")

    def _failure(self, error: TimeoutError | NotSent | Lost | Refused, session: Session) -> Exception:
        """Tell the connection what was seen of it, and say how the attempt ends."""
        if isinstance(error, Refused):
            self._connection.answered()
            self._count("error")
            return Reject(str(error), error.type)
        if isinstance(error, NotSent):
            self._connection.lose(session)
            self._count("not_sent")
            return NotReady(f"{self._connection.declared.what}: {error}")
        if isinstance(error, TimeoutError):
            self._connection.silent(session)
            self._count("timeout")
            unclear: Exception = error
        else:
            if error.broken:
                self._connection.lose(session)
            self._count("lost")
            unclear = ConnectionError(f"{self.what}: {error}")
        if self.repeatable:
            return unclear
        return Reject(f"{unclear}; the tool may not be repeated: find out whether it took effect", "UnknownOutcome")


def _count(metrics: Metrics, server: str, outcome: str) -> None:
    metrics.mcp_calls[server, outcome].inc()


def _meta(context: ToolContext) -> dict[str, Any]:  # Any: the protocol's `_meta`
    meta: dict[str, Any] = {
        IDEMPOTENCY_KEY: context.idempotency_key,
        TASK_ID: context.task_id,
        ATTEMPT: context.attempt,
    }
    if context.traceparent:
        meta["traceparent"] = context.traceparent
    if context.tracestate:
        meta["tracestate"] = context.tracestate
    return meta


def _progress_to(context: ToolContext) -> Progress:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        said = {"progress": progress, "total": total, "message": message}
        context.progress({name: value for name, value in said.items() if value is not None})

    return report
