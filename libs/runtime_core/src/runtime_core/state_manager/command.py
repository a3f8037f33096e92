"""An ingress entry as a command: parsed, and bound to its publisher and the publisher's tenant."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import copy_context

from runtime_core.bus.admin import IngressStream
from runtime_core.errors import InvalidInput
from runtime_core.state_manager import schedules
from runtime_core.state_manager.publishers import Publisher
from runtime_core.telemetry.spans import Span
from runtime_core.wire import commands as wire
from runtime_core.wire.commands import Submission, data_of
from runtime_core.wire.envelope import Envelope, parse

TASKS = "tasks"


class Command:
    """An ingress entry that was read and is not settled."""

    __slots__ = (
        "_context", "_manager", "entry", "envelope", "error", "fields", "kept", "overtakes", "publisher", "span",
        "stream", "task", "tries", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        entry: bytes,
        fields: list[bytes],
        publisher: Publisher | None = None,
        stream: IngressStream | None = None,
    ) -> None:
        self.entry = entry
        self.fields = fields
        self.publisher = publisher
        """The publisher that it is bound to; None on the shared stream."""
        self.stream = stream
        self.envelope: Envelope | None = None
        self.wanted: Submission | wire.Cancellation | wire.Signal | wire.Publication | None = None
        self.error: InvalidInput | None = None
        self.task = ""
        self.overtakes = False
        """Whether it may overtake commands that wait."""
        self.kept = False
        self.tries = 0
        self.span: Span | None = None
        self._manager: AbstractContextManager[Span] | None = None
        self._context = copy_context()

    def parse(self, namespace: str, blobs: str) -> None:
        """Parse the entry, and bind the command to its publisher. Sets `error` if that fails.

        `blobs` is the URL of the namespace's blobs, if it has any.
        """
        publisher = self.publisher
        try:
            envelope = parse(self.entry.decode(), self.fields, namespace)
            if publisher is not None:
                envelope = publisher.bind(envelope)
            self.envelope = envelope
            match envelope.type:
                case wire.SUBMIT:
                    submit = wire.parse_submit(envelope)
                    if publisher is not None:
                        publisher.check_agent(submit.agent)
                        submit = publisher.scope(submit, blobs)
                    self.wanted, self.task = submit, submit.task_id
                case wire.CANCEL:
                    cancel = wire.parse_cancel(envelope)
                    self.wanted = cancel if publisher is None else publisher.scope(cancel)
                    self.task, self.overtakes = self.wanted.task_id, True
                case wire.SIGNAL:
                    signal = wire.parse_signal(envelope)
                    self.wanted = signal if publisher is None else publisher.scope(signal, blobs)
                    self.task, self.overtakes = self.wanted.task_id, True
                case wire.PUBLISH:
                    message = wire.parse_publish(envelope)
                    if publisher is not None:
                        publisher.check_topic(message.topic)
                        message = publisher.scope(message, blobs)
                    self.wanted = message
                case schedules.SET | schedules.DELETE:
                    pass
                case other:
                    known = (
                        wire.SUBMIT, wire.CANCEL, wire.SIGNAL, wire.PUBLISH, schedules.SET,
                        schedules.DELETE,
                    )  # fmt: skip
                    raise InvalidInput("type", f"{other!r} is not a command; commands are {', '.join(known)}")
        except InvalidInput as error:
            self.error, self.overtakes = error, True

    def public_error(self, error: InvalidInput) -> InvalidInput:
        """Return the error without agent names: a publisher must not learn which agents other tenants use."""
        if self.publisher is None or error.field != "data.agent" or self.envelope is None:
            return error
        return self.publisher.unknown_agent(str(data_of(self.envelope)["agent"]))

    @property
    def place(self) -> str:
        """The stream's name in dead letters and logs."""
        return TASKS if self.publisher is None else f"{TASKS}:{self.publisher.name}"

    def open(self, span: AbstractContextManager[Span]) -> None:
        """Open one span for all attempts. It is not the current span between them: other commands run meanwhile."""
        self._manager = span
        self.span = self._context.run(span.__enter__)

    def close(self) -> None:
        """End the span, with the command's error."""
        manager, self._manager, self.span = self._manager, None, None
        # The traceback of the error refers to this command: the cycle would keep its data until a late collection.
        error, self.error = self.error, None
        if manager is not None:
            self._context.run(manager.__exit__, type(error) if error else None, error, None)
