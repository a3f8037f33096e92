"""The message of a Spark error, which the user's code may have written."""

from __future__ import annotations

import time

from runtime_core.engines.spark.calls import first_lines


def test_the_servers_stack_is_left_out() -> None:
    text = "Job aborted\nby the user\n\tat org.apache.spark.Thing(Thing.scala:1)\n\tat java.base/x"
    assert first_lines(RuntimeError(text)) == "Job aborted\nby the user"
    assert first_lines(RuntimeError("a\n\n \tat scala.x\n\nJVM stacktrace:\nb")) == "a"


def test_a_message_of_empty_lines_takes_time_by_its_length() -> None:
    began = time.thread_time()
    first_lines(RuntimeError("a" + "\n" * 100_000 + "b"))
    first_lines(RuntimeError("a" + "\n \t" * 30_000 + "b"))
    assert time.thread_time() - began < 1
