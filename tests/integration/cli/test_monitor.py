"""`weft lag`."""

from __future__ import annotations

from tests.integration.cli.desk import Desk, Weft, shown_with, until


def test_lag_shows_streams_groups_and_totals(weft: Weft, desk: Desk) -> None:
    flag = desk.folder / "lag-flag"
    weft("submit", "blocked", str(flag), "--task-id", "lag-1", "--key", "k", "--no-wait")
    until(flag.with_name("lag-flag.begun").exists)
    weft("submit", "blocked", str(flag), "--task-id", "lag-2", "--key", "k", "--no-wait")
    found = weft("lag", "--json").json
    streams = {row["stream"]: row for row in found["streams"]}
    assert streams["tasks"]["group"] == "state-manager"
    assert (streams["agent"]["group"], streams["agent"]["pending"], streams["agent"]["backlog"]) == (
        "agent-handler",
        1,
        0,
    )
    assert streams["agent"]["oldest_pending_ms"] >= 0
    assert streams["tool"]["oldest_pending_ms"] is None
    assert {row["group"] for row in found["record"]} == {"state-manager", "trajectory-recorder"}
    assert (found["mailboxes"], found["mailbox_events"]) == (1, 1)
    assert found["timers"] >= found["timers_due"] == 0
    text = weft("lag").out
    assert "{0}:agent  agent-handler  0        1" in text
    assert "mailboxes     1 events in 1 mailboxes\n" in text
    assert (
        "waits    for its turn in the mailbox of blocked/k, which task lag-1 holds\n"
        in weft("task", "show", "lag-2").out
    )
    flag.touch()
    shown_with(weft, "lag-2", lambda view: view["status"] == "completed")
