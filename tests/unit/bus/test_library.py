"""The functions of the bus as one library: complete, and named by their source."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

from runtime_core.bus.commits import TurnMode
from runtime_core.bus.library import FIELDS, FUNCTIONS, SHARED, library, named_fields, source_of
from runtime_core.wire.ids import EntryField, RunField

FOLDER = files("runtime_core.bus") / "functions"


def test_each_shared_file_is_assembled() -> None:
    assert lua_files(FOLDER / "shared") == {f"{name}.lua" for name in SHARED}


def test_fields_of_hashes_are_written_by_their_names() -> None:
    text = source_of("fields")
    stored = {name for name in re.findall(r"^  \w+ = '(\w+:?)',", text, flags=re.MULTILINE) if len(name) > 1}
    assert {"cur", "m:", "fl", "busy"} <= stored
    for name in sorted({*SHARED, *FUNCTIONS} - {"fields"}):
        code = re.sub(r"--[^\n]*|^  \w+ = '\S+',", "", source_of(name), flags=re.MULTILINE)
        spelled = {field for field in stored if re.search(rf"(?<!base \.\. )'{field}'", code)}
        assert not spelled, f"{name}.lua spells fields that fields.lua names: {spelled}"


def lua_files(folder: Traversable) -> set[str]:
    return {item.name for item in folder.iterdir() if item.name.endswith(".lua")}


def test_names_carry_a_digest_of_the_source() -> None:
    """Two versions on one server must not replace each other's functions."""
    made = library()
    header, _, body = made.source.decode().partition("\n")
    assert header == f"#!lua name={made.name}"
    assert all(name.decode() == f"{made.name}_{short}" for short, name in made.functions.items())
    assert re.fullmatch(r"weft_[0-9a-f]{8}", made.name)
    assert "function submit(keys, args)" in body


def test_without_memory_work_is_settled_but_not_started() -> None:
    source = library().source.decode()
    for name, allowed in FUNCTIONS.items():
        line = next(line for line in source.splitlines() if f"callback = {name}" in line)
        assert ("allow-oom" in line) is allowed
    assert not FUNCTIONS["submit"]
    assert FUNCTIONS["commit_turn"]
    assert FUNCTIONS["commit_call"]


def test_a_shared_file_keeps_the_names_that_no_other_file_uses() -> None:
    """Lua allows 200 local names at the top of a script."""
    lists = re.findall(r"^local (\w+(?:, \w+)*)$", library().source.decode(), flags=re.MULTILINE)
    outside = {name for names in lists for name in names.split(", ")}
    assert {"forget_waits", "QUEUE"} <= outside
    assert outside.isdisjoint({"OF_ONE_LIFE", "keep_undelivered"})


def names_of(cls: type) -> dict[str, str]:
    """Return the constants of a class, with the stored names as text."""
    values = {name.lower(): value for name, value in vars(cls).items() if name.isupper()}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def test_python_and_lua_name_the_same_fields() -> None:
    tables = named_fields(source_of(FIELDS))
    assert names_of(RunField).items() <= {**tables["RUN"], **tables["TASK"]}.items()
    assert names_of(EntryField).items() <= tables["ENTRY"].items()


def test_python_and_lua_name_the_same_ends_of_turns() -> None:
    assert names_of(TurnMode) == named_fields(source_of("commit_turn"))["MODE"]
