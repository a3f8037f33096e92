"""Engines by name, and their settings."""

from __future__ import annotations

import os

import pytest

from weft.engines import LocalEngine, RunConfig, engine_named
from weft.errors import ConfigurationError


class OwnEngine(LocalEngine):
    """A custom engine."""


def test_local_is_an_engine_and_gets_its_settings() -> None:
    engine = engine_named("local", RunConfig(mode="processes", worker_num=3))
    assert type(engine) is LocalEngine
    assert (engine.config.mode, engine.config.workers) == ("processes", 3)
    assert engine_named("local").config.workers == (os.cpu_count() or 1)


def test_a_custom_engine_is_found() -> None:
    engine = engine_named(f"{__name__}:OwnEngine", RunConfig(worker_num=2))
    assert type(engine).__name__ == "OwnEngine"
    assert engine.config == RunConfig(name=f"{__name__}:OwnEngine", worker_num=2)


async def test_an_engine_that_is_not_installed_is_named_when_it_starts() -> None:
    for name, said in (
        ("ray", r"RayEngine: ray is not installed: pip install 'weft\[ray\]'"),
        ("spark", r"SparkEngine: pyspark is not installed: pip install 'weft\[spark\]'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            await engine_named(name).start()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cloud",
            "engine 'cloud' does not exist: use 'local', 'ray', 'spark', or your own engine as 'package.module:Class'",
        ),
        ("no.such:Engine", "engine 'no.such:Engine' cannot be loaded: No module named 'no'"),
        ("os:Engine", "engine 'os:Engine' cannot be loaded: module 'os' has no attribute 'Engine'"),
        ("os:getcwd", "engine 'os:getcwd' is <built-in function getcwd>: name a subclass of RuntimeEngine"),
    ],
)
def test_an_invalid_engine_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        engine_named(name)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "RunConfig: name='' is not an engine"),
        ({"worker_num": 0}, "RunConfig: worker_num=0 must be a whole number of at least 1"),
        ({"worker_num": True}, "RunConfig: worker_num=True must be a whole number of at least 1"),
        ({"mode": "fibres"}, "RunConfig: mode='fibres' is not a mode: use threads, processes, async"),
        ({"timeout_seconds": -1}, "RunConfig: timeout_seconds=-1 must be a number of seconds above 0"),
        ({"timeout_seconds": float("nan")}, "RunConfig: timeout_seconds=nan must be a number of seconds above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        RunConfig(**settings)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
