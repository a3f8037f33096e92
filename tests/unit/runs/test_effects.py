"""The part of a commit that each effect of a turn becomes."""

from __future__ import annotations

from runtime_core.app.app import App
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.topics import sent
from runtime_core.consumer.effects import Completed
from runtime_core.runs.commit import parts, parts_of
from runtime_core.runs.effects import Call, Send
from runtime_core.wire.ids import partition_of


def delivery() -> Delivery:
    taken = Delivery(0, "agent", b"1-1")
    taken.task, taken.run = "t", "r"
    return taken


def test_a_name_cannot_imitate_another_partition() -> None:
    """`@1:writer` in a commit means partition 1; in the program it is an undeclared name."""
    for name in ("@home", "@1:writer"):
        parts, count = parts_of(Completed(b"1", sends=[Send("1", name, "", b"1", "00000000")]), delivery(), App("x"))
        assert count == 1
        assert parts[2] == f"?{name}"


def test_a_message_carries_the_context_of_the_work_without_the_senders_own() -> None:
    context = (
        b'{"session_id":"s","metadata":{"n":1},"tenant":"t","hooks":{"task_failed":["alert"]},"traceparent":"00-1",'
        b'"deadline":1.5,"topic":"news","sender":"a/b","~chain":"0:t|r"}'
    )
    kept = b'{"session_id":"s","metadata":{"n":1},"tenant":"t","hooks":{"task_failed":["alert"]},"traceparent":"00-1"}'
    assert sent(context) == kept
    assert sent(b"") == sent(b'{"deadline":1.5}') == b""
    taken = delivery()
    taken.context = context
    parts, _ = parts_of(Completed(b"1", sends=[Send("1", "writer", "", b"1", "00000000")]), taken, App("x"))
    assert parts[5] == kept


def test_a_request_to_another_partition_carries_its_own_time_limit() -> None:
    """Within a partition nothing enforces the limit."""
    call = Call("agent", "1", "writer", b"1", "00000000", key="far", timeout_ms=5000)
    partitions = next(number for number in range(2, 9) if partition_of("writer/far", number) != 0)
    assert str(parts([call], delivery(), App("x"), partitions)[1]).split(":")[2:] == ["5000"]
    assert parts([call], delivery(), App("x"), 1)[1] == "?agent"
    call.timeout_ms = 0
    assert str(parts([call], delivery(), App("x"), partitions)[1]).count(":") == 1
