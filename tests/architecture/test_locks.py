"""The locks install what pyproject.toml requires, from files with known hashes, from any registry."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.tree import ROOT

LOCKS = ("dev.txt", "run.txt", "autogen.txt", "engines.txt", "image.txt", "image-ray.txt", "image-spark.txt")
HEAVY = ("autogen", "ray", "spark")
"""Extras with an environment of their own."""


def locked(name: str) -> dict[str, str]:
    """Return a lock's packages and their versions."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def asked_for(lock: str) -> list[Requirement]:
    """Return what pyproject.toml requires in one of the environments."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    lines = [*project["project"]["dependencies"], *groups["build"]]
    if lock == "dev.txt":
        lines += [line for line in groups["dev"] if isinstance(line, str)]
        lines += [line for name, extra in extras.items() if name not in HEAVY for line in extra]
    elif lock == "autogen.txt":
        lines += [line for line in groups["autogen"] if isinstance(line, str)] + extras["autogen"]
    elif lock == "engines.txt":
        lines += [line for line in groups["engines"] if isinstance(line, str)] + extras["ray"] + extras["spark"]
    elif lock.startswith("image"):
        engine = {"image-ray.txt": ["parquet", "ray"], "image-spark.txt": ["parquet", "spark"]}.get(lock, [])
        lines += [line for name in ("postgres", "llm", "mcp", "gateway", *engine) for line in extras[name]]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_satisfies_the_requirements(name: str) -> None:
    versions = locked(name)
    wrong = [
        str(requirement)
        for requirement in asked_for(name)
        if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == [], f"requirements/{name} is out of date: run `make lock`"


@pytest.mark.parametrize("name", [*LOCKS, "docs.txt", "schemathesis.txt"])
def test_a_lock_has_a_hash_for_every_package_and_names_no_place(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert "://" not in text
    entries = re.split(r"\n(?=\S)", text.strip())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert {entry.split("==")[0] for entry in entries} == locked(name).keys()


def test_running_needs_the_versions_that_were_tested() -> None:
    tested = locked("dev.txt")
    assert {name for name, version in locked("run.txt").items() if tested.get(name) != version} == set()


@pytest.mark.parametrize("name", ["autogen.txt", "engines.txt"])
def test_separate_environments_lock_the_same_versions(name: str) -> None:
    usual, theirs = locked("dev.txt"), locked(name)
    differs = {each for each in usual.keys() & theirs.keys() if usual[each] != theirs[each]}
    # AutoGen takes no protobuf of today; what sends traces, which needs one, is not in its environment.
    assert differs == ({"protobuf"} if name == "autogen.txt" else set())
