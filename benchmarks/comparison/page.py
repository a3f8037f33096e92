"""The comparison as a table and a picture in `docs/performance.md`, from the file of figures that is published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

from benchmarks.child import ROOT
from benchmarks.figures import shown, table
from benchmarks.results import FOLDER

PUBLISHED = FOLDER / "published.json"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "comparison.svg"
BEGIN, END = "<!-- comparison: written by `python -m benchmarks page` -->", "<!-- end of comparison -->"

BAR, LEFT, WIDTH = 26, 210, 760
"""Heights and widths of the picture, in pixels."""
LONGEST = 400

Systems = dict[str, dict[str, Any]]
"""The figures of each system by its name, as `measure.summary` makes them."""


def publish(source: Path | None) -> None:
    """Take a file of figures (or the newest with a comparison), and write page and picture from it.

    Raises SystemExit if there is none.
    """
    source = source or _newest()
    if source.resolve() != PUBLISHED:
        shutil.copy(source, PUBLISHED)
    figures = published()
    PICTURE.write_text(picture(figures["comparison"]["systems"]))
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section(figures)), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")


def published() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(PUBLISHED.read_text()))


def section(figures: dict[str, Any]) -> str:
    """What stands between the two marks of the page."""
    of = figures["machine"]
    return "\n".join(
        (
            BEGIN,
            "",
            f"![Bars of the tasks per second of each system; the tables below have the figures](images/{PICTURE.name})",
            "",
            f"{of['cores']} cores ({of['processor']}), Python {of['python']}, {of['broker']}; commit "
            f"`{figures['commit'][:12]}`; medians of {figures['comparison']['rounds']} rounds, "
            f"{figures['comparison']['in_flight']} tasks in flight.",
            "",
            tables(figures["comparison"]),
            "",
            END,
        )
    )


def with_section(page: str, text: str) -> str:
    """The page with the section in place of the one that it has."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no place for the comparison: it needs the lines {BEGIN} and {END}")
    return before + text + after


def tables(found: dict[str, Any]) -> str:
    """The figures, then what each system keeps and how it is set."""
    systems: Systems = found["systems"]
    weft = systems["Weft"]
    speed = table(
        ("system", "tasks/s", "Weft is", "p50 ms", "p99 ms", "one at a time, p50 ms", "p99 ms", "CPU ms per 1,000"),
        [
            (
                name,
                one["tasks_per_second"],
                f"{weft['tasks_per_second'] / one['tasks_per_second']:.2f} x",
                *(one[figure] for figure in ("p50_ms", "p99_ms", "alone_p50_ms", "alone_p99_ms")),
                one["cpu_ms_per_1000_tasks"],
            )
            for name, one in systems.items()
        ],
    )
    kept = table(
        ("system", "what of a task survives a crash", "settings that are not the defaults"),
        [(name, one["keeps"], one["settings"] or "none") for name, one in systems.items()],
        words=3,
    )
    return f"{speed}\n\n{kept}"


def picture(systems: Systems) -> str:
    """A bar for each system, the fastest first."""
    most = max(one["tasks_per_second"] for one in systems.values())
    ordered = sorted(systems.items(), key=lambda item: -item[1]["tasks_per_second"])
    height = BAR * len(ordered) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Tasks per second of each system</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" fill="#555">tasks per second; lighter bars keep nothing of a task</text>',
    ]
    for row, (name, one) in enumerate(ordered):
        top = 30 + row * BAR
        long = max(1.0, LONGEST * one["tasks_per_second"] / most)
        color = "#c4cfda" if one["keeps"] == "nothing" else "#c2571a" if name == "Weft" else "#4a6f96"
        lines += [
            f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{top + 2}" width="{long:.1f}" height="{BAR - 8}" fill="{color}"/>',
            f'<text x="{LEFT + long + 6:.1f}" y="{top + 15}">{shown(one["tasks_per_second"])}</text>',
        ]
    return "\n".join((*lines, "</svg>", ""))


def _newest() -> Path:
    for path in sorted(FOLDER.glob("20*.json"), reverse=True):
        if "comparison" in json.loads(path.read_text()):
            return path
    raise SystemExit('nothing to publish: measure first, with make bench ARGS="comparison"')
