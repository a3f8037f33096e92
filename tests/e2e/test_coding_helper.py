"""The coding helper: a model that calls an MCP server's tools, as a program, and on services that are killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.fleet import Fleet
from tests.openai_server.driver import OpenAIServer, answer, calls, gated, turns
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
MODEL = "openai-chat:gpt-test"
FIXED = "def area(width, height):\n    return width * height  # was a sum: ü\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    (made / "src").mkdir(parents=True)
    (made / "src" / "area.py").write_text("def area(width, height):\n    return width + height\n")
    (made / "README.md").write_text("Areas of things.\n")
    (made / ".hidden").write_text("def area\n")
    (tmp_path / "outside.txt").write_text("secret")
    (made / "way_out").symlink_to(tmp_path / "outside.txt")
    return made


def environ(server: OpenAIServer, folder: Path) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": server.key,
        "CODING_HELPER_FOLDER": str(folder),
        "CODING_HELPER_MODEL": MODEL,
    }


def run(server: OpenAIServer, folder: Path, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return subprocess.run(
        [sys.executable, "-m", "examples.coding_helper", "--folder", str(folder), "--model", MODEL, *arguments],
        cwd=ROOT,
        env={**inherited, **environ(server, folder)},
        input=said,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def results(server: OpenAIServer) -> list[str]:
    """Return the tools' results in the last request."""
    messages = server.request(server.ledger()[-1].number)["messages"]
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def test_it_reads_searches_and_changes_a_file(openai_server: OpenAIServer, folder: Path) -> None:
    openai_server.play(
        turns(
            calls(("files_list_files", {}), ("files_search_files", {"pattern": r"def \w+"})),
            calls(("files_read_file", {"path": "src/area.py"}), ("files_read_file", {"path": "way_out"})),
            calls(("files_read_file", {"path": "../outside.txt"}), ("files_search_files", {"pattern": "("})),
            calls(("files_write_file", {"path": "src/area.py", "content": FIXED})),
            answer("The area is a product now."),
        )
    )
    done = run(openai_server, folder, "--yes", "Fix the area.")
    assert done.returncode == 0, done.stderr
    assert "[write src/area.py, 2 lines] yes" in done.stdout
    assert done.stdout.endswith("The area is a product now.\n")
    assert (folder / "src" / "area.py").read_text() == FIXED
    listed, found, read, link, outside, pattern, written = results(openai_server)
    assert '"files":["README.md","src/area.py"]' in listed.replace(" ", "")
    assert '"line":1' in found.replace(" ", "")
    assert ".hidden" not in found
    assert read == "def area(width, height):\n    return width + height\n"
    assert "secret" not in link + outside
    assert "'way_out' is outside the folder" in link
    assert "'../outside.txt' is outside the folder" in outside
    assert "is not a regular expression" in pattern
    assert '"path":"src/area.py"' in written.replace(" ", "")


def test_a_call_that_the_user_refuses_does_not_run_and_the_model_gets_the_reason(
    openai_server: OpenAIServer, folder: Path
) -> None:
    openai_server.play(
        turns(calls(("files_write_file", {"path": "README.md", "content": "gone"})), answer("I have left it."))
    )
    done = run(openai_server, folder, "Change the text.", said="keep it as it is\n")
    assert done.returncode == 0, done.stderr
    assert (folder / "README.md").read_text() == "Areas of things.\n"
    assert "keep it as it is" in results(openai_server)[0]
    assert done.stdout.endswith("I have left it.\n")


@only_in_matrix("on services that are killed")
async def test_killed_services_pay_for_no_answer_twice_and_write_once(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path, folder: Path
) -> None:
    openai_server.play(
        turns(
            calls(("files_read_file", {"path": "src/area.py"})),
            calls(("files_write_file", {"path": "src/area.py", "content": FIXED})),
            gated(answer("Done."), "last"),
        )
    )
    members = Fleet(
        valkey.url,
        namespace,
        tmp_path / "services",
        replicas={"agent-handler": 1, "tool-handler": 1, "state-manager": 1},
        app="examples.coding_helper.app:app",
        # Those that are killed hold nothing: nobody need be declared dead, and a busy machine must not seem to be.
        lease_seconds=10.0,
        environ=environ(openai_server, folder),
    )
    async with members, Client.connect(valkey.url, namespace=namespace) as client:
        task = await client.submit("helper", "Fix the area.", stream=True, timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            async for event in task.stream():
                if event.type == "weft.human.requested":
                    request = event.data["request_id"]
                    break
            else:
                pytest.fail(f"it has ended: {event.data}")
        members.kill("agent-handler-1")
        members.kill("tool-handler-1")
        assert (folder / "src" / "area.py").read_text() != FIXED
        await task.signal(request, True)
        openai_server.release("last")
        assert (await task.result(timeout=SECONDS)).value() == "Done."
        assert (folder / "src" / "area.py").read_text() == FIXED
        assert openai_server.counts().repeated == 0
        assert openai_server.counts().complete == 3
