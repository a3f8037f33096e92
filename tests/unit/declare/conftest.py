"""Calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime_core.declare.tool import AbandonedThreads
from tests.unit.declare.calls import Call, context, declared


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def abandoned() -> AbandonedThreads:
    return AbandonedThreads()


@pytest.fixture
def call(threads: ThreadPoolExecutor, abandoned: AbandonedThreads) -> Call:
    """Declare a function, call it with JSON arguments, and return its decoded result."""

    async def call(function: Callable[..., object], **arguments: object) -> object:
        tool = declared(function)
        result = await tool.call(json.dumps(arguments).encode(), context(), threads, abandoned)
        return json.loads(result)

    return call
