"""Values far over a limit are refused before they are written, and errors of any size are cut."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from runtime_core.consumer.settle import failed_from, failure_of
from runtime_core.declare.declaration import Place
from runtime_core.declare.schema import ValueReader, encode, encode_result
from runtime_core.errors import InvalidInput, Reject, Retry, ToolError
from runtime_core.wire import codec

MIB = 1024 * 1024
LINE = "x" * 100


@dataclasses.dataclass
class Box:
    value: object


def laughs(levels: int, innermost: object) -> object:
    """Return a value that is small in memory, and 100 to the power of `levels` times its innermost as JSON."""
    value = innermost
    for _ in range(levels):
        value = [value] * 100
    return value


HUGE: dict[str, Callable[[], object]] = {
    "text": lambda: "x" * (64 * MIB),
    "numbers": lambda: [1] * (4 * MIB),
    "objects": lambda: [{"a": LINE}] * MIB,
    "names": lambda: {f"{number:0200}": None for number in range(200_000)},
    "laughs": lambda: laughs(4, 0),
    "laughing texts": lambda: laughs(1, "x" * MIB),
    "boxed text": lambda: Box("x" * (64 * MIB)),
    "boxed laughs": lambda: Box(laughs(2, Box(LINE * 100))),
    "laughing boxes": lambda: laughs(2, Box(LINE * 100)),
    "set": lambda: set(range(MIB)),
    "range": lambda: range(2**40),
    "long dict of boxes": lambda: {str(number): Box(number) for number in range(200_000)},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_value_is_refused_before_it_is_written(name: str) -> None:
    value = HUGE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"more than [\d,]+ bytes of JSON, over the limit of 1,048,576"):
            encode(value, "result")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * MIB


def test_a_value_over_the_limit_is_refused_with_its_size() -> None:
    with pytest.raises(InvalidInput, match="is 2,000,002 bytes of JSON, over the limit of 1,048,576"):
        encode_result("x" * 2_000_000)


@pytest.mark.parametrize(
    "value",
    ["x" * (MIB - 2), [1] * (MIB // 2 - 1), {"a": ["b", {"c": None}]}, Box(["x" * (MIB - 30)]), [Box(1)] * 1000],
    ids=["text", "numbers", "plain", "boxed", "boxes"],
)
def test_a_value_that_fits_is_written(value: object) -> None:
    data = encode(value, "result")
    plain = json.loads(json.dumps(value, default=dataclasses.asdict))
    assert codec.decode(data) == plain


@pytest.mark.parametrize(
    "wrong",
    [10**100_000, 2**70, b"x" * (64 * MIB), (i for i in range(3))],
    ids=["digits", "bits", "bytes", "generator"],
)
def test_a_value_that_json_cannot_hold_is_refused(wrong: object) -> None:
    for value in (wrong, [wrong], Box(wrong)):
        with pytest.raises(InvalidInput) as caught:
            encode(value, "result")
        assert len(caught.value.message) < 500


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS = {
    "message": ValueError("x" * (64 * MIB)),
    "type": type("X" * MIB, (Exception,), {})("small"),
    "surrogate": ValueError("\ud800"),
    "unreadable": Unreadable(),
    "reject": Reject("x" * MIB, "y" * MIB),
    "retry": Retry(1.0, "x" * MIB),
    "step": ToolError("y" * MIB, "x" * MIB),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_any_size_is_kept_in_short(name: str) -> None:
    for failed in (failed_from(ERRORS[name]), failure_of(ERRORS[name])):
        kept = msgspec.json.encode([failed.type, failed.message, failed.traceback])
        assert len(kept) < 100_000
        assert len(failed.type) <= 201


def test_a_secret_in_a_refused_argument_is_hidden_before_the_message_is_shortened() -> None:
    key = "sk-" + "proj-Ab12Cd34Ef56Gh78Ij90"
    before = "x" * 30  # so that the quote ends within the key
    with pytest.raises(InvalidInput) as refused:
        ValueReader("it", int, Place("it.py", 1)).decode(json.dumps(f"{before} {key}").encode())
    assert before in refused.value.message
    assert key[:12] not in refused.value.message
