"""Unknown variables that look like settings are refused in one line, and valid ones never are."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.errors import ConfigurationError
from runtime_core.host.service import run_service
from runtime_core.settings import Settings


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("WEFT_LEASE_SECOND", "did you mean WEFT_LEASE_SECONDS?"),
        ("WEFT_REDISURL", "did you mean WEFT_REDIS_URL?"),
        ("WEFT_SPARK_LOCAL_MASTERS", "did you mean WEFT_SPARK_LOCAL_MASTER?"),
        ("WEFT_HTTP_CORS", "did you mean WEFT_HTTP_ORIGINS?"),
        ("WEFT_COLOUR", "WEFT_APP_"),
        ("WEFT_", "WEFT_APP_"),
        ("WEFT_REDIS_SERVICE_HOST", "enableServiceLinks: false"),
        ("WEFT_REDIS_PORT_6379_TCP_ADDR", "enableServiceLinks: false"),
        ("WEFT_PORT", "enableServiceLinks: false"),
    ],
)
def test_a_variable_that_is_not_a_setting_is_refused_in_one_line(variable: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({variable: "3", "WEFT_NAMESPACE": "desk"})
    message = str(caught.value)
    assert message.startswith(f"{variable}: ")
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "variable",
    [
        "WEFT_APP_TOKEN",
        "WEFT_TEST_CACHE",
        "WEFT_CHAOS_SEED",
        "WEFT_SIMULATION_HISTORIES",
        "WEFT_NIGHTLY_MINUTES",
        "DESK_DOCS",
    ],
)
def test_foreign_variables_are_ignored(variable: str) -> None:
    assert Settings.from_environment({variable: "x"}) == Settings.from_environment({})


def test_a_blank_variable_counts_as_not_set() -> None:
    assert Settings.from_environment({"WEFT_COLOUR": " "}) == Settings.from_environment({})


def test_a_service_with_an_unknown_setting_names_it_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def build(*_: object) -> object:
        raise AssertionError("nothing is built with settings that are wrong")

    status = run_service("agent-handler", build, {"WEFT_PARTITION": "2", "WEFT_DATA_DIR": str(tmp_path)})  # type: ignore[arg-type]
    assert status == 1
    assert capsys.readouterr().err == (
        "weft agent-handler: WEFT_PARTITION: there is no such setting; did you mean WEFT_PARTITIONS?\n"
    )
