"""Services are started by their names."""

from __future__ import annotations

import pytest

from runtime_core.host import services
from runtime_core.host.service import Build
from runtime_core.host.stack import RAY_GATEWAY, SPARK_GATEWAY
from runtime_core.host.stack import SERVICES as STARTED
from tests.architecture.tree import ROOT


def test_every_service_has_a_folder_and_every_folder_a_service() -> None:
    folders = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert folders == {name.replace("-", "_") for name in services.SERVICES}
    assert {*STARTED, RAY_GATEWAY, SPARK_GATEWAY} == folders


@pytest.mark.parametrize("name", services.SERVICES)
def test_every_service_can_be_wired(name: str) -> None:
    assert callable(services.build_of(name))


@pytest.mark.parametrize(
    ("arguments", "variable"), [(["tool-handler"], ""), (["tool_handler"], "state-manager"), ([], "tool_handler")]
)
def test_a_service_is_named_by_an_argument_or_the_variable(
    arguments: list[str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, Build]] = []
    monkeypatch.setattr(services, "serve", lambda name, build: served.append((name, build)))
    monkeypatch.setenv("SERVICE", variable)
    services.main(arguments)
    assert served == [("tool-handler", services.build_of("tool-handler"))]


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["tool-handlr"], "tool-handler", "tool-handlr: there is no such service"),
        (["tool-handler", "more"], "", "tool-handler more: there is no such service"),
        ([], "tool-handlr", "SERVICE='tool-handlr': there is no such service"),
        ([], "", "SERVICE is not set"),
    ],
)
def test_a_name_of_no_service_is_told_in_one_line(
    arguments: list[str],
    variable: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVICE", variable)
    assert services.main(arguments) == 2
    assert capsys.readouterr().err == f"weft: {said}; choose one of {', '.join(services.SERVICES)}\n"
