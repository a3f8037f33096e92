"""The broker that a command reaches, and commands that get no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime_core.cli.connection import Commands, broker_url, existing_trajectories, trajectories
from runtime_core.errors import BusUnavailable, ConfigurationError
from runtime_core.settings import Settings


def settings(tmp_path: Path, **environ: str) -> Settings:
    return Settings.from_environment({"WEFT_DATA_DIR": str(tmp_path), **environ})


def test_the_broker_for_operators_comes_first(tmp_path: Path) -> None:
    both = {"WEFT_REDIS_URL": "redis://h:1", "WEFT_OPERATOR_REDIS_URL": "redis://operator:secret@h:1"}
    assert broker_url(settings(tmp_path, **both)) == "redis://operator:secret@h:1"
    assert broker_url(settings(tmp_path, WEFT_REDIS_URL="redis://h:1")) == "redis://h:1"


def test_a_command_without_a_broker_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no broker: start one with `weft up`, or set WEFT_REDIS_URL"
    ) as error:
        broker_url(settings(tmp_path))
    assert str(tmp_path) in str(error.value)
    with pytest.raises(ConfigurationError, match="commands cannot reach a memory:// broker"):
        broker_url(settings(tmp_path, WEFT_REDIS_URL="memory://"))


async def test_a_store_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    for_nobody = settings(tmp_path, WEFT_TRAJECTORY_URL=f"sqlite:///{tmp_path}/none.db")
    async with trajectories(for_nobody) as store:
        assert store is None
    with pytest.raises(ConfigurationError, match=r"there is no trajectory store at sqlite:.*none\.db"):
        async with existing_trajectories(for_nobody):
            pytest.fail("there is none")
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_an_answer_ends() -> None:
    commands = Commands()

    @commands.verb("silent", seconds=0.01)
    async def silent() -> None:
        await asyncio.Event().wait()

    @commands.verb("late")
    async def late() -> None:
        raise TimeoutError("of its own")

    runner = CliRunner()
    ended = runner.invoke(commands, ["silent"])
    assert isinstance(ended.exception, BusUnavailable)
    assert str(ended.exception).startswith("the broker did not answer within 0.01 s")
    ended = runner.invoke(commands, ["late"])
    assert isinstance(ended.exception, TimeoutError)
    assert str(ended.exception) == "of its own"
