"""`weft tenant`."""

from __future__ import annotations

from tests.integration.cli.desk import Weft


def test_tenants_have_settings(weft: Weft) -> None:
    assert weft("tenant", "set", "acme", "--weight", "2", "--max-open", "100", "--rate", "2.5").status == 0
    assert weft("tenant", "set", "*", "--max-open", "10").status == 0
    assert weft("submit", "echo", "x", "--tenant", "acme", "--priority", "9").out == "x\n"
    found = {row["tenant"]: row for row in weft("tenant", "list", "--json").json}
    assert found["acme"] == {
        "tenant": "acme", "weight": 2, "max_open": 100, "rate": 2.5, "open": 0, "waiting": 0,
    }  # fmt: skip
    assert (found["*"]["max_open"], found["*"]["rate"]) == (10, None)
    assert "acme    2       100       2.5   0     0" in weft("tenant", "list").out
    for name in ("acme", "*"):
        assert weft("tenant", "remove", name).status == 0
    ended = weft("tenant", "remove", "acme")
    assert (ended.status, ended.err) == (
        1,
        "weft tenant remove: tenant: 'acme' has no settings; see `weft tenant list`\n",
    )
    ended = weft("tenant", "set", "", "--max-open", "1")
    assert (ended.status, "the unnamed tenant cannot have limits" in ended.err) == (1, True)
