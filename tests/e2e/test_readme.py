"""The README and the tutorial are run: their app, commands and programs, in their order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.matrix import first_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = (README, TUTORIAL, *(ROOT / "docs" / "tutorial" / name for name in ("4-model-and-mcp.md", "5-test.md")))
"""tests/e2e/test_tutorial.py runs the other pages."""
LIMIT_SECONDS = 60

# The servers of the development lock come without their command line; this one prints replies in its way.
REDIS_CLI = """\
#!{python}
import sys
import redis

def show(reply, indent=""):
    if isinstance(reply, (list, tuple)):
        for part in reply:
            show(part, indent + "  ")
    else:
        print(indent + (reply.decode() if isinstance(reply, bytes) else str(reply)))

assert sys.argv[1] == "-u"
with redis.Redis.from_url(sys.argv[2], protocol=2, socket_timeout=30) as client:
    client.response_callbacks.clear()
    show(client.execute_command(*sys.argv[3:]))
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    text: str


def blocks() -> list[Block]:
    """The fenced blocks of the pages."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def the(language: str, start: str) -> str:
    """Return the only block of this language with a line that starts like this."""
    found = [
        block.text
        for block in blocks()
        if block.language == language and any(line.startswith(start) for line in block.text.splitlines())
    ]
    assert len(found) == 1, f"{len(found)} blocks with {start!r}"
    return found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with the README's app in it."""
    own = tmp_path / "my desk"
    own.mkdir()
    (own / "app.py").write_text(the("python", "app = App("), encoding="utf-8")
    return own


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has activated .venv."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "redis-cli").write_text(REDIS_CLI.format(python=sys.executable))
    (commands / "redis-cli").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return {**kept, "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def running(script: str, folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Run the script as in a separate terminal and end it with Ctrl-C. It must exit cleanly."""
    log = folder.parent / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-ec", f"exec {script}"],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 0
    except BaseException:
        print(log.read_text())
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def said_by(script: str, folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_app_runs_as_the_page_says(folder: Path, variables: dict[str, str]) -> None:
    expected = the("text", "Redis Streams: found").strip()
    # `weft submit` looks for a broker that `weft up` has started: it must be there.
    wait = 'for _ in $(seq 600); do [ -e .weft/endpoint ] && exit 0; sleep 0.05; done; echo "no broker"; exit 1'
    with running(the("sh", "weft up"), folder, variables):
        said_by(wait, folder, variables)
        assert said_by(the("sh", "weft submit"), folder, variables).strip() == expected
        answers = said_by(the("sh", "redis-cli"), folder, variables)
        assert "weft.task.accepted" in answers or "weft.task.completed" in answers
        give_up_at = time.monotonic() + LIMIT_SECONDS
        while True:
            shown = said_by(the("sh", "weft task show"), folder, variables)
            if "completed" in shown and "agent writer" in shown and "not complete" not in shown:
                break
            assert time.monotonic() < give_up_at, shown
            time.sleep(0.5)  # each look starts a process
        printed = said_by(
            f"python - <<'PROGRAM'\n{the('python', 'asyncio.run(main')}\nPROGRAM", folder, variables
        ).splitlines()
        assert printed[0].startswith("weft.output.delta")
        assert printed[-1] == f"completed {expected}"


@pytest.mark.parametrize("plugins", first_of((), ("-p", "no:asyncio")), ids=str)
def test_the_test_of_the_first_app_passes(folder: Path, variables: dict[str, str], plugins: tuple[str, ...]) -> None:
    (folder / "test_app.py").write_text(the("python", "async def test_the_researcher_survives"), encoding="utf-8")
    command = " ".join([the("sh", "pytest -q").strip(), *plugins])
    assert "2 passed" in said_by(command, folder, variables)


def test_the_apis_of_other_systems_run_as_documented(folder: Path, variables: dict[str, str]) -> None:
    program = the("python", "asyncio.run(both")
    assert said_by(f"python - <<'PROGRAM'\n{program}\nPROGRAM", folder, variables) == the("text", "edited: streams")


def test_the_agent_that_a_model_drives_is_declared_as_the_page_says(folder: Path, variables: dict[str, str]) -> None:
    program = f"from app import app, search\n{the('python', 'app.add_mcp(')}\napp.check()\nprint(*sorted(app.agents))"
    said = said_by(f"python - <<'PROGRAM'\n{program}\nPROGRAM", folder, variables)
    assert said.split() == ["assistant", "researcher", "writer"]


def test_every_code_block_is_tested() -> None:
    tried = {
        "mermaid": ["flowchart LR"],
        "sh": ["make run", "weft up", "weft submit", "redis-cli", "weft task show", "pytest -q"],
        "python": [
            "app = App(",
            "app.add_mcp(",
            "asyncio.run(main",
            "async def test_the_researcher_survives",
            "asyncio.run(both",
        ],
        "text": ["Redis Streams: found", "edited: streams"],
    }
    assert sorted(block.text for block in blocks()) == sorted(
        the(language, start) for language, starts in tried.items() for start in starts
    )


@pytest.mark.parametrize("page", [README, ROOT / "examples" / "README.md"], ids=["README", "examples"])
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named
    assert named <= targets


def test_the_readme_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


def test_every_document_is_in_the_list() -> None:
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [page for page in pages if f"]({page})" not in listed] == []


def test_every_document_is_in_the_navigation_of_the_site() -> None:
    named = set(re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    folders = ("", "internals", "tutorial", "howto")
    pages = [page for folder in folders for page in (ROOT / "docs" / folder).glob("*.md")]
    assert {page.relative_to(ROOT / "docs").as_posix() for page in pages} <= named


def test_the_app_is_well_typed(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(folder / "app.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, textwrap.indent(done.stdout, "  ")
