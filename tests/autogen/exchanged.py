"""A pytest plugin that gives AutoGen's tests Weft's runtime under the name of AutoGen's own, before they import it."""

from __future__ import annotations

import os
import sys
from typing import Any

import autogen_core
import pytest

from tests.autogen import hosts
from tests.autogen.excepted import EXCEPTED, NOT_RUN

RUNTIME = "WEFT_TEST_AUTOGEN_RUNTIME"
"""Environment variable: `autogen` leaves AutoGen's own class in place, to show that the helper agents are right;
with Weft's, `memory` (default) is a broker in the process, `server` the one of WEFT_REDIS_URL, `hosts` the same for
tests of runtimes over gRPC, and `workers` the same with each agent type in a separate process."""

_ORIGINAL = autogen_core.SingleThreadedAgentRuntime


def mode() -> str:
    """Return which runtime the tests of this process get."""
    return os.environ.get(RUNTIME) or "memory"


def runtime_class() -> type[Any]:
    """The class that stands in for `SingleThreadedAgentRuntime`."""
    if mode() == "autogen":
        return _ORIGINAL
    # Loaded after the original was remembered, and not at all where that is what is tested.
    from tests.autogen.forked import Forked
    from tests.autogen.modes import WeftAgentRuntime

    return {"memory": WeftAgentRuntime, "server": WeftAgentRuntime, "hosts": WeftAgentRuntime, "workers": Forked}[
        mode()
    ]


def exchange(replacement: type[Any]) -> None:
    """Replace AutoGen's own class wherever it was imported."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is _ORIGINAL and module.__name__ != __name__:
                setattr(module, name, replacement)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    exchange(runtime_class())
    if mode() == "hosts":
        hosts.stand_in()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """After the fixtures: end the processes of agents that the test has left."""
    if mode() == "workers":
        from tests.autogen.forked import end_all

        end_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An excepted test must fail: one that passes is an error and must leave the list."""
    _check_that_none_has_the_original()
    not_run = NOT_RUN.get(mode(), {})
    excepted, modules, found = {**EXCEPTED.get(mode(), {}), **not_run}, set(), set()
    for item in items:
        if mode() == "hosts":
            hosts.adapt(item)
        module, _, name = item.nodeid.rpartition("/")[2].partition("::")
        modules.add(module)
        for known in (f"{module}::{name}", f"{module}::{name.partition('[')[0]}"):
            if known in excepted:
                found.add(known)
                item.add_marker(pytest.mark.xfail(reason=excepted[known], strict=True, run=known not in not_run))
                break
    gone = [known for known in excepted if known.partition("::")[0] in modules and known not in found]
    if gone:
        raise pytest.UsageError(f"excepted.py names tests that are not there: {', '.join(gone)}")


def _check_that_none_has_the_original() -> None:
    """Otherwise the tests would pass whatever Weft's runtime does."""
    if mode() == "autogen":
        return
    for module in list(sys.modules.values()):
        if module.__name__ != __name__ and any(value is _ORIGINAL for value in list(vars(module).values())):
            raise pytest.UsageError(f"{module.__name__} still has AutoGen's own runtime")
