"""The console says which tasks no running handler can continue, and how to get one that can."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.gateway.access import REASON_FIELDS_MAX
from runtime_core.gateway.console.boards import SHOWN
from runtime_core.state_manager.backlog import held_work
from tests.integration.gateway.consoles import console_fleet, page, send, shown
from tests.integration.gateway.gateways import http
from tests.servers.process import Server
from weft import Client

pytestmark = pytest.mark.timeout(300)
LACK = "No running handler of pool 'gpu' has tool 'render_label': start one with WEFT_POOLS=gpu."


async def test_the_pool_that_a_tool_waits_for_is_named(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path, "tests.apps.pool_app:app") as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await trusted.submit("labeller", "fragile", task_id="label-1")
        why = await shown(client, "/tasks/label-1", LACK)
        assert not why.all("section", **{"class": "waits"}), "it is said once"
        assert "no running handler of pool gpu" in (await page(client, "/agents")).text
        assert "1 running handler" in (await page(client, "/agents")).text
        answer = await client.get("/v1/tasks/label-1")
        assert answer.json()["without_handler"] == [{"kind": "tool", "name": "render_label", "pool": "gpu"}]
        checks = await page(client, "/system?checks=1")
        assert LACK[1:].partition(":")[0] in checks.text
        assert "start one with WEFT_POOLS=gpu" in checks.text
        listed = await page(client, "/tasks")
        assert LACK[1:].partition(":")[0] in listed.text
        assert listed.text.count("Session") == 1, "of the filter"
        # The list does not read what is large.
        bus, names = trusted.buses[0], [f"x:{number}" for number in range(REASON_FIELDS_MAX)]
        key = bus.keys.task("label-1")
        await bus.transport.call("HSET", key, *(word for name in names for word in (name, "")))
        assert LACK[1:].partition(":")[0] not in (await page(client, "/tasks")).text
        await bus.transport.call("HDEL", key, *names)
        board = await shown(client, "", "1 call waits")
        assert LACK.partition(":")[0] in board.text
        assert "Start one with WEFT_POOLS=gpu." in board.text
        assert "Waitingwork1" in board.text.replace(" ", "")
        assert [each["href"] for each in board.all("a") if "status=" in each["href"]][:2] == [
            "/console/tasks?status=running", "/console/tasks?status=waiting",
        ]  # fmt: skip
        # A cancelled task says so once, and runs again with a given input: its own one is not recorded.
        await (await trusted.task("label-1")).cancel("out of paper")
        ended = await shown(client, "/tasks/label-1", "The input of a cancelled task is not recorded.")
        assert ended.text.count("out of paper") == 1
        again = await send(client, "/tasks/label-1/fork", ended, {"replace": "1", "input": "heavy"})
        assert again.headers["location"].endswith("notice=again"), again.text
        path = again.headers["location"].partition("?")[0].removeprefix("/console")
        await shown(client, path + "?tab=data", "heavy")


async def test_a_slow_tool_is_found_behind_open_questions(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        for number in range(SHOWN):
            await trusted.submit("editor", "news", task_id=f"ask-{number}")
        for number in range(SHOWN):
            await shown(client, f"/tasks/ask-{number}", "Publish")
        board = await page(client, "")
        assert f"The {SHOWN} oldest open tasks wait only for people." in board.text
        assert "No process works on a task." in board.text
        await trusted.submit("printer", str(tmp_path / "proof"), task_id="print-1")
        board = await shown(client, "", "waits: tool print_proof")
        assert board.all("a", href="/console/tasks/print-1?step=r/1")
        assert "asks a person" not in board.text
        assert "At work now1" in board.text
        slow = await page(client, "/tasks?waits=tool")
        assert "print-1" in slow.text
        assert "ask-0" not in slow.text
        asking = await page(client, "/tasks?waits=person")
        assert "ask-0" in asking.text
        assert "print-1" not in asking.text
        assert "print-1" in (await page(client, "/tasks?waits=nothing")).text
        assert "Cancel the task to stop it." in (await page(client, "/tasks/print-1")).text
        # Of a tenant, only its own work is shown.
        [held], count = await held_work(trusted.buses[0], 8)
        assert (held.kind, held.name, held.task, held.path, count) == ("tool", "print_proof", "print-1", "r/1", 1)
        assert await held_work(trusted.buses[0], 8, "acme") == ([], 0)
        (tmp_path / "proof").touch()
        await shown(client, "/tasks/print-1", "completed")
