"""Engines for whole tasks: which there are, and what is refused before anything begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from runtime_core.integrations.aworld.engines import target as engines_target
from weft import AgentContext, App
from weft.aworld import Runners, Task
from weft.errors import ConfigurationError, InvalidInput

app = App("hosted")


@app.tool(pool="far")
def double(text: str) -> str:
    return text * 2


@app.agent("doubler", pool="near")
async def doubler(ctx: AgentContext, text: str) -> str:
    doubled: str = await ctx.tool(double, text=text)
    return doubled


async def upper(ctx: AgentContext, text: str) -> str:
    return text.upper()


async def refused(**given: object) -> str:
    with pytest.raises((InvalidInput, ConfigurationError)) as error:
        await Runners.run("a", agent=upper, **given)  # type: ignore[arg-type]  # that is what is tested
    return str(error.value)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WEFT_REDIS_URL", "WEFT_RAY_ADDRESS", "WEFT_APP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))


async def test_engines_that_run_no_whole_tasks_are_refused_with_the_field() -> None:
    told = 'engine: "flink" cannot run whole tasks: use one of local, ray and spark'
    assert await refused(engine="flink") == told
    assert (await refused(engine="ray", workers=-1)).startswith("workers: -1 is not a whole number")
    tasks = [Task(input="a", agent=upper), Task(input="a", agent=upper, conf={"engine": "ray"})]
    with pytest.raises(InvalidInput, match=r"task\.1\.conf\.engine: is 'ray', but that of task\.0 is 'local'"):
        await Runners.run_task(tasks)


async def test_local_is_the_default_engine() -> None:
    response = await Runners.run("a", agent=upper, engine="local", conf={"engine": "ray"})
    assert response.value() == "A"


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("spark", "pyspark")])
@pytest.mark.parametrize("given", ["engine", "conf"])
async def test_a_missing_cluster_library_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, engine: str, package: str, given: str
) -> None:
    monkeypatch.setattr(engines_target, "find_spec", lambda _: None)
    chosen: dict[str, object] = {"engine": engine} if given == "engine" else {"conf": {"engine": engine}}
    told = f"engine {engine!r}: {package} is not installed: pip install 'weft[{engine}]'"
    assert await refused(**chosen) == told


async def test_a_ray_elsewhere_needs_a_broker_that_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_target, "find_spec", lambda name: importlib.util.find_spec("json"))
    monkeypatch.setenv("WEFT_RAY_ADDRESS", "192.0.2.1:6379")
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:6379' is another machine, and without WEFT_REDIS_URL"):
        await Runners.run("a", agent="doubler", app=app, engine="ray")
