"""`weft schedule`."""

from __future__ import annotations

from tests.integration.cli.desk import Weft, shown_with, until


def test_a_schedule_is_set_shown_started_and_removed(weft: Weft) -> None:
    said = weft("schedule", "set", "nightly", "echo", '{"a": 1}', "--cron", "0 3 * * *", "--timezone", "Asia/Tokyo")
    assert said.status == 0, said.err
    (listed,) = weft("schedule", "list", "--json").json
    assert (listed["schedule_id"], listed["input"], listed["timezone"]) == ("nightly", {"a": 1}, "Asia/Tokyo")
    assert "0 3 * * * Asia/Tokyo" in weft("schedule", "list").out
    task = weft("schedule", "run", "nightly").out.strip()
    assert shown_with(weft, task, lambda seen: seen["status"] == "completed")["output"] == {"a": 1}
    assert weft("schedule", "delete", "nightly").status == 0
    gone = weft("schedule", "delete", "nightly")
    assert (gone.status, gone.err.startswith("weft schedule delete: there is no schedule")) == (1, True)


def test_a_delayed_task_is_started_by_the_services(weft: Weft) -> None:
    assert weft("schedule", "set", "soon", "echo", '"hi"', "--delay", "0.2").status == 0
    until(lambda: weft("schedule", "list", "--json").json[0]["started"] == 1)
    task = weft("schedule", "list", "--json").json[0]["last_task_id"]
    assert shown_with(weft, task, lambda seen: seen["status"] == "completed")["output"] == "hi"
    assert weft("schedule", "delete", "soon").status == 0


def test_a_schedule_that_cannot_work_is_refused(weft: Weft) -> None:
    for arguments, field in (
        (["--cron", "* * *"], ": cron: "),
        (["--at", "soon"], ": at: "),
        (["--every", "60", "--timezone", "Mars/Base"], ": timezone: "),
    ):
        refused = weft("schedule", "set", "odd", "echo", *arguments)
        assert (refused.status, field in refused.err) == (1, True)
