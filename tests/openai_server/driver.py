"""The test's side: the server as a process, and functions that make rules.

with OpenAIServer(tmp_path) as server:
    server.play(turns(calls(("search", {"query": "{user}"})), answer("Found: {result}")))
    …                                           # url, key: what a client needs
    assert server.counts().repeated == 0
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import msgspec

from tests.openai_server.control import Closing, Release
from tests.openai_server.ledger import Counts, Entry, read_file
from tests.openai_server.script import Answer, Call, Cut, Fault, Gate, Rule, Script, Usage, When
from tests.service_forks import SOURCES, Fork, start

__all__ = [
    "Call",
    "Counts",
    "Entry",
    "OpenAIServer",
    "Rule",
    "Usage",
    "When",
    "answer",
    "broken",
    "calls",
    "cut",
    "failing",
    "gated",
    "output",
    "rate_limited",
    "refusal",
    "turns",
]

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
KEY = "test-key"
START_SECONDS = 30.0
STOP_SECONDS = 10.0
ANY = When()

Reply = TypeVar("Reply")


# -- rules ---------------------------------------------------------------------------------------------------------


def answer(
    text: str,
    *,
    when: When = ANY,
    usage: Usage | None = None,
    finish_reason: str | None = None,
    reasoning: str | None = None,
) -> Rule:
    said = Answer(text=text, usage=usage, finish_reason=finish_reason, reasoning=reasoning)
    return Rule(answer=said, when=when)


def calls(
    *named: tuple[str, Any] | Call, text: str | None = None, when: When = ANY, usage: Usage | None = None
) -> Rule:
    """Tool calls in parallel, each `(name, arguments)`."""
    every = tuple(call if isinstance(call, Call) else Call(*call) for call in named)
    return Rule(answer=Answer(text=text, calls=every, usage=usage), when=when)


def output(value: object, *, tool: str = "final_result", when: When = ANY, usage: Usage | None = None) -> Rule:
    """Structured output: the text if the request wants JSON, else a call of this tool."""
    return Rule(answer=Answer(output=value, output_tool=tool, usage=usage), when=when)


def refusal(text: str, *, when: When = ANY, usage: Usage | None = None) -> Rule:
    return Rule(answer=Answer(refusal=text, usage=usage), when=when)


def turns(*rules: Rule) -> tuple[Rule, ...]:
    """The n-th rule answers if the request contains n messages of the model."""
    return tuple(
        rule.but(when=msgspec.structs.replace(rule.when, model_messages=number)) for number, rule in enumerate(rules)
    )


def rate_limited(
    *,
    after: float | None = None,
    after_ms: float | None = None,
    date: bool = False,
    times: int | None = None,
    in_all: int | None = None,
    seconds: float | None = None,
    until: str | None = None,
    when: When = ANY,
) -> Rule:
    """429: `times` for each conversation, `in_all`, for some `seconds`, or until a gate is open."""
    fault = Fault(status=429, retry_after=after, retry_after_ms=after_ms, date=date, message="Rate limit reached.")
    return Rule(fault=fault, when=when, times=times, in_all=in_all, seconds=seconds, until=until)


def failing(
    status: int,
    message: str | None = None,
    *,
    code: str | None = None,
    after: float | None = None,
    times: int | None = None,
    in_all: int | None = None,
    probability: float | None = None,
    seed: int = 0,
    when: When = ANY,
) -> Rule:
    """An error of this status; `after` gives a `retry-after` in seconds."""
    fault = Fault(status=status, message=message, code=code, retry_after=after)
    return Rule(fault=fault, when=when, times=times, in_all=in_all, probability=probability, seed=seed)


def broken(body: str, *, times: int | None = None, when: When = ANY) -> Rule:
    """Status 200 and this body, whatever it is."""
    return Rule(fault=Fault(body=body), when=when, times=times)


def cut(
    rule: Rule, *, after: int = 0, headers: bool = True, error: str | None = None, times: int | None = None
) -> Rule:
    """The rule's answer, but the connection ends after `after` pieces; without `headers`, before everything.

    A stream says the `error` in place of the rest.
    """
    return rule.but(cut=Cut(after, headers, error), times=rule.times if times is None else times)


def gated(rule: Rule, gate: str, *, after: int = 0, headers: bool = True) -> Rule:
    """The rule's answer, but each piece after the first `after` ones waits for `release(gate)`."""
    return rule.but(gate=Gate(gate, after, headers))


# -- the process ---------------------------------------------------------------------------------------------------


class OpenAIServer:
    """One server on 127.0.0.1. The port and the ledger's file stay the same over a restart.

    Start it from the main thread: on Linux its life is tied to the thread that started it. What it forgets when
    it is killed is the script, the gates, and all of the ledger but its file.
    """

    def __init__(self, folder: Path, *, keys: Sequence[str] = (KEY,)) -> None:
        self.folder = folder
        self.file = folder / "openai-ledger.jsonl"
        self.port = 0
        self._keys = tuple(keys)
        self._process: subprocess.Popen[bytes] | Fork | None = None

    @property
    def url(self) -> str:
        """As clients take it: `base_url`, or the environment's OPENAI_BASE_URL."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def key(self) -> str:
        return self._keys[0]

    @property
    def environ(self) -> dict[str, str]:
        """Return what processes need to find it, for their environment."""
        return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key}

    def start(self) -> None:
        """Start it. Returns when it reads requests. Raises AssertionError with its log if it does not."""
        assert self._process is None, "it runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        port_file, log = self.folder / "openai-port", self.folder / "openai-server.log"
        port_file.unlink(missing_ok=True)
        command = [
            *("tests.openai_server", "--port", str(self.port)),
            *("--port-file", str(port_file), "--ledger", str(self.file)),
            *(part for key in self._keys for part in ("--key", key)),
        ]
        self._process = start(command, {**os.environ, "PYTHONPATH": SOURCES}, log)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            assert self._process.poll() is None, f"the server ended at its start: {log.read_text()}"
            assert time.monotonic() < deadline, f"the server did not start in {START_SECONDS:g} s: {log.read_text()}"
            time.sleep(0.005)
        self.port = int(port_file.read_text())

    def kill(self) -> None:
        """Send SIGKILL. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGTERM; SIGKILL if that takes too long."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    # -- what a test says --------------------------------------------------------------------------------------

    def play(self, *rules: Rule | Sequence[Rule], models: Sequence[str] = (), more: bool = False) -> None:
        """Answer by these rules from now on; with `more`, by these before the current ones."""
        every = tuple(rule for given in rules for rule in ((given,) if isinstance(given, Rule) else given))
        self._ask("POST", "/script", Script(rules=every, models=tuple(models), more=more), type=dict)

    def release(self, gate: str, pieces: int | None = None) -> None:
        """Let this many pieces pass the gate; None opens it for all that come."""
        self._ask("POST", "/release", Release(gate, pieces), type=dict)

    def close(self, gate: str) -> None:
        """Close the gate again."""
        self._ask("POST", "/close", Closing(gate), type=dict)

    # -- what a test asks --------------------------------------------------------------------------------------

    def ledger(self, *, conversation: str | None = None, model: str | None = None) -> list[Entry]:
        """All requests so far, in their order; of one conversation or model."""
        query = {"conversation": conversation, "model": model}
        wanted = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", f"/ledger?{wanted}", type=list[Entry])

    def counts(self) -> Counts:
        return self._ask("GET", "/counts", type=Counts)

    def repeated(self) -> list[Entry]:
        """Complete answers to questions that had a complete answer before."""
        return self._ask("GET", "/repeated", type=list[Entry])

    def request(self, number: int) -> dict[str, Any]:
        """The body of a request, by its number in the ledger."""
        return self._ask("GET", f"/request?number={number}", type=dict)

    def kept(self) -> list[Entry]:
        """The ledger from its file, which outlives a kill of the server."""
        return read_file(self.file)

    async def until(self, check: Callable[[list[Entry]], object], what: str, seconds: float = 60.0) -> list[Entry]:
        """Wait until the ledger meets the check. Raises AssertionError with `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not check(entries := self.ledger()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; the ledger: {entries[-20:]}"
            await asyncio.sleep(0.02)
        return entries

    async def waits(self, gate: str, *, count: int = 1, seconds: float = 60.0) -> list[Entry]:
        """Wait until this many requests wait at the gate, and return them."""
        found: list[Entry] = []

        def check(entries: list[Entry]) -> bool:
            found[:] = [entry for entry in entries if entry.waits == gate]
            return len(found) >= count

        await self.until(check, f"{count} requests wait at the gate {gate!r}", seconds)
        return found

    def _ask(self, method: str, path: str, body: object = None, *, type: type[Reply]) -> Reply:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=START_SECONDS)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status == 200, f"{method} {path}: {data.decode()}"
        return msgspec.json.decode(data, type=type)
