"""The pytest plugin: the fixture `weft_app`, and async tests without another plugin.

pytest loads this module in each of its processes, so it imports Weft only when a test asks for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.testing.app_test import AppTest

FIXTURE = "weft_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(FIXTURE, "the app of the fixture weft_app, as in desk:app, for test modules without a global `app`")


@pytest.fixture(name=FIXTURE)
def weft_app(request: pytest.FixtureRequest) -> AppTest:
    """Run the global `app` of the test module, or the app of the ini option `weft_app`, in this process."""
    from runtime_core.testing.app_test import AppTest

    if not inspect.iscoroutinefunction(request.function):
        pytest.fail(f"{request.node.name} uses the fixture weft_app: write it as `async def`", pytrace=False)
    return AppTest(_app(request))


def _app(request: pytest.FixtureRequest) -> App:
    from runtime_core.app.app import App
    from runtime_core.app.loading import load_app
    from runtime_core.errors import ConfigurationError

    found = getattr(request.module, "app", None)
    if isinstance(found, App):
        return found
    named = str(request.config.getini(FIXTURE))
    if not named:
        pytest.fail(
            f"{request.path.name} has no app to test: import it (`from desk import app`), "
            "or set the ini option, as in weft_app = desk:app",
            pytrace=False,
        )
    try:
        return load_app(named)
    except ConfigurationError as error:
        pytest.fail(f"ini option weft_app: {error}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:  # Any: pytest's
    """Run the app around the test, in the test's own event loop: whoever runs that loop."""
    tested = getattr(item, "funcargs", {}).get(FIXTURE)
    if isinstance(item, pytest.Function) and tested is not None:
        test = item.obj

        @functools.wraps(test)
        async def with_app(*args: object, **kwargs: object) -> None:
            async with tested:
                await test(*args, **kwargs)

        item.obj = with_app
        try:
            return (yield)
        finally:
            item.obj = test
    return (yield)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test that no other plugin runs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}))
    return True
