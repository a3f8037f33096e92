"""Where one process spends its time: a round with that process under cProfile, which makes it about twice as slow."""

from __future__ import annotations

import io
import pstats
import re
import time
from pathlib import Path

from benchmarks.driver import Order
from benchmarks.ledger import ledger_of
from benchmarks.stack import started, where

CLIENT = "client"
FOLDERS = re.compile(r"/\S*/(src|site-packages|lib/python3\.\d+)/")
"""The prefix of a module's own path; `strip_dirs` would leave only the file's name."""


async def profile(process: str, tasks: int, in_flight: int, lines: int, folder: Path) -> None:
    """Print the functions of a service, or of the client, with the most own time, and keep the profile."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{process}-{time.strftime('%Y-%m-%dT%H-%M-%SZ', time.gmtime())}.pstats"
    profiled = {} if process == CLIENT else {process: file}
    async with started(profiled=profiled) as stack, ledger_of(stack) as ledger:
        client = await stack.start_client(file if process == CLIENT else None)
        try:
            done = await client.order(Order(0, tasks, in_flight))
            await ledger.until_recorded(tasks)
            await client.stop()
        finally:
            await client.kill()
    text = io.StringIO()
    pstats.Stats(str(file), stream=text).sort_stats("tottime").print_stats(lines)
    print(FOLDERS.sub("", text.getvalue().strip()))
    print(f"{done.per_second:,.0f} tasks/s under the profiler; the profile is in {where(file)}")
