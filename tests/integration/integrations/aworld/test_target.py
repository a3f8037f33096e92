"""Where tasks run: through a client, in this process, and which targets are refused."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from tests.integration.integrations.aworld.small_agents import upper
from weft import App
from weft.aworld import (
    Runners,
    TaskRunner,
)
from weft.errors import ConfigurationError, InvalidInput


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


async def test_an_invalid_client_or_store_is_refused_by_its_field() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidInput, match=r"^client: 5 is not a weft\.Client"):
        await Runners.run("hi", agent=upper, client=wrong)
    with pytest.raises(InvalidInput, match=r"^trajectory: the trajectory URL cannot be read"):
        await Runners.run("hi", agent=upper, trajectory="here")


async def test_an_app_with_an_invalid_handler_is_refused_at_the_call() -> None:
    app = App("handles")
    app.handlers["agent"] = upper  # type: ignore[assignment]  # the mistake
    with pytest.raises(ConfigurationError, match=r"handlers\['agent'\] = .*: assign a subclass of weft.aworld.Handler"):
        await Runners.run("hi", agent=upper, app=app)


async def test_a_task_runs_through_a_client_and_its_app() -> None:
    app = App("given")
    app.agent("loud")(upper)
    app.add_runner(TaskRunner)
    async with LocalApp(app) as client:
        by_name = await Runners.run("hi", agent="loud", client=client)
        by_object = await Runners.run("hi", agent=upper, client=client, app=app)
        assert by_name.answer == by_object.answer == "HI"
        with pytest.raises(InvalidInput, match=r"^agent: no agent is named 'quiet'; choose from loud"):
            await Runners.run("hi", agent="quiet", client=client)
