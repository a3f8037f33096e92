"""The public names are pinned: to add or remove one is a decision that shows in the diff of a list."""

from __future__ import annotations

from pathlib import Path

import runtime_core

PINNED = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    names: object = runtime_core.__all__
    assert isinstance(names, list | tuple)
    return [str(name) for name in names]


def test_the_public_names_are_those_of_the_list() -> None:
    pinned = PINNED.read_text(encoding="utf-8").split()
    assert sorted(public_names()) == pinned, f"if this is meant, write the names to {PINNED.name} and CHANGELOG.md"


def test_the_public_names_are_sorted_and_appear_once() -> None:
    names = public_names()
    assert names == sorted(set(names))


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in public_names() if not hasattr(runtime_core, name)] == []
