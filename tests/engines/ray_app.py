"""Functions that the tests of Ray call by name."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.contracts.engine import functions
from weft import App
from weft.engines import Resources

app = App("on_ray")


@app.engine_function
def add(left: int, right: int = 1) -> int:
    return left + right


@app.engine_function
def hold(folder: str, name: str) -> str:
    """Begins, waits for the gate in short steps, and counts its end."""
    begun = Path(folder) / f"runs-{name}"
    with begun.open("a") as file:
        file.write(f"{os.getpid()}\n")
    functions.begun(folder, name)
    functions.wait_for(folder, "gate")
    return name


@app.engine_function
def sleep(folder: str, name: str) -> None:
    """One long call that no exception interrupts."""
    functions.begun(folder, name)
    time.sleep(600)


@app.engine_function
def process(number: int) -> int:
    return os.getpid()


@app.engine_function(timeout_seconds=600)
def unlucky(item: int, folder: str) -> int:
    """Fails for 3; its process dies for 50, each time; waits too long for 7."""
    if item == 3:
        raise ValueError("three")
    if item == 7:
        time.sleep(600)
    if item == 50:
        with (Path(folder) / "deaths").open("a") as file:
            file.write("x")
        functions.die()
    return item * 2


@app.engine_function
class Loaded:
    """Returns how often its process has called it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> list[int]:
        self.calls += 1
        return [os.getpid(), self.calls]


@app.engine_function
def large(count: int) -> str:
    return "x" * count


@app.engine_function
def missing() -> None:
    import a_module_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401  # that is the test


@app.engine_function(resources=Resources(custom={"accelerator": 1}))
def special() -> str:
    return "special"


@app.batch_job
def command(words: list[str]) -> list[str]:
    return words
