"""Takes the screenshots of docs/console.md in an installed Chromium: make screenshots."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from runtime_core.client.client import Client

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).parent.parent
SHOTS = {
    "console-overview": ("", "light", (1280, 800)),
    "console-tasks": ("/tasks", "light", (1280, 800)),
    "console-failure": ("/tasks/analyst-acme", "light", (1280, 960)),
    "console-system": ("/system?checks=1", "light", (1280, 960)),
    "console-dark": ("/tasks/report-streams", "dark", (1280, 640)),
}
"""File → path, theme and size."""
TASKS = (
    *(("reporter", f"topic {number}", f"report-{number}") for number in range(1, 6)),
    ("reporter", "Redis Streams", "report-streams"), ("analyst", "ACME", "analyst-acme"),
    ("editor", "Weft has a console", "edit-console"), ("approver", "Dear readers,\n\n…", "newsletter-47"),
    ("archivist", 3, "archive-old"), ("listener", "x", "listen-news"), ("hasty", "a poem", "hasty-poem"),
)  # fmt: skip
READY = re.compile(r"HTTP on (http://\S+:\d+)")


def main() -> None:
    import asyncio

    with tempfile.TemporaryDirectory(prefix="desk-") as folder:
        log = Path(folder) / "log"
        environ = {**os.environ, "WEFT_DATA_DIR": folder}
        # A copy, since its path is seen in a traceback.
        shutil.copy(ROOT / "tests" / "apps" / "console_app.py", folder)
        command = [sys.executable, "-m", "runtime_core.cli.main", "up", "--app", "console_app:app", "--http-port", "0"]
        with log.open("wb") as out:
            running = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)  # noqa: S603 - our own
        try:
            url, broker = _started(log)
            asyncio.run(_submit(broker))
            _take(url)
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)


def _started(log: Path) -> tuple[str, str]:
    """Wait until all services are ready. Return the URLs of the gateway and of the broker."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if len(re.findall(r"ready in", text)) >= 5:
            found = re.search(r"redis://\S+", text)
            assert found is not None
            return READY.findall(text)[-1], found[0]
        time.sleep(0.2)
    raise SystemExit(f"the services did not start:\n{log.read_text(errors='replace')}")


async def _submit(broker: str) -> None:
    async with Client.connect(broker) as client:
        for agent, given, task_id in TASKS:
            await client.submit(agent, given, task_id=task_id, stream=True)
        for task_id in ("report-streams", "analyst-acme"):
            await (await client.task(task_id)).result(30)


def _take(url: str) -> None:
    path = os.environ.get("WEFT_TEST_CHROMIUM") or shutil.which("chromium")
    if path is None:
        raise SystemExit("there is no Chromium on this machine: install one, or name it in WEFT_TEST_CHROMIUM")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (page_path, theme, (width, height)) in SHOTS.items():
            page = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if theme == "dark" else "light"
            ).new_page()
            page.goto(f"{url}/console{page_path}")
            page.wait_for_timeout(500)
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
