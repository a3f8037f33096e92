"""The tutorial's pages 1 to 3 and the how-to pages are run, in their order, in one folder with one `weft up`."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.test_readme import LIMIT_SECONDS, ROOT, Block, folder, running, said_by, variables
from tests.servers.matrix import only_in_matrix

__all__ = ["folder", "variables"]

DOCS = ROOT / "docs"


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def code(page: str, language: str = "python") -> str:
    return "\n\n" + "\n\n".join(block.text for block in blocks(page) if block.language == language)


def shell(page: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "sh"]


def ready(folder: Path, services: int = 4) -> None:
    """Wait until `weft up` has said of as many services that they are ready."""
    log = folder.parent / "up.log"
    give_up_at = time.monotonic() + LIMIT_SECONDS
    while log.read_text(encoding="utf-8").count("✓ ready") < services:
        assert time.monotonic() < give_up_at, log.read_text(encoding="utf-8")
        time.sleep(0.1)


def until(said: str, script: str, folder: Path, variables: dict[str, str]) -> str:
    give_up_at = time.monotonic() + LIMIT_SECONDS
    while said not in (shown := said_by(script, folder, variables)):
        assert time.monotonic() < give_up_at, shown
        time.sleep(1.5)  # each look starts a process
    return shown


PAGES = ("tutorial/1-durable-agent.md", "tutorial/2-tools-and-retries.md", "tutorial/3-human-in-the-loop.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_printed(folder: Path, variables: dict[str, str]) -> None:
    app = (folder / "app.py").read_text(encoding="utf-8") + "".join(code(page) for page in PAGES)
    # Longer than it takes to see it sleep, but not the page's minute.
    app = app.replace("timedelta(minutes=1)", "timedelta(seconds=30)")
    (folder / "app.py").write_text(app, encoding="utf-8")
    [up, submit, watch], [buy, fail, dead, mend], [ask, questions, answer] = map(shell, PAGES)
    [price] = [block.text for block in blocks(PAGES[1]) if block.language == "text"]
    variables = {**variables, "WEFT_METRICS_PORT": "0"}

    with running(up, folder, variables):
        ready(folder)
        said_by(submit, folder, variables)
        until("sleeping", "weft task show t-2", folder, variables)
    with running(up, folder, variables):
        ready(folder)
        # The sleep ends, whatever stopped meanwhile.
        shown = said_by(watch, folder, variables)
        assert "completed" in shown
        assert "nothing new since" in shown

        assert said_by(buy, folder, variables) == price
        assert "it failed" in (failed := said_by(fail, folder, variables))
        assert "the shop does not answer" in failed
        assert "price" in said_by(dead, folder, variables)
        broken = '    if item == "rope":\n        raise ConnectionError("the shop does not answer")\n'
        assert app.count(broken) == 1
        (folder / "app.py").write_text(app.replace(broken, ""), encoding="utf-8")
        # A redriven call that the old code takes would fail again.
        ready(folder, 6)
        assert "rope costs 9.5" in said_by(mend, folder, variables)

        said_by(ask, folder, variables)
        until("weft task signal t-4", questions, folder, variables)
        assert "completed" in said_by(answer, folder, variables)
        assert "published: " in said_by("weft task show t-4", folder, variables)


@only_in_matrix("more pages")
@pytest.mark.slow
def test_the_how_to_pages_run_as_printed(folder: Path, variables: dict[str, str]) -> None:
    app = (folder / "app.py").read_text(encoding="utf-8") + code(PAGES[0])
    (folder / "app.py").write_text(app, encoding="utf-8")
    with running("weft up --app app:app", folder, {**variables, "WEFT_METRICS_PORT": "0"}):
        ready(folder)
        for page in ("cancel", "schedule", "limit-cost", "redact", "tenants", "tune"):
            for block in shell(f"howto/{page}.md"):
                said_by(block, folder, variables)
        assert "cancelled" in said_by("weft task show how-1", folder, variables)


@only_in_matrix("more pages")
@pytest.mark.slow
def test_a_tool_in_javascript_runs_as_printed(folder: Path, variables: dict[str, str]) -> None:
    if shutil.which("node") is None and not os.environ.get("CI"):
        pytest.skip("NOT TESTED: there is no node on this machine")
    page = "howto/other-languages.md"
    app = (folder / "app.py").read_text(encoding="utf-8") + code(page)
    (folder / "app.py").write_text(app, encoding="utf-8")
    (folder / "prices.mjs").write_text(code(page, "js"), encoding="utf-8")
    variables = {**variables, "WEFT_METRICS_PORT": "0"}
    with running("weft up --app app:app", folder, variables):
        ready(folder)
        assert "tea costs 9.5" in said_by("weft submit buyer tea --timeout 60", folder, variables)


def test_every_code_block_is_tested() -> None:
    """Blocks for a cluster are `console` and `dockerfile`: tests/deploy builds what they apply."""
    languages = {block.language for page in (*PAGES, *how_to()) for block in blocks(page)}
    assert languages <= {"python", "sh", "text", "js"}
    assert {block.language for block in blocks("tutorial/6-deploy.md")} == {"console", "dockerfile"}


def how_to() -> list[str]:
    return [f"howto/{page.name}" for page in (DOCS / "howto").glob("*.md")]
