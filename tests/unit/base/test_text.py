"""Texts for people: time spans, sizes and counts, and characters that a terminal must not get."""

from __future__ import annotations

import pytest

from runtime_core.base import text


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        (-5, "0.0 ms"),
        (0.04, "0.0 ms"),
        (12.345, "12.3 ms"),
        (999.99, "1.00 s"),
        (3_420, "3.42 s"),
        (59_999, "1 min 00 s"),
        (125_000, "2 min 05 s"),
        (3_599_900, "1 h 00 min"),
        (10_920_000, "3 h 02 min"),
    ],
)
def test_durations_are_for_people(milliseconds: float, expected: str) -> None:
    assert text.duration(milliseconds) == expected


def test_times_and_amounts_are_abbreviated() -> None:
    assert [text.brief(ms) for ms in (47, 3_200, 47_000, 304_000, 3_600_000)] == [
        "47 ms",
        "3.2 s",
        "47 s",
        "5.1 min",
        "1.0 h",
    ]
    assert [text.whole(ms) for ms in (45_000, 60_000, 5_400_000, 0)] == ["45 s", "1 min", "1 h 30 min", "0 ms"]
    assert [text.money(value) for value in (0, 0.0485, 1234.5)] == ["0", "0.0485", "1,234.50"]


def test_growing_spans_have_no_decimals() -> None:
    assert [text.about(ms) for ms in (371.1, 1_000, 54_100, 59_700, 125_000)] == [
        "371 ms", "1 s", "54 s", "1 min 00 s", "2 min 05 s",
    ]  # fmt: skip


def test_a_line_drives_no_terminal() -> None:
    assert text.plain("plain ü") == "plain ü"
    assert text.plain("a\x1b[2Jb\nc\td") == "a�[2Jb c d"


def test_characters_that_turn_the_direction_are_shown() -> None:
    assert text.visible("a\u202egnp.exe\u2066") == "a⟨U+202E⟩gnp.exe⟨U+2066⟩"


def test_a_cut_text_says_so() -> None:
    assert (text.shortened("12345", 5), text.shortened("123456", 5)) == ("12345", "1234…")


def test_an_error_without_a_text_is_still_named() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text.text_of_error(ValueError("no")) == "no"
    assert text.text_of_error(Broken()) == "(its text cannot be read: RuntimeError)"


def test_spans_of_pages_have_few_digits() -> None:
    spans = [text.span(ms) for ms in (0.01, 0.4, 623.9, 1_250, 182_000, 7_800_000, 276_480_000)]
    assert spans == ["0 ms", "0.4 ms", "624 ms", "1.25 s", "3 min 02 s", "2 h 10 min", "3.2 d"]


def test_times_are_in_utc_and_a_broken_clock_has_none() -> None:
    assert text.iso(1_793_491_200_123) == "2026-11-01T00:00:00.123Z"
    assert text.utc(1_793_491_200_123) == "2026-11-01 00:00:00 UTC"
    assert text.iso(1e300) == ""


def test_sizes_and_counts_have_a_suitable_unit() -> None:
    assert [text.in_bytes(size) for size in (512, 1536 * 1024, 3 << 30)] == ["0.5 KiB", "1.5 MiB", "3.0 GiB"]
    assert [text.amount(count) for count in (1_240, 45_200, 3_100_000, 2e9)] == ["1,240", "45.2 k", "3.1 M", "2.0 G"]
