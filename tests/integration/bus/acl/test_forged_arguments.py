"""Every function with forged or generated arguments answers or refuses at once, and the server serves everybody."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ResponseError

from runtime_core.bus.library import FUNCTIONS, library
from tests.conftest import OwnServer
from tests.servers.matrix import MATRIX, is_full, repeat_on
from tests.servers.process import HOST

pytestmark = pytest.mark.timeout(300)

BASE = "weft:{0}:"
CALLS = 60 if is_full() else 24
"""Calls of each function with random arguments, for each number of arguments up to the largest."""
SLOWEST_SECONDS = 4.0
"""Less than a server lets a script run before it refuses other commands, on a busy machine."""
FORGED: tuple[str | bytes, ...] = (
    "", " ", "0", "1", "2", "-1", "-0", "9007199254740993", "1e18", "-1e300", "1e999", "nan", "-nan", "inf", "0x10",
    "18446744073709551615", "18446744073709551615-18446744073709551615", "0-0", "-", "+", "$", ">", "*", "(1", "[a",
    "~", "w", "one", "t", "other.t", "task:t", "r/1", "r/1/r/2", "/", "a/b", "writer/k", "writer", "agent", "tool",
    "weft:{0}:agent", "weft:{1}:task:t", "other:{0}:task:x", "weft:tasks", "shop:answers:1", "@topic", "a.*",
    "c", "s", "p", "u", "x", "call", "node", "group", "set", "c\n\n\n", "\n" * 50, "a\nb\tc\nd", "\x00", "\t1\t2",
    b"\xff\xfe", b"\xed\xa0\x80", "{", "[", "{}", "[]", "null", '""', "1e400", '{"a":1e400}', '{"a":"\\ud800"}',
    '{"tokens":-1,"cost":"x"}', '{"tokens":1e308,"cost":1e308}', '[{"a":[]}]', '{"a":{"__index":1}}',
    "[" * 5_000 + "]" * 5_000, '{"a":' * 2_000 + "1" + "}" * 2_000, "%s%n%1000d", "%b", "x" * 100_000,
    "\n".join(str(number) for number in range(2_000)),
)  # fmt: skip


class Broker:
    """A server with Weft's functions, and a task, an owner and a run in it."""

    def __init__(self, url_port: int) -> None:
        self.answered: set[str] = set()
        """The functions that have answered at least one call without an error."""
        self.redis: Any = Redis(host=HOST, port=url_port, protocol=2, socket_timeout=30)
        self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", library().source)
        self.reset()

    def reset(self) -> None:
        self.redis.flushall()
        self.redis.zadd(BASE + "alive", {"one": time.time() * 1000 + 1e7})
        for stream in ("agent", "tool", "record", "dead", "replies"):
            self.redis.xadd(BASE + stream, {"h": "c\n1\nt\n\nwriter"}, id="1-1")
            self.redis.xgroup_create(BASE + stream, f"{stream}-handler", "0")
        self.redis.hset(
            BASE + "task:t", mapping={"status": "running", "cur": "1-1", "h": "c\n1\nt\n\nwriter", "seq": 1}
        )

    def call(self, name: str, arguments: list[str | bytes]) -> float:
        """Call a function. Return how many seconds the answer took."""
        began = time.monotonic()
        try:
            self.redis.execute_command("FCALL", library().functions[name], 1, BASE, *arguments)
            self.answered.add(name)
        except ResponseError as error:
            if str(error).startswith("BUSY"):
                raise AssertionError(f"{name} does not end: {arguments}") from error
        return time.monotonic() - began


@pytest.fixture(params=repeat_on(*MATRIX))
def broker(request: pytest.FixtureRequest, own_server: OwnServer) -> Any:
    broker = Broker(own_server(request.param).port)
    yield broker
    broker.redis.close()


@pytest.mark.parametrize("seed", [0])
def test_no_forged_argument_stops_the_server(broker: Broker, seed: int) -> None:
    chance = random.Random(seed)
    slowest: tuple[float, str, list[str | bytes]] = (0.0, "", [])
    for name in FUNCTIONS:
        for number in range(CALLS):
            arguments = [chance.choice(FORGED) for _ in range(number % 24)]
            # Some that are right, so that the function gets further.
            if arguments and chance.random() < 0.7:
                arguments[0] = chance.choice(["one", "t", "group", "1", "agent"])
            if len(arguments) > 3 and chance.random() < 0.5:
                arguments[1:4] = ["1-1", "t", chance.choice(["r", "r/1"])]
            slowest = max(slowest, (broker.call(name, arguments), name, arguments))
        if chance.random() < 0.3:
            broker.reset()
    print(f"the slowest of {CALLS * len(FUNCTIONS)} calls: {slowest[0] * 1000:.1f} ms, {slowest[1]}")
    assert slowest[0] < SLOWEST_SECONDS, [str(argument)[:60] for argument in slowest[2]]
    assert len(broker.answered) > len(FUNCTIONS) // 2, "most functions get beyond the check of their arguments"
    assert broker.redis.ping()
    assert broker.redis.execute_command("FUNCTION", "STATS")[1] is None, "a function still runs"


EXAMPLES = 100 if is_full() else 20
"""Sequences of generated calls; 100 take about 20 seconds."""
RIGHT: tuple[str | bytes, ...] = ("one", "t", "group", "agent", "tool", "1-1", "r", "r/1", "1", "0", "")
"""Values that get a function past its first checks."""
JSON_TEXT = st.recursive(
    st.sampled_from(["null", "true", "-1", "1e308", '"x"', '"\\ud800"']),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda parts: "[" + ",".join(parts) + "]")
        | st.lists(inner, max_size=4).map(
            lambda parts: "{" + ",".join(f'"k{number}":{part}' for number, part in enumerate(parts)) + "}"
        )
    ),
    max_leaves=12,
)
ARGUMENT = st.one_of(
    st.sampled_from(RIGHT),
    st.sampled_from(FORGED),
    st.integers().map(str),
    st.floats().map(str),
    st.binary(max_size=40),
    JSON_TEXT,
)
PART = st.tuples(
    # The letter of a part, and how many arguments it has.
    st.sampled_from(
        [("c", 8), ("t", 6), ("q", 6), ("m", 6), ("s", 7), ("p", 8), ("a", 2), ("u", 3), ("j", 1), ("w", 1)]
    ),
    st.lists(ARGUMENT, min_size=8, max_size=8),
).map(lambda part: [part[0][0], *part[1][: part[0][1]]])
TURN = st.tuples(
    st.sampled_from(["r", "r/1"]), st.sampled_from("wcfkx"), JSON_TEXT, ARGUMENT, st.lists(PART, max_size=8)
).map(
    lambda turn: (
        "commit_turn",
        [
            "one", "agent", "1-1", "t", turn[0], "", turn[1], "1700000000000", "", "0", turn[2], turn[3],
            str(len(turn[4])), *(argument for part in turn[4] for argument in part),
        ],
    )
)  # fmt: skip
CALL = st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.lists(ARGUMENT, max_size=24)) | TURN


def test_no_generated_argument_stops_the_server(broker: Broker) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(calls=st.lists(CALL, min_size=1, max_size=12))
    def fuzz(calls: list[tuple[str, list[str | bytes]]]) -> None:
        broker.reset()
        for name, arguments in calls:
            assert broker.call(name, arguments) < SLOWEST_SECONDS, name

    fuzz()
    assert "commit_turn" in broker.answered
    assert broker.redis.ping()
    assert broker.redis.execute_command("FUNCTION", "STATS")[1] is None, "a function still runs"
