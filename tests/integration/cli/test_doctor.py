"""`weft doctor`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from runtime_core.cli.main import main
from tests.integration.cli.desk import Desk, Ended, Weft, letters_of, shown_with, until


def test_tasks_that_wait_for_turns_are_shown_and_repaired(weft: Weft, desk: Desk) -> None:
    """Submit them in a pool that nobody serves, so that they stay where they are."""
    with closing(desk.redis()) as server:
        ready = server.hget("weft:{0}:meta", "ready_max")
        assert ready == b"128"
        server.hset("weft:{0}:agents", "unserved", "agent:nobody")
        server.hset("weft:{0}:meta", "ready_max", 1)
        tasks = [f"turn-{number}" for number in range(12)]
        try:
            for task in tasks:
                weft("submit", "unserved", "--task-id", task, "--tenant", "acme", "--no-wait")
            until(lambda: server.xlen("weft:{0}:agent:nobody") == 9)
            assert weft("lag", "--json").json["waiting"] == {"acme": 3}
            assert "acme    3" in weft("lag").out
            assert "waits    for its tenant's turn to start unserved\n" in weft("task", "show", "turn-11").out
            [row] = weft("tenant", "list", "--json").json
            assert (row["tenant"], row["open"], row["waiting"]) == ("acme", 12, 3)
            assert "stuck" not in wrong_or_nothing(weft("doctor", "--json"))
            server.zrem("weft:{0}:queue:agent:nobody|acme", "turn-11")
            assert "task turn-11" in wrong(weft("doctor", "--json"))["stuck"]
            weft("doctor", "--repair")
            assert server.hget("weft:{0}:task:turn-11", "cur") != b"queue"
        finally:
            server.hset("weft:{0}:meta", "ready_max", 128)
            for task in tasks:
                weft("task", "cancel", task)
            server.hdel("weft:{0}:agents", "unserved")
            server.delete("weft:{0}:agent:nobody", "weft:{0}:queues", "weft:{0}:turns:agent:nobody")
            server.hdel("weft:{0}:meta", "queued")


def test_the_doctor_names_a_delivery_that_a_handler_runs_alone(weft: Weft, desk: Desk) -> None:
    stream, group = "weft:{0}:agent:nobody", "agent-handler"
    with closing(desk.redis()) as server:
        server.hset("weft:{0}:agents", "poison", "agent:nobody")
        try:
            server.xgroup_create(stream, group, "0", mkstream=True)
            weft("submit", "poison", "--task-id", "killer", "--no-wait")
            until(lambda: server.xlen(stream) == 1)
            [[_, [[entry, _]]]] = cast(Any, server.xreadgroup(group, "gone", {stream: ">"}))  # Any: untyped
            server.xclaim(stream, group, "gone", 0, [entry], retrycount=3)
            alive = cast(list[bytes], server.zrange("weft:{0}:alive", 0, -1))
            [handler] = [name for name in alive if name.startswith(b"agent-handler@")]
            server.hset("weft:{0}:quarantine", "~agent:nobody", handler)
            message = wrong(weft("doctor", "--json"))["quarantine"]
            assert message.startswith(f"{handler.decode()} is about to run a turn of agent 'poison' of task killer,")
            assert "cancel the task (weft task cancel killer)" in weft("doctor").out
        finally:
            weft("task", "cancel", "killer")
            server.hdel("weft:{0}:agents", "poison")
            server.delete(stream, "weft:{0}:quarantine")


def wrong_or_nothing(ended: Ended) -> dict[str, str]:
    return {check["check"]: check["message"] for check in ended.json["checks"] if not check["ok"]}


def test_the_doctor_finds_nothing_wrong(weft: Weft) -> None:
    ended = weft("doctor")
    assert ended.status == 0, ended.out
    assert ended.out.endswith("\nall checks passed\n")
    assert "✗" not in ended.out
    found = weft("doctor", "--json").json
    assert found["ok"] is True
    messages: dict[str, str] = {}
    for check in found["checks"]:
        messages.setdefault(check["check"], check["message"])
    assert messages["server"].startswith("Valkey ")
    assert "appendfsync everysec" in messages["persistence"]
    assert messages["namespace"] == "'weft' has 1 partition, format 1"
    assert "desk 7: agents alone, approver, asker, " in messages["apps"]
    assert messages["consumers"] == "alive: 1 agent-handler, 1 state-manager, 1 tool-handler, 1 trajectory-recorder"
    assert {"maxmemory-policy", "memory", "clock", "functions", "ingress", "stuck", "deadlock"} <= messages.keys()


def wrong(ended: Ended) -> dict[str, str]:
    """Return which checks of the doctor failed, and why."""
    assert ended.status == 1
    return {check["check"]: check["message"] for check in ended.json["checks"] if not check["ok"]}


def test_the_doctor_sees_a_tenant_whose_schedules_are_almost_too_large(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        weft("publisher", "set", "shop", "--tenant", "acme")
        try:
            server.hset("weft:{0}:schedules", mapping={"acme.small": "x" * 1000, "own.large": "x" * 15_500_000})
            assert "schedules" not in wrong_or_nothing(weft("doctor", "--json"))
            assert "tenant acme has 1 of 10000 schedules, 1.0 KiB of 16.0 MiB" in weft("doctor").out
            server.hset("weft:{0}:schedules", "acme.large", "x" * 15_500_000)
            assert "tenant acme has 2 of 10000" in wrong(weft("doctor", "--json"))["schedules"]
        finally:
            server.hdel("weft:{0}:schedules", "acme.small", "acme.large", "own.large")
            weft("publisher", "delete", "shop")


def test_the_doctor_sees_an_evicting_server(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert wrong(weft("doctor", "--json")).keys() == {"maxmemory-policy"}
            text = weft("doctor").out
        finally:
            server.config_set("maxmemory-policy", "noeviction")
    assert "✗ maxmemory-policy: allkeys-lru: the server may evict unfinished work\n" in text
    assert "    → CONFIG SET maxmemory-policy noeviction" in text


def test_the_doctor_names_what_a_server_without_a_file_loses(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.config_set("appendonly", "no")
        try:
            found = wrong(weft("doctor", "--json"))
        finally:
            server.config_set("appendonly", "yes")
    assert found == {"persistence": "appendonly is off: a restart of the server loses all data"}


def test_the_doctor_sees_an_empty_namespace(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", "empty")
    assert {"namespace", "consumers", "apps"} <= wrong(weft("doctor", "--json")).keys()


def test_the_doctor_reports_a_missing_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("✗ server: no broker: ")


def test_the_doctor_reports_a_different_trajectory_store(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weft("submit", "echo", "x", "--task-id", "cursor-1")
    shown_with(weft, "cursor-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    (tmp_path / "other.db").touch()
    monkeypatch.setenv("WEFT_TRAJECTORY_URL", f"sqlite:///{tmp_path}/other.db")
    found = wrong(weft("doctor", "--json"))
    assert found.keys() == {"trajectories"}
    assert "steps are missing" in found["trajectories"]


def test_the_doctor_removes_functions_of_other_releases(weft: Weft, desk: Desk) -> None:
    source = "#!lua name=weft_00000000\nredis.register_function('weft_00000000_old', function() return 1 end)"
    with closing(desk.redis()) as server:
        server.function_load(source)
        server.function_load(source.replace("weft_00000000", "other_00000000"))
        assert "weft_00000000 of other releases" in weft("doctor").out
        assert "removed weft_00000000" in weft("doctor", "--clean").out
        assert server.function_list("weft_00000000") == []
        assert server.function_list("other_00000000") != []
        server.function_delete("other_00000000")
    assert weft("submit", "echo", "still here").out == "still here\n"


def test_the_doctor_repairs_a_run_whose_entry_was_deleted(weft: Weft, desk: Desk) -> None:
    flag = desk.folder / "cut-flag"
    weft("submit", "blocked", str(flag), "--task-id", "cut-1", "--key", "cut", "--no-wait")
    until(flag.with_name("cut-flag.begun").exists)
    with closing(desk.redis()) as server:
        entry = server.hget("weft:{0}:task:cut-1", "cur")
        assert isinstance(entry, bytes)
        assert server.xdel("weft:{0}:agent", entry) == 1
        server.xack("weft:{0}:agent", "agent-handler", entry)
    found = wrong(weft("doctor", "--json"))
    assert found == {"stuck": f"run r of task cut-1: its entry or timer ({entry.decode()}) is missing"}
    repaired = weft("doctor", "--repair")
    assert repaired.status == 0, repaired.out
    assert "repaired: run r of task cut-1" in repaired.out
    view = weft("task", "show", "cut-1", "--json").json
    assert (view["status"], view["error"]["type"]) == ("failed", "LostEntry")
    flag.touch()
    (letter,) = letters_of(weft, "cut-1")
    assert weft("dead", "redrive", letter, "--reopen").status == 0
    assert shown_with(weft, "cut-1", lambda view: view["status"] == "completed")["output"] == "unblocked"
    # The instance is free again.
    assert weft("submit", "blocked", str(flag), "--key", "cut").out == "unblocked\n"


def test_the_doctor_repairs_a_step_that_nothing_will_answer(weft: Weft, desk: Desk) -> None:
    weft("submit", "sleeper", "300", "--task-id", "cut-2", "--no-wait")
    shown_with(weft, "cut-2", lambda view: any("due" in wait for wait in view.get("waits_for", ())))
    with closing(desk.redis()) as server:
        assert server.zrem("weft:{0}:timers", "s|cut-2|r|1") == 1
    assert wrong(weft("doctor", "--json")) == {
        "stuck": "step r/1 of task cut-2: the call that would answer it is missing"
    }
    assert weft("doctor", "--repair").status == 0
    view = shown_with(weft, "cut-2", lambda view: view["status"] == "failed")
    assert "deleted from the broker" in view["error"]["message"]


def test_the_doctor_repairs_a_held_instance_and_a_forgotten_mailbox(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.hset("weft:{0}:inst:echo/held", "busy", "ghost|r")
        weft("submit", "echo", "at last", "--key", "held", "--task-id", "held-1", "--no-wait")
        assert wrong(weft("doctor", "--json")) == {
            "stuck": "instance echo/held is held by task ghost, which does not exist any more"
        }
        assert weft("doctor", "--repair").status == 0
        assert shown_with(weft, "held-1", lambda view: view["status"] == "completed")["output"] == "at last"

        server.hset("weft:{0}:inst:echo/held", "busy", "ghost|r")
        weft("submit", "echo", "again", "--key", "held", "--task-id", "held-2", "--no-wait")
        server.hdel("weft:{0}:inst:echo/held", "busy")
    assert "stuck" in wrong(weft("doctor", "--json"))
    assert weft("doctor", "--repair").status == 0
    assert shown_with(weft, "held-2", lambda view: view["status"] == "completed")["output"] == "again"
