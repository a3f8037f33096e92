"""DBOS on SQLite: a workflow with one step, in the process of its caller."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dbos import DBOS, DBOSConfig

from benchmarks.driver import serve
from benchmarks.question import found

DBOS(
    config=DBOSConfig(
        name="comparison",
        system_database_url=f"sqlite:///{Path(os.environ['WEFT_BENCH_FOLDER']) / 'dbos.db'}",
        run_admin_server=False,
        log_level="ERROR",
    )
)


@DBOS.step()  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
async def look_up(text: str) -> str:
    return found(text)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def asker(text: str) -> str:
    return str(await look_up(text))


async def main() -> None:
    DBOS.launch()
    await serve(asker)
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main())
