"""The documents list everything that they promise to list, and nothing that is gone."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from docs import generate_acl, generate_api, generate_events, generate_metrics
from runtime_core.bus.keys import Keys, ingress, namespace_settings
from runtime_core.bus.library import FUNCTIONS
from runtime_core.settings import Settings
from runtime_core.telemetry import names
from runtime_core.testing.plugin import FIXTURE
from tests.architecture.test_docs import exists, paths_named_in
from tests.architecture.tree import CORE, ROOT, sources

DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PAGES = (
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
    *sorted((DOCS / "internals").glob("*.md")),
)
LUA = sorted((CORE / "runtime_core" / "bus" / "functions").rglob("*.lua"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return the text below a heading of level two."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {title!r}"
    return found.group(1)


def first_cells(table: str) -> set[str]:
    """Return what is in backticks in the first column of a table."""
    return {
        word
        for line in table.splitlines()
        if line.startswith("|")
        for word in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1])
    }


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as common viewers make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]


def test_the_page_of_events_is_current() -> None:
    written = generate_events.PAGE.read_text(encoding="utf-8")
    assert written == generate_events.page(), "docs/events.md is stale: run `python -m docs.generate_events`"


def test_the_page_of_the_api_is_current() -> None:
    written = generate_api.PAGE.read_text(encoding="utf-8")
    assert written == generate_api.page(), "docs/api.md is stale: run `python -m docs.generate_api`"


def test_every_public_name_has_a_docstring() -> None:
    assert "See its members." not in generate_api.page()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_documents_its_arguments_and_results(name: str) -> None:
    header = "\n".join(generate_events.header_of(name))
    assert "KEYS 1 base" in header
    assert "RETURNS" in header


def test_the_settings_are_listed_and_no_others() -> None:
    table = first_cells(section(read("docs/operations.md"), "Settings"))
    listed = {word for word in table if word.startswith("WEFT_")}
    settings = {f"WEFT_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    assert settings == listed


def test_the_settings_that_the_code_reads_are_known() -> None:
    read_there = {
        node.value
        for _, tree in sources((CORE / "runtime_core", ROOT / "services"), "WEFT_")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"WEFT_[A-Z_]+[A-Z]", node.value)
    }
    known = {f"WEFT_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    assert read_there <= known, "a service would refuse them: make them settings"


def message_texts() -> str:
    """Return the texts of the library's code, with … for each value that is put into them."""
    found = []
    for _, tree in sources((CORE / "runtime_core",), ""):
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[a-z]|%\.\d[a-z]", "…", node.value))
    found += [re.sub(r"' \.\. [^']+ \.\. '", "…", path.read_text(encoding="utf-8")) for path in LUA]
    return "\n".join(found).replace("`", "")


def test_the_messages_with_remedies_are_those_of_the_code() -> None:
    rows = [row for row in section(read("docs/operations.md"), "Errors and remedies").splitlines() if row[:1] == "|"]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    texts = message_texts()
    # Values in the messages of the page, and what is put before a message: a setting, a field or the error's class.
    values = r"^[A-Z]\w+(=\S+)?: |WEFT_…: |sentinel master|\bray\b|: OOM|: WRONGPASS|: NOAUTH|[\d,]{5,}"
    missing = [
        message
        for message in messages
        if not all(part.strip(" :;") in texts for part in re.sub(values, "…", message).split("…") if len(part) > 9)
    ]
    assert len(messages) > 30
    assert missing == [], "docs/operations.md lists messages that the code does not have"


def test_the_defaults_of_numbers_are_right() -> None:
    rows = section(read("docs/operations.md"), "Settings").splitlines()
    shown = {cells[1].strip(" `"): cells[2].strip(" `") for row in rows if len(cells := row.split("|")) > 3}
    wrong = {
        f"WEFT_{field.name.upper()}": field.default
        for field in dataclasses.fields(Settings)
        if isinstance(field.default, int | float | str)
        and shown[f"WEFT_{field.name.upper()}"]
        != (f"{field.default:.15g}" if isinstance(field.default, float) else str(field.default).replace("False", "0"))
    }
    assert wrong == {}, "docs/operations.md shows defaults that differ from settings.py"


def test_the_page_of_metrics_is_current() -> None:
    written = generate_metrics.PAGE.read_text(encoding="utf-8")
    assert written == generate_metrics.page(), "docs/metrics.md is stale: run `python -m docs.generate_metrics`"
    assert first_cells(written) == {metric.name for metric in names.ALL}


def test_the_documented_users_of_the_broker_are_current() -> None:
    stale = "run `python -m docs.generate_acl`"
    assert generate_acl.PAGE.read_text(encoding="utf-8") == generate_acl.page(), f"docs/acl.md is stale: {stale}"
    kept = generate_acl.IN_THE_CLUSTER.read_text(encoding="utf-8")
    assert kept == generate_acl.in_the_cluster(), f"the cluster's Secret has rules that differ from the code: {stale}"


def test_the_metrics_that_documents_name_exist() -> None:
    known = {metric.name for metric in names.ALL}
    named = set(re.findall(r"`(weft_[a-z_]+[a-z])`", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert named - {FIXTURE} <= known


def test_every_key_is_listed() -> None:
    listed = first_cells(section(read("docs/internals/keys.md"), "Keys on the broker"))
    assert {ingress("weft"), namespace_settings("weft")} <= listed
    base = Keys("weft", 0).base
    python = {
        value.removeprefix(base)
        for name, kind in vars(Keys).items()
        if isinstance(kind, property) and (value := getattr(Keys("weft", 0), name))
    }
    lua = {name for path in LUA for name in re.findall(r"base \.\. '([a-z_]+)", path.read_text(encoding="utf-8"))}
    known = {re.split(r"[:<]", key)[0] for key in listed}
    assert python | lua <= known, "docs/internals/keys.md does not list all keys of a partition"


def fields_of(lua: str, table: str) -> set[str]:
    """Return the stored names in one table of `fields.lua`."""
    found = re.search(rf"^local {table} = {{\n(.*?)^}}", lua, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no table {table}"
    return set(re.findall(r"^  \w+ = '([^']+)',", found.group(1), flags=re.MULTILINE))


def test_every_field_of_a_hash_is_listed() -> None:
    hashes = section(read("docs/internals/keys.md"), "What the hashes hold")
    listed = {field.partition("<")[0] for field in first_cells(hashes)}
    lua = (CORE / "runtime_core/bus/functions/shared/fields.lua").read_text(encoding="utf-8")
    fields = fields_of(lua, "RUN") | fields_of(lua, "TASK") | fields_of(lua, "INSTANCE")
    assert fields - listed == set(), "docs/internals/keys.md does not list these fields"
    [flags] = re.findall(r"^\| `fl` \|.*$", hashes, flags=re.MULTILINE)
    assert fields_of(lua, "FLAG") == set(re.findall(r"`(\w)`", flags))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in links_of(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", ["delivery.md", "operations.md", "events.md", "wire.md"])
def test_paths_in_the_documents_exist(name: str) -> None:
    missing = [path for path in paths_named_in(read(f"docs/{name}")) if not (exists(path) or (DOCS / path).exists())]
    assert missing == []


def test_the_architecture_is_read_in_one_go() -> None:
    assert len(read("ARCHITECTURE.md").splitlines()) <= 120


def test_the_layers_of_the_architecture_are_those_of_the_contract() -> None:
    """A row of the table has the packages of one layer or of several, in the contract's order."""
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each.get("containers") == ["runtime_core"]]
    layers = [set(layer.split(" : ")) for layer in contract["layers"]]
    table = [row for row in section(read("ARCHITECTURE.md"), "The layers").splitlines() if row.startswith("|")]
    for row in table[3:]:
        packages = {name.removesuffix(".py") for name in re.findall(r"`([\w.]+)`", row.split("|")[2])}
        rest = packages - {"weft.testing"}
        while rest:
            assert layers, f"the contract has no layer for {row!r}"
            assert layers[0] <= rest, f"{row!r} mixes or omits packages of the contract's layer {sorted(layers[0])}"
            rest -= layers.pop(0)
    assert layers == [], "ARCHITECTURE.md does not list these layers"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_list_of_contents_names_each_section(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^- \[.*$", prose.partition("\n## ")[0], flags=re.MULTILINE)
    listed = [anchor for line in lines for anchor in re.findall(r"\]\(#([^)]+)\)", line)]
    headings = [anchor for title in re.findall(r"^## .*$", prose, flags=re.MULTILINE) for anchor in anchors_of(title)]
    if listed:
        assert listed == headings


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_its_three_parts(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]


def test_decisions_are_numbered_and_listed() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert all(later == earlier + 1 for earlier, later in pairwise(numbers))
    index = read("docs/decisions/README.md")
    assert [page.name for page in DECISIONS if f"({page.name})" not in index] == []


def test_the_checks_of_documents_find_their_targets() -> None:
    assert first_cells("| `a` | `b` |\n| `c\\|d` | x |\nx") == {"a", "c\\|d"}
    assert anchors_of("# When it `fails`\n```\n# no\n```\n") == {"when-it-fails"}
    assert links_of("[a](b.md#c) [d](https://e)") == ["b.md#c"]
    assert section("## A\nx\n## B\ny\n", "A") == "x\n"


def messages() -> Iterator[tuple[Path, str]]:
    """Yield the texts in the library's code that may name a page, without the docstrings."""
    for path, tree in sources((CORE,), "page ", "docs/"):
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield path, node.value


def test_messages_name_pages_by_their_titles() -> None:
    """A user who has only the wheel has no folder docs/, but finds a title in the site."""
    titles = {
        path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in (ROOT / "docs").rglob("*.md")
    }
    said = list(messages())
    named = [title for _, text in said for title in re.findall(r'page "([^"]+)"', text)]
    assert named
    assert set(named) <= titles
    assert [(path.name, text) for path, text in said if re.search(r"docs/[\w/-]+\.md", text)] == []
