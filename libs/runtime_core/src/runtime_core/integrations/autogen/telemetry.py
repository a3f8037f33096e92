"""What AutoGen's own runtime says of its messages, said by this one: event logs and spans under the same names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from autogen_core import (
    EVENT_LOGGER_NAME,
    ROOT_LOGGER_NAME,
    AgentId,
    MessageContext,
    MessageHandlerContext,
    TopicId,
)
from autogen_core._telemetry import MessageRuntimeTracingConfig, TraceHelper  # AutoGen's other runtimes use these too
from autogen_core.logging import (
    AgentConstructionExceptionEvent,
    DeliveryStage,
    MessageDroppedEvent,
    MessageEvent,
    MessageHandlerExceptionEvent,
    MessageKind,
)
from opentelemetry.trace import Span, TracerProvider

from runtime_core.actors.errors import SerializationError
from runtime_core.actors.serialization import SerializationRegistry

logger = logging.getLogger(f"{ROOT_LOGGER_NAME}.weft")
events = logging.getLogger(EVENT_LOGGER_NAME)


class Telemetry:
    """One runtime's. Any: the user's message types."""

    def __init__(self, registry: SerializationRegistry, tracer_provider: TracerProvider | None) -> None:
        self._registry = registry
        self._tracer = TraceHelper(tracer_provider, MessageRuntimeTracingConfig("SingleThreadedAgentRuntime"))

    @contextmanager
    def sending(self, message: Any, to: AgentId | TopicId, sender: AgentId | None) -> Iterator[Span]:
        """Around a message that is sent or published."""
        self._log(message, sender, to, _kind(to), DeliveryStage.SEND)
        with self._tracer.trace_block(
            "create", to, parent=None, extraAttributes={"message_type": type(message).__name__}
        ) as span:
            yield span

    @contextmanager
    def handling(self, agent: AgentId, message: Any, context: MessageContext) -> Iterator[None]:
        """Around a handler."""
        self._log(
            message,
            context.sender,
            agent if context.is_rpc else None,
            MessageKind.DIRECT if context.is_rpc else MessageKind.PUBLISH,
            DeliveryStage.DELIVER,
        )
        with ExitStack() as stack:
            if context.topic_id is not None:
                stack.enter_context(self._tracer.trace_block("publish", context.topic_id, parent=None))
            else:
                stack.enter_context(self._tracer.trace_block("send", agent, parent=None))
            stack.enter_context(self._tracer.trace_block("process", agent, parent=None))
            stack.enter_context(MessageHandlerContext.populate_context(agent))
            try:
                yield
            except BaseException as error:
                if not context.is_rpc:
                    logger.error("Error processing publish message for %s", agent, exc_info=True)
                events.info(
                    MessageHandlerExceptionEvent(payload=self._text(message), handling_agent=agent, exception=error)
                )
                raise

    def answered(self, response: Any, by: AgentId, to: AgentId | None) -> None:
        """A response has reached who asked."""
        self._log(response, by, to, MessageKind.RESPOND, DeliveryStage.DELIVER)

    def dropped(self, message: Any, to: AgentId | TopicId, sender: AgentId | None) -> None:
        """An intervention handler has dropped a message."""
        events.info(MessageDroppedEvent(payload=self._text(message), sender=sender, receiver=to, kind=_kind(to)))

    def not_constructed(self, agent: AgentId, error: Exception) -> None:
        """A factory has failed."""
        logger.error("Error constructing agent %s", agent, exc_info=error)
        events.info(AgentConstructionExceptionEvent(agent_id=agent, exception=error))

    def _log(
        self,
        message: Any,
        sender: AgentId | None,
        receiver: AgentId | TopicId | None,
        kind: MessageKind,
        stage: DeliveryStage,
    ) -> None:
        # Writing each message as text again has a price, which only a program that listens should pay.
        if events.isEnabledFor(logging.INFO):
            events.info(
                MessageEvent(
                    payload=self._text(message), sender=sender, receiver=receiver, kind=kind, delivery_stage=stage
                )
            )

    def _text(self, message: Any) -> str:
        try:
            return self._registry.write(message)[2].decode(errors="replace")
        except SerializationError:
            return "Message could not be serialized"


def _kind(to: AgentId | TopicId) -> MessageKind:
    return MessageKind.DIRECT if isinstance(to, AgentId) else MessageKind.PUBLISH
