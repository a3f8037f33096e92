"""`WEFT_TEST_SERVERS` selects the servers that the tests run on; by default, a test is repeated on none."""

from __future__ import annotations

import pytest

from tests.servers.matrix import MATRIX, SELECTION, VALKEY_9, first_of, named_servers, only_in_matrix, repeat_on


@pytest.mark.parametrize(
    ("value", "repeated", "named"),
    [
        ("", [VALKEY_9], None),
        ("all", [*MATRIX], None),
        ("redis-7.0, redis-8.0", ["redis-7.0", "redis-8.0"], {"redis-7.0", "redis-8.0"}),
        ("docker-redis-7.2", [], {"docker-redis-7.2"}),
    ],
)
def test_a_contract_is_repeated_on_the_selected_servers(
    value: str, repeated: list[str], named: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELECTION, value)
    assert repeat_on(*MATRIX) == repeated
    assert named_servers() == named


def test_one_server_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SELECTION, raising=False)
    assert repeat_on(*MATRIX) == [VALKEY_9]
    assert named_servers() is None


@pytest.mark.parametrize(
    ("value", "skipped", "cases"),
    [("", True, ["a", "b"]), ("valkey-9", True, ["a", "b"]), ("all", False, ["a", "b", "c"])],
)
def test_variants_run_in_the_whole_matrix_only(
    value: str, skipped: bool, cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELECTION, value)
    mark = only_in_matrix("on a Cluster").mark
    assert (mark.name, mark.args, mark.kwargs) == ("skipif", (skipped,), {"reason": "in the matrix: on a Cluster"})
    assert first_of("a", "b", "c", least=2) == cases
