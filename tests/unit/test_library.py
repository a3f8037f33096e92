"""The functions of the bus as one library: complete, and named by their source."""

from __future__ import annotations

import re
from importlib.resources import files

from runtime_core.bus.library import FUNCTIONS, SHARED, library

NOT_FUNCTIONS = {f"{name}.lua" for name in SHARED}


def test_each_file_is_a_function_and_each_function_a_file() -> None:
    folder = files("runtime_core.bus") / "functions"
    found = {item.name for item in folder.iterdir() if item.name.endswith(".lua")}
    assert found - NOT_FUNCTIONS == {f"{name}.lua" for name in FUNCTIONS}


def test_names_carry_a_digest_of_the_source() -> None:
    """Two versions on one server must not replace each other's functions."""
    made = library()
    header, _, body = made.source.decode().partition("\n")
    assert header == f"#!lua name={made.name}"
    assert all(name.decode() == f"{made.name}_{short}" for short, name in made.functions.items())
    assert re.fullmatch(r"weft_[0-9a-f]{8}", made.name)
    assert "function submit(keys, args)" in body


def test_what_settles_work_runs_without_memory_and_what_starts_it_does_not() -> None:
    source = library().source.decode()
    for name, allowed in FUNCTIONS.items():
        line = next(line for line in source.splitlines() if f"callback = {name}" in line)
        assert ("allow-oom" in line) is allowed
    assert not FUNCTIONS["submit"]
    assert FUNCTIONS["commit_turn"]
    assert FUNCTIONS["commit_call"]
