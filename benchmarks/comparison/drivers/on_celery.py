"""Celery on Redis: a chain of three tasks, since a Celery task must not wait for another.

Workers: `celery --app benchmarks.comparison.drivers.on_celery worker`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os

from celery import Celery, chain

from benchmarks.driver import serve, until_answered
from benchmarks.question import found

URL = os.environ["WEFT_BENCH_REDIS_URL"]
THREADS = 64
"""Of the driver: a thread waits for each result."""

app = Celery("comparison", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True,  # an entry is acknowledged after the work, as in Weft
    worker_prefetch_multiplier=16,
    result_expires=60,
    task_default_queue="agents",
    task_routes={"look_up": {"queue": "tools"}},
    broker_connection_retry_on_startup=True,
)


@app.task(name="start")  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
def start(text: str) -> str:
    return text


@app.task(name="look_up")  # type: ignore[untyped-decorator]
def look_up(text: str) -> str:
    return found(text)


@app.task(name="finish")  # type: ignore[untyped-decorator]
def finish(text: str) -> str:
    return text


def carried_out(text: str) -> object:
    return chain(start.s(text), look_up.s(), finish.s()).apply_async().get(timeout=120)


async def main() -> None:
    loop = asyncio.get_running_loop()
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:

        async def ask(text: str) -> object:
            return await loop.run_in_executor(threads, carried_out, text)

        await until_answered(ask)
        await serve(ask)


if __name__ == "__main__":
    asyncio.run(main())
