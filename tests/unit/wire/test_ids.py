"""Derived ids never change, since programs in other languages compute them too."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput
from runtime_core.wire.ids import (
    DeliveryHeader,
    RunHeader,
    child_run,
    event_id,
    fingerprint,
    has_control,
    idempotency_key,
    instance_address,
    is_task_id,
    new_task_id,
    partition_of,
    step_digest,
    task_id_of,
)


def test_the_partition_is_crc32_of_utf8() -> None:
    # The check value of CRC-32 (IEEE 802.3) over "123456789" is 0xCBF43926.
    assert partition_of("123456789", 2**32) == 0xCBF43926
    assert partition_of("é", 1000) == 0x0E048D3E % 1000
    assert partition_of("t-1", 1) == 0


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 512))
def test_every_text_has_a_partition(text: str, count: int) -> None:
    assert 0 <= partition_of(text, count) < count


def test_a_text_that_utf8_cannot_hold_has_none() -> None:
    with pytest.raises(InvalidInput, match=r"^key: '\\ud800' cannot be UTF-8"):
        partition_of("\ud800", 4, "key")


@pytest.mark.parametrize("text", ["t-1", "7", "a" * 200, "1763690400000-0", "order.7_b@x+y=z"])
def test_valid_task_ids_are_recognized(text: str) -> None:
    assert is_task_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "a" * 201, "-a", ".a", "a b", "a/b", "a:b", "{a}", "a\n", "a\0", "é", "~a", "a~b", "a,b", "a\\b"],
)
def test_invalid_task_ids_are_recognized(text: str) -> None:
    assert not is_task_id(text)


def test_new_task_ids_differ_and_begin_with_the_time() -> None:
    before = time.time_ns() // 1_000_000
    new = [new_task_id() for _ in range(1000)]
    after = time.time_ns() // 1_000_000
    assert len(set(new)) == 1000
    assert all(is_task_id(id) and len(id) == 32 and before <= int(id[:12], 16) <= after for id in new)


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_derived_task_id_is_a_task_id(source: str, id: str) -> None:
    assert is_task_id(task_id_of(source, id))
    assert len(task_id_of(source, id)) == 32


def test_derived_ids_distinguish_source_and_id() -> None:
    assert task_id_of("a", "bc") != task_id_of("ab", "c")
    # printf 'shop\0order-7' | sha256sum | cut -c-32
    assert task_id_of("shop", "order-7") == "c87e2d1168d4a1a2e44105c45477bf49"
    assert fingerprint("shop", "order-7") == "c87e2d1168d4a1a2"


def test_a_step_digest_depends_on_each_part() -> None:
    base = step_digest("tool", "search", "k", b"{}")
    assert len(base) == 8
    assert base == step_digest("tool", "search", "k", b"{}")
    others = {
        step_digest("agent", "search", "k", b"{}"),
        step_digest("tool", "searc", "hk", b"{}"),
        step_digest("tool", "search", "", b"k{}"),
        step_digest("tool", "search", "k", b"[]"),
    }
    assert len(others | {base}) == 5


def test_names_of_runs_and_instances() -> None:
    assert child_run("r", "2.0.1") == "r/2.0.1"
    assert child_run("r/2", "1") == "r/2/1"
    assert idempotency_key("t-1", "r/2") == "t-1/r/2"
    assert instance_address("writer", "k") == "writer/k"
    assert event_id("t-1", "r", 1, 7) == "t-1/r/1/7"


def test_control_characters_are_found() -> None:
    assert not has_control("plain é text \u2028")
    for character in "\0\n\t\x1f\x7f\x9f":
        assert has_control(f"a{character}b")


def test_a_header_of_a_run_may_lack_its_last_lines() -> None:
    whole = RunHeader.parse(b"agent\ndesk\nk\n@r\n1763690000000\n7\ne-1\nshop\nd\ns-1\nacme\n60")
    assert (whole.agent, whole.key, whole.created_ms, whole.max_steps) == ("desk", "k", 1763690000000, "7")
    assert (whole.event_id, whole.source, whole.session, whole.tenant) == ("e-1", "shop", "s-1", "acme")
    child = RunHeader.parse(b"agent\ndesk\n\n\n\n")
    assert (child.agent, child.created_ms, child.tenant) == ("desk", 0, "")
    assert RunHeader.parse(None) == RunHeader()
    assert RunHeader.parse(b"a\n" * 20).retention == "a", "lines of a later release"


def test_a_header_of_a_delivery_may_be_anything() -> None:
    header = DeliveryHeader.parse(b"1\ncall\nt-1\nr/2\nsearch\n\n2\n0")
    assert (header.kind, header.task, header.run, header.name, header.attempt) == ("call", "t-1", "r/2", "search", "2")
    assert DeliveryHeader.parse(b"\xff").version == "�"
