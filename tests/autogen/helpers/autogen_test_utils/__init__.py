"""Agents, messages and components that AutoGen's tests import. No package ships them, so these are ours."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from autogen_core import (
    BaseAgent,
    Component,
    ComponentBase,
    ComponentModel,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    default_subscription,
    message_handler,
)
from pydantic import BaseModel


@dataclass
class MessageType:
    """A message without content."""


@dataclass
class ContentMessage:
    """A message with a text."""

    content: str


@dataclass
class CascadingMessageType:
    """A message of a cascade: `round` counts from 1."""

    round: int


class NoopAgent(BaseAgent):
    """Takes every message and does nothing."""

    def __init__(self) -> None:
        super().__init__("An agent that does nothing.")

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> Any:  # Any: AutoGen's own signature
        raise NotImplementedError("A NoopAgent is sent no messages")


class LoopbackAgent(RoutedAgent):
    """Counts and keeps its messages, and returns each one."""

    def __init__(self) -> None:
        super().__init__("An agent that returns what it is sent.")
        self.num_calls = 0
        self.received_messages: list[MessageType | ContentMessage] = []
        self.event = asyncio.Event()
        """Set by each message."""

    @message_handler
    async def on_loopback(
        self, message: MessageType | ContentMessage, ctx: MessageContext
    ) -> MessageType | ContentMessage:
        self.num_calls += 1
        self.received_messages.append(message)
        self.event.set()
        return message


@default_subscription
class LoopbackAgentWithDefaultSubscription(LoopbackAgent):
    """A loopback agent on the default topic."""


@default_subscription
class CascadingAgent(RoutedAgent):
    """Answers each message of a cascade with one for the next round, until the last."""

    def __init__(self, max_rounds: int) -> None:
        super().__init__("An agent in a cascade.")
        self.num_calls = 0
        self.max_rounds = max_rounds

    @message_handler
    async def on_cascade(self, message: CascadingMessageType, ctx: MessageContext) -> None:
        self.num_calls += 1
        if message.round < self.max_rounds:
            await self.publish_message(CascadingMessageType(round=message.round + 1), topic_id=DefaultTopicId())


class MyInnerConfig(BaseModel):
    """The configuration of a `MyInnerComponent`."""

    inner_message: str


class MyInnerComponent(ComponentBase[MyInnerConfig], Component[MyInnerConfig]):
    """A component that is part of another."""

    component_config_schema = MyInnerConfig
    component_type = "custom"

    def __init__(self, inner_message: str) -> None:
        self.inner_message = inner_message

    def _to_config(self) -> MyInnerConfig:
        return MyInnerConfig(inner_message=self.inner_message)

    @classmethod
    def _from_config(cls, config: MyInnerConfig) -> MyInnerComponent:
        return cls(config.inner_message)


class MyOuterConfig(BaseModel):
    """The configuration of a `MyOuterComponent`."""

    outer_message: str
    inner_class: ComponentModel


class MyOuterComponent(ComponentBase[MyOuterConfig], Component[MyOuterConfig]):
    """A component with another one in it."""

    component_config_schema = MyOuterConfig
    component_type = "custom"

    def __init__(self, outer_message: str, inner_class: MyInnerComponent) -> None:
        self.outer_message = outer_message
        self.inner_class = inner_class

    def _to_config(self) -> MyOuterConfig:
        return MyOuterConfig(outer_message=self.outer_message, inner_class=self.inner_class.dump_component())

    @classmethod
    def _from_config(cls, config: MyOuterConfig) -> MyOuterComponent:
        return cls(config.outer_message, MyInnerComponent.load_component(config.inner_class))
