"""Write docs/api.md from the docstrings of the public names: `python -m docs.generate_api`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

PAGE = Path(__file__).with_name("api.md")
_ARGUMENT = re.compile(r" {4}(\w+)(?: \((.*?)\))?: (.*)")
"""An argument in a docstring: its name, its type in parentheses, and its description."""
MODULES = {
    "weft": "apps, agents, tools and clients",
    "weft.testing": "tests of apps",
    "weft.errors": "errors",
    "weft.hooks": "hooks",
    "weft.hosting": "apps in your own process",
    "weft.llm": "agents that a model drives",
    "weft.pydantic_ai": "agents of pydantic-ai",
    "weft.engines": "compute steps",
    "weft.trajectory": "the record of tasks",
    "weft.runtime": "agents as objects",
}
"""The modules of the page. AWorld's and AutoGen's names are on separate pages."""
_HEAD = """\
# The API

`python -m docs.generate_api` writes this page from the docstrings: do not edit it. Names that are not here are not
public. AWorld's names are in [aworld.md](aworld.md) and [runners.md](runners.md), AutoGen's in
[autogen.md](autogen.md).

"""


@functools.cache
def page() -> str:
    """Return the whole page."""
    lines = [_HEAD + "\n".join(f"- [`{name}`](#{_anchor(name)}): {about}" for name, about in MODULES.items())]
    for name, about in MODULES.items():
        module = importlib.import_module(name)
        lines.append(f"## `{name}`\n\n{about[0].upper()}{about[1:]}.")
        for public in sorted(module.__all__, key=str.lower):
            lines += _entry(f"{name}.{public}", getattr(module, public))
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _entry(name: str, found: Any) -> Iterator[str]:  # Any, below too: whatever is public
    yield f"### `{name}`"
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        yield f"A constant or a type: `{_plain(found)}`."
        return
    signature = _signature(found)
    if signature and not (inspect.isclass(found) and issubclass(found, BaseException)):
        yield f"```text\n{name.rpartition('.')[2]}{signature}\n```"
    yield _text(found) or "See its members."
    if inspect.isclass(found):
        members = [f"- `{name}`: {text}" for name, text in _attributes(found)]
        for label, member in _members(found):
            members.append(f"- `{label}`: {_first(member)}")
            members += [f"    {line}" for line in _arguments(member)]
        if members:
            yield "\n".join(members)


def _attributes(found: type) -> Iterator[tuple[str, str]]:
    """Yield the public attributes with a docstring below their assignment, in the class or its constructor."""
    seen = set()
    for owner in found.__mro__:
        if not owner.__module__.startswith(("weft", "runtime_core")):
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except (OSError, TypeError):  # created without source
            continue
        body = cast(ast.ClassDef, tree).body
        constructors = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        for lines in [body, *(each.body for each in constructors)]:
            for line, following in itertools.pairwise(lines):
                name = _assigned(line)
                if name and not name.startswith("_") and name not in seen and isinstance(following, ast.Expr):
                    text = following.value
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        seen.add(name)
                        yield name, " ".join(text.value.split())


def _assigned(line: ast.stmt) -> str:
    """Return the name that `name = …` or `self.name = …` assigns; empty for anything else."""
    target = (
        line.target if isinstance(line, ast.AnnAssign) else line.targets[0] if isinstance(line, ast.Assign) else None
    )
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else ""


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members that Weft itself declares and documents, in their order."""
    seen = set()
    for owner in found.__mro__:
        if not owner.__module__.startswith(("weft", "runtime_core")):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            call = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if isinstance(member, property) and member.__doc__:
                yield name, member
            elif inspect.isfunction(call) and call.__doc__:
                kind = "async " if inspect.iscoroutinefunction(call) else ""
                yield f"{kind}{name}{_signature(call)}", call


def _signature(found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    if getattr(getattr(found, "__init__", None), "__name__", "") == "_no_init_or_replace_init":
        # Python gives a class below a Protocol its own constructor, without parameters, at its first call.
        signature = signature.replace(parameters=[])
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    fields = {each.name: each for each in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else {}
    kept = [each for each in parameters if each.name not in fields or not each.name.startswith("_")]
    return _plain(signature.replace(parameters=[each.replace(default=_default(each)) for each in kept]))


def _default(parameter: inspect.Parameter) -> Any:
    """Return the default; `…` for one whose text would be an address or a factory of dataclasses."""
    default = parameter.default
    if default is inspect.Parameter.empty or isinstance(default, (str, int, float, bool, tuple, type(None))):
        return default
    return _Ellipsis()


class _Ellipsis:
    def __repr__(self) -> str:
        return "…"


def _plain(found: object) -> str:
    """Return a text without the quotes of annotations, modules' paths and addresses."""
    text = re.sub(r"(?<=[:>] )'([^']*)'(?=[,)= ]|$)", r"\1", str(found))
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    text = re.sub(r"\*\*settings: Unpack\[\w+\]", "**settings", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _text(found: Any) -> str:
    text = inspect.getdoc(found) or ""
    if inspect.isclass(found) and found.__doc__ is None:
        return ""
    # Sections of arguments become lists.
    lines: list[str] = []
    for line in text.splitlines():
        if match := _ARGUMENT.fullmatch(line):
            lines.append(_item(match))
        elif match := re.fullmatch(r"(Args|Options|Returns|Raises|Yields):", line):
            lines += ["", f"**{match[1]}**", ""]
        elif line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _item(argument: re.Match[str]) -> str:
    name, type, text = argument.groups()
    return f"- `{name}`{f' (`{type}`)' if type else ''}: {text}"


def _arguments(member: Any) -> list[str]:
    """Return the arguments in a docstring, as items of a list."""
    _, _, rest = cast(str, inspect.getdoc(member)).partition("\nArgs:\n")
    items: list[str] = []
    for line in rest.partition("\n\n")[0].splitlines():
        if match := _ARGUMENT.fullmatch(line):
            items.append(_item(match))
        elif items:
            items[-1] += f" {line.strip()}"
    return items


def _first(member: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join(cast(str, inspect.getdoc(member)).split("\n\n")[0].split())


def _anchor(name: str) -> str:
    return name.replace(".", "").lower()


if __name__ == "__main__":
    main()
