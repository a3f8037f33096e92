"""Lists, groups, redrives and drops dead letters: deliveries that will not be retried."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgspec

from runtime_core.bus.connection import Argument, Reply, position
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import ingress
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.admission import check_data
from runtime_core.state_manager.publishers import Publishers
from runtime_core.telemetry.redaction import redactor
from runtime_core.wire.codec import encode, readable, wrong_cursor
from runtime_core.wire.ids import DeliveryHeader

LETTERS_PAGE = 200
SCANNED_MAX = 5_000
"""The most dead letters of a partition that one page of a list scans."""
REJECTED = "rejected"
REASONS = (
    "attempts_used_up", "not_retryable", "poison", "diverged", "unknown_name", "malformed", REJECTED, "undeliverable",
    "defect", "lost",
)  # fmt: skip
GROUP_CHARACTERS = 400
"""The most characters of a group's name: a filter takes it back as a parameter."""
_VALUE = re.compile(r"""\"[^\"]*\"|(?<!\w)'[^']*'|[\w.:@/-]+""")
"""A quoted text, or a word. Each alternative is linear in its text."""
_EVENT = "event:"

By = Literal["error", "name", "reason", "stream"]
OVERHEAD_BYTES = 256
"""A dead letter's cost on the server besides its fields, as `letters.lua` counts it."""


_CURSOR = re.compile(r"(\d{1,19})-(\d{1,19})\.(\d{1,4})")
_Place = tuple[tuple[int, int], int]
"""The entry id of a letter, then its partition."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    letter_id: str
    """The entry id; with several partitions, `partition/entry id`."""
    partition: int
    entry: str
    fields: dict[str, bytes]
    """The fields as they are on the stream."""

    def without_secrets(self) -> DeadLetter:
        """The dead letter in displayable form; a redrive uses the stored one."""
        secrets = redactor()
        shown = {
            name: secrets.data(value)
            if value[:1] in (b"{", b"[", b'"')
            else secrets.text(value.decode("utf-8", "replace")).encode()
            for name, value in self.fields.items()
        }
        return replace(self, fields=shown)

    def _text(self, name: str) -> str:
        return self.fields.get(name, b"").decode("utf-8", "replace")

    @property
    def reason(self) -> str:
        """One of `REASONS`, or that of a later release."""
        return self._text("reason")

    @property
    def stream(self) -> str:
        """The stream of the delivery, without its base: `agent`, `tool:gpu`, `tasks`."""
        return self._text("stream")

    @property
    def group(self) -> str:
        return self._text("group")

    @property
    def publisher(self) -> str:
        """The publisher that sent a rejected command; empty for the shared stream."""
        return self.stream.partition(":")[2]

    @property
    def delivery(self) -> str:
        """The entry id of the delivery."""
        return self._text("entry")

    @property
    def task(self) -> str:
        return self._text("taskid")

    @property
    def run(self) -> str:
        return self._text("runid")

    @property
    def name(self) -> str:
        """The agent, tool or engine function that failed; for a rejected submit the wrong field."""
        return self._text("name") or self._text("field")

    @property
    def attempt(self) -> int:
        text = self._text("attempt")
        return int(text) if text.isdecimal() else 0

    @property
    def at_ms(self) -> int:
        text = self._text("time")
        return int(text) if text.isdecimal() else int(self.entry.partition("-")[0])

    @property
    def kind(self) -> str:
        """`start`, `resume` or `call`; `rejected` for an entry of the ingress; else empty."""
        if self.reason == REJECTED or self.event:
            return REJECTED
        header = DeliveryHeader.parse(self.fields.get("h"))
        return header.kind if header.task else ""

    @property
    def error(self) -> dict[str, Any]:  # Any: JSON
        """`type`, `message`, and `traceback` if there is one."""
        found = readable(self.fields.get("error", b""))
        return found if isinstance(found, dict) else {"type": "", "message": str(found or "")}

    @property
    def errors(self) -> list[dict[str, Any]]:  # Any: JSON
        """The error of each attempt, oldest first, with `traceback` and `at` (epoch milliseconds)."""
        found = readable(self.fields.get("errors", b""))
        return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []

    @property
    def event(self) -> dict[str, str]:
        """The original fields of a rejected ingress entry; empty for other dead letters."""
        return {
            name[len(_EVENT) :]: value.decode("utf-8", "replace")
            for name, value in self.fields.items()
            if name.startswith(_EVENT)
        }

    @property
    def place(self) -> _Place:
        """Its place in lists, which descend."""
        return position(self.entry), self.partition

    @property
    def size(self) -> int:
        """Its size in bytes, by the broker's count."""
        return OVERHEAD_BYTES + sum(len(name.encode()) + len(value) for name, value in self.fields.items())

    @property
    def cut(self) -> dict[str, Any]:  # Any: JSON
        """The fields that were too large to keep; empty for a complete dead letter.

        `bytes`: the original size of all fields. `fields`: the truncated fields, each with its `bytes` and `sha256` (or
        `sha1`). `left_out`: how many fields were dropped.
        """
        found = readable(self.fields.get("cut", b""))
        return found if isinstance(found, dict) else {}

    @property
    def data(self) -> object:
        """The data of the delivery: an input, arguments, or the data of a rejected event."""
        return readable(self.fields.get(_EVENT + "data", self.fields.get("d", b"")))

    def group_key(self, by: By) -> str:
        """Return the group of this dead letter by the given property."""
        if by == "error":
            return _error_group(str(self.error.get("type", "")), str(self.error.get("message", "")))
        return {"name": self.name, "reason": self.reason, "stream": self.stream}[by]

    def shown_group(self, by: By) -> str:
        """Return the group without secrets."""
        return redactor().text(self.group_key(by))[:GROUP_CHARACTERS]

    def summary(self) -> dict[str, Any]:  # Any: JSON
        """Return the members that lists show."""
        return {
            "letter_id": self.letter_id,
            "time": self.at_ms,
            "reason": self.reason,
            "stream": self.stream,
            "name": self.name,
            "task_id": self.task,
            "run_id": self.run,
            "attempt": self.attempt,
            "bytes": self.size,
            "error": {"type": self.error.get("type", ""), "message": self.error.get("message", "")},
        }

    def details(self) -> dict[str, Any]:  # Any: JSON
        """Return all stored members."""
        return {
            **self.summary(),
            "group": self.group,
            "kind": self.kind,
            "delivery": self.delivery,
            "error": self.error,
            "errors": self.errors,
            "data": self.data,
            "context": readable(self.fields.get("x", b"")),
            "event": self.event,
            "cut": self.cut,
        }


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """A filter for dead letters; empty fields select all."""

    reason: str = ""
    name: str = ""
    task: str = ""
    error: str = ""
    """The shown key of a group by `error`."""
    tenant: str = ""
    """Only letters of tasks whose ids begin with this tenant, and of rejected commands of `publishers`."""
    publishers: frozenset[str] = frozenset()
    """The publishers of `tenant`: only the stream of a rejected command says who sent it."""

    def __contains__(self, letter: DeadLetter) -> bool:
        wanted = ((self.reason, letter.reason), (self.name, letter.name), (self.task, letter.task))
        return (
            all(not value or value == found for value, found in wanted)
            and (not self.error or self.error == letter.shown_group("error"))
            and (not self.tenant or self._owns(letter))
        )

    def _owns(self, letter: DeadLetter) -> bool:
        if letter.kind == REJECTED:
            return letter.publisher in self.publishers
        return letter.task.startswith(f"{self.tenant}.")


EVERY = LetterFilter()


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Dead letters that have something in common."""

    key: str
    count: int
    size: int
    """Bytes of the group."""
    newest: DeadLetter


@dataclass(frozen=True, slots=True)
class LetterPage:
    """A part of the list of dead letters."""

    letters: list[DeadLetter]
    cursor: str
    """The cursor of the next page; empty at the end of the list. A page may have fewer letters than requested."""


@dataclass(frozen=True, slots=True)
class LetterSizes:
    """The size of the dead letters."""

    shares: dict[str, int]
    """By share, the largest first: a stream, `replyto` for answers, `parked` for runs that wait for their letter."""
    bound: int
    """The limit of all shares except `parked` together; 0 if no state-manager has set it yet."""
    trimmed: int
    """How many letters were trimmed so far."""

    @property
    def total(self) -> int:
        return sum(self.shares.values())


class DeadLetters:
    """The dead letters of a namespace, over all its partitions."""

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses

    async def count(self) -> int:
        return sum([cast(int, await bus.transport.call("XLEN", bus.keys.dead)) for bus in self._buses])

    async def sizes(self) -> LetterSizes:
        """The bytes of dead letters, by share and over all partitions."""
        shares: Counter[str] = Counter()
        bound = trimmed = 0
        for bus in self._buses:
            stored = await letter_bytes(bus)
            shares.update({share: size for share, size in stored.items() if share})
            most = await bus.transport.call("HGET", bus.keys.meta, "dead_max")
            bound += int(cast(bytes, most)) if most is not None else 0
            trimmed += sum((await trimmed_letters(bus)).values())
        return LetterSizes(dict(shares.most_common()), bound, trimmed)

    async def newest(self, limit: int, selection: LetterFilter = EVERY) -> list[DeadLetter]:
        """Return up to `limit` dead letters, the newest first."""
        found: list[DeadLetter] = []
        for bus in self._buses:
            of_partition: list[DeadLetter] = []
            async for letter in self._walk(bus, newest_first=True):
                if letter in selection:
                    of_partition.append(letter)
                if len(of_partition) >= limit:
                    break
            found += of_partition
        return sorted(found, key=lambda letter: position(letter.entry), reverse=True)[:limit]

    async def page(self, limit: int, selection: LetterFilter = EVERY, cursor: str = "") -> LetterPage:
        """Return dead letters, the newest first, after a cursor. Raises InvalidInput (`cursor`).

        A cursor names a letter's place, so letters that come or go between two pages move no other one.
        """
        after = self._place_in(cursor) if cursor else None
        found: list[tuple[_Place, DeadLetter]] = []
        stopped: list[_Place] = []
        """Where a partition may have more letters."""
        for bus in self._buses:
            scanned = taken = 0
            async for letter in self._walk(bus, newest_first=True, after=after):
                scanned += 1
                if letter in selection:
                    found.append((letter.place, letter))
                    taken += 1
                if taken > limit or scanned >= SCANNED_MAX:
                    stopped.append(letter.place)
                    break
        # After the place where one partition has stopped, it may have newer letters than the others.
        horizon = max(stopped, default=None)
        found = sorted((each for each in found if horizon is None or each[0] >= horizon), reverse=True, key=_first)
        if len(found) > limit:
            return LetterPage([letter for _, letter in found[:limit]], _cursor_at(found[limit - 1][0]))
        return LetterPage([letter for _, letter in found], "" if horizon is None else _cursor_at(horizon))

    async def counted(self, by: By, selection: LetterFilter = EVERY) -> list[LetterGroup]:
        """Return dead letters counted by a common property, the most frequent first, of equal ones the newest."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        newest: dict[str, DeadLetter] = {}
        async for letter in self.all(selection):
            key = letter.group_key(by)
            counts[key] += 1
            sizes[key] += letter.size
            if key not in newest or position(letter.entry) >= position(newest[key].entry):
                newest[key] = letter
        groups = [LetterGroup(key, count, sizes[key], newest[key]) for key, count in counts.items()]
        return sorted(groups, key=lambda group: (group.count, group.newest.place), reverse=True)

    async def all(self, selection: LetterFilter = EVERY) -> AsyncIterator[DeadLetter]:
        """Yield every current dead letter, the oldest of each partition first. Later ones are not included."""
        for bus in self._buses:
            async for letter in self._walk(bus, newest_first=False):
                if letter in selection:
                    yield letter

    async def parked(self, task: str = "") -> AsyncIterator[DeadLetter]:
        """Yield the dead letters of runs that are parked now, because their code differs from their journal.

        `task` selects those of one task.
        """
        async for letter in self.all(LetterFilter("diverged", "", task)):
            bus = self._buses[letter.partition]
            if await bus.transport.call("HGET", bus.keys.run(letter.task, letter.run), "cur") == b"park":
                yield letter

    async def get(self, letter_id: str) -> DeadLetter:
        """Return a dead letter. Raises InvalidInput (`letter_id`) if it does not exist."""
        bus, entry = self._place(letter_id)
        found = pairs(await bus.transport.call("XRANGE", bus.keys.dead, entry, entry))
        if not found:
            raise _missing(letter_id)
        return self._letter(bus, *found[0])

    async def redrive(self, letter_id: str, *, reopen: bool = False, data: bytes = b"") -> str:
        """Return a dead letter's delivery to the consumer that failed, with a new count of attempts; return its task.

        `reopen` lets an ended task continue; `data` (JSON) replaces the old data. A rejected entry returns to the
        ingress under its old id, so a repeated redrive starts one task; the task returned is "" if it is not known yet.
        Raises InvalidInput if the dead letter does not exist, or nothing waits for it. Raises Rejected, with the wrong
        part as in `data.amount`, if the new data does not fit the published schema of the agent or tool.
        """
        letter = await self.get(letter_id)
        bus, entry = self._place(letter_id)
        if letter.cut:
            raise _was_cut(letter_id)
        if letter.kind == REJECTED:
            return await self._submit_again(bus, letter, data)
        if not letter.kind:
            raise InvalidInput(
                "letter_id",
                f"{letter_id} cannot be redriven ({letter.reason}): inspect it with `weft dead show`, then drop it",
            )
        if data and letter.kind == "resume":
            raise InvalidInput("data", f"{letter_id} is a turn in the middle of its run: it has no data to replace")
        if data:  # before anything is written: the old data exists nowhere else
            await check_data(self._buses[0], letter.stream, letter.name, data)
        answer = await bus.redrive(entry, reopen, data)
        match answer[0]:
            case "ok":
                return answer[1]
            case "missing":
                raise _missing(letter_id)
            case "cut":
                raise _was_cut(letter_id)
            case "ended":
                raise InvalidInput(
                    "letter_id",
                    f"task {answer[1]} of {letter_id} has ended ({answer[2]}); --reopen continues it from there",
                )
            case "called":
                raise InvalidInput(
                    "data",
                    f"{letter_id} is of a run that task {answer[1]} calls, which gives it its input again: redrive it "
                    "without new data",
                )
            case "answered":
                raise InvalidInput(
                    "letter_id",
                    f"task {answer[1]} of {letter_id} has answered a run in another partition, and nobody waits for it "
                    f"any more: submit the task that called it again, then run `weft dead drop {letter_id}`",
                )
        raise InvalidInput(
            "letter_id", f"nothing waits for {letter_id} any more (task {letter.task or 'unknown'}): drop it"
        )

    async def drop(self, letter_id: str) -> None:
        """Drop a dead letter. Raises InvalidInput if it does not exist."""
        bus, entry = self._place(letter_id)
        if not await bus.drop_letter(entry):
            raise _missing(letter_id)

    async def _submit_again(self, bus: EventBus, letter: DeadLetter, data: bytes) -> str:
        fields = {name[len(_EVENT) :]: value for name, value in letter.fields.items() if name.startswith(_EVENT)}
        if data:
            await self._check_submit(data)
        structured = "type" not in fields and fields.keys() <= {"data", "metadata"}
        if data and structured:
            fields["data"] = _with_data(fields.get("data", b""), data)
        elif data:
            fields.update(data=data, datacontenttype=b"application/json")
        if not structured:
            # An event without an id is identified by its entry id; a new entry would make it another event.
            fields.setdefault("id", letter.delivery.encode())
        arguments: list[Argument] = [item for pair in fields.items() for item in pair]
        if not arguments:
            raise InvalidInput("letter_id", f"{letter.letter_id} holds no event: drop it")
        publisher = letter.publisher
        if publisher and await Publishers(self._buses[0]).get(publisher) is None:
            # On the shared stream it would be bound to no tenant.
            raise InvalidInput(
                "letter_id",
                f"{letter.letter_id} came from publisher {publisher!r}, which is no longer registered: register it "
                f"with `weft publisher set {publisher} --tenant …`, or drop the letter",
            )
        await bus.transport.call("XADD", ingress(bus.keys.namespace, publisher), "*", *arguments)
        await bus.drop_letter(letter.entry)
        return letter.task

    async def _check_submit(self, data: bytes) -> None:
        """Check new data of a rejected submit as far as its agent's schema goes. Admission checks the rest."""
        submit = readable(data)
        if isinstance(submit, dict) and isinstance(agent := submit.get("agent"), str) and "input" in submit:
            await check_data(self._buses[0], "agent", agent, encode(submit["input"]), "data.input")

    async def _walk(
        self, bus: EventBus, *, newest_first: bool, after: _Place | None = None
    ) -> AsyncIterator[DeadLetter]:
        call, key = bus.transport.call, bus.keys.dead
        if after is None:
            last = pairs(await call("XREVRANGE", key, "+", "-", "COUNT", 1))
            if not last:
                return
            end = last[0][0].decode()
        else:
            # Of letters with the same entry id, those of lower partitions follow.
            end = f"{'' if bus.keys.partition < after[1] else '('}{after[0][0]}-{after[0][1]}"
        start = "-"
        while True:
            if newest_first:
                reply: Reply = await call("XREVRANGE", key, end, "-", "COUNT", LETTERS_PAGE)
            else:
                reply = await call("XRANGE", key, start, end, "COUNT", LETTERS_PAGE)
            entries = pairs(reply)
            for entry, fields in entries:
                yield self._letter(bus, entry, fields)
            if len(entries) < LETTERS_PAGE:
                return
            next = "(" + entries[-1][0].decode()
            if newest_first:
                end = next
            else:
                start = next

    def _letter(self, bus: EventBus, entry: bytes, fields: list[bytes]) -> DeadLetter:
        named = {name.decode("utf-8", "replace"): value for name, value in zip(fields[::2], fields[1::2], strict=False)}
        partition, text = bus.keys.partition, entry.decode()
        letter_id = text if len(self._buses) == 1 else f"{partition}/{text}"
        return DeadLetter(letter_id, partition, text, named)

    def _place_in(self, cursor: str) -> _Place:
        found = _CURSOR.fullmatch(cursor)
        if found is None or int(found[1]) >= 2**63 or int(found[2]) >= 2**63:
            raise wrong_cursor(cursor)
        return (int(found[1]), int(found[2])), int(found[3])

    def _place(self, letter_id: str) -> tuple[EventBus, str]:
        number, slash, entry = letter_id.replace(":", "/", 1).rpartition("/")
        milliseconds, _, sequence = entry.partition("-")
        known = milliseconds.isdecimal() and sequence.isdecimal() and len(entry) < 42 and entry.isascii()
        if not slash and len(self._buses) == 1:
            number = "0"
        if not known or not number.isdecimal() or int(number) >= len(self._buses):
            example = "1731240000000-0" if len(self._buses) == 1 else "0/1731240000000-0"
            raise InvalidInput("letter_id", f"{letter_id!r} is not the id of a dead letter, as in {example}")
        return self._buses[int(number)], entry


async def letter_bytes(bus: EventBus) -> dict[str, int]:
    """Return the bytes of a partition's dead letters by share. The empty share is the sum that is bounded."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.letters("bytes")))
    return {flat[at].decode("utf-8", "replace"): int(flat[at + 1]) for at in range(0, len(flat), 2)}


async def trimmed_letters(bus: EventBus) -> dict[tuple[str, str], int]:
    """Return how many dead letters a partition has trimmed so far, by cause (`bytes`, `age`) and share."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.letters("trimmed")))
    found = {}
    for at in range(0, len(flat), 2):
        cause, _, share = flat[at].decode("utf-8", "replace").partition(" ")
        found[cause, share] = int(flat[at + 1])
    return found


def _error_group(kind: str, message: str) -> str:
    """Return the type of an error and the first line of its message, with `…` for quoted texts, numbers and ids."""
    line = " ".join(message.partition("\n")[0][: 4 * GROUP_CHARACTERS].split())
    text = _VALUE.sub(_without_value, "".join(each if each.isprintable() else "…" for each in line))
    return ": ".join(part for part in (kind, text) if part)[:GROUP_CHARACTERS]


def _without_value(found: re.Match[str]) -> str:
    text = found[0]
    is_value = text[0] in "\"'" or any(map(str.isdecimal, text))
    return "…" if is_value else text


def _first(item: tuple[_Place, DeadLetter]) -> _Place:
    return item[0]


def _cursor_at(place: _Place) -> str:
    return f"{place[0][0]}-{place[0][1]}.{place[1]}"


def _was_cut(letter_id: str) -> InvalidInput:
    return InvalidInput(
        "letter_id",
        f"the dead letter {letter_id} was cut because it was too large, so it cannot be redriven: "
        f"send the original again in a smaller form, then run `weft dead drop {letter_id}`",
    )


def _missing(letter_id: str) -> InvalidInput:
    return InvalidInput("letter_id", f"there is no dead letter {letter_id}: it may have been redriven or dropped")


def _with_data(event: bytes, data: bytes) -> bytes:
    """Replace the data of a structured event. Raises InvalidInput if the event cannot be read."""
    try:
        members = msgspec.json.decode(event, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(
            "data", f"the rejected event cannot be read ({error}), so nothing in it can be replaced"
        ) from None
    members.pop("data_base64", None)
    members.update(data=msgspec.Raw(data), datacontenttype=msgspec.Raw(b'"application/json"'))
    return msgspec.json.encode(members)
