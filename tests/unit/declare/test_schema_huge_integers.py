"""Integers with too many digits to be written: one error that names the field, at once."""

from __future__ import annotations

import sys
import time

import pytest

from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput

HUGE = 1 << 8_000_000
"""Python would take minutes to write it as text."""
VALUES: dict[str, object] = {
    "alone": HUGE,
    "inside": {"a": [1, {"b": HUGE}]},
    "key": {HUGE: 1},
    "set": {1, HUGE},
    "beside a set": [HUGE, {1}],
}


@pytest.mark.parametrize("limit", [sys.int_info.default_max_str_digits, 0])
@pytest.mark.parametrize("shape", ["alone", "inside", "key", "set", "beside a set"])
def test_a_huge_integer_is_refused_with_its_field_at_once(shape: str, limit: int) -> None:
    value = VALUES[shape]
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    began = time.process_time()
    try:
        with pytest.raises(InvalidInput, match="output: holds an integer outside 64 bits, with too many digits"):
            encode(value, "output")
    finally:
        sys.set_int_max_str_digits(before)
    assert time.process_time() - began < 1
