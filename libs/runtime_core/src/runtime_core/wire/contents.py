"""Stores and sends repeated values of steps only once, under a digest of their content.

A conversation passes all its messages to each of its model calls, so its steps would grow with the square of its turns.

- `Contents` is for the trajectory store. A member `messages` of a step's input or output is stored as a chain: each
  node is one message and the previous node, and its digest stands for the whole list up to it. A list that continues
  another one adds only its new messages. Other large values are stored once by their content.
- `SentLists` is for the record stream, where 1,000 turns of 2 KB would take 1.2 GB. A row whose messages begin with a
  list that this process has sent before names that list by its digest (`Step.input_after`) and contains the rest. The
  recorder knows the list by then, since rows of a partition are in order. Each list is sent in full again when it has
  grown to twice the length of its last full row: that keeps the sum linear, and limits the effect of a lost or erased
  beginning.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from runtime_core.base.periodic import Slices
from runtime_core.wire.step import ENCODER, STEPS, Step

DIGEST_BYTES = 20
LARGE_BYTES = 4_096
"""A value of at least this size is stored apart from its step: below it, the digest and its row would cost more."""

MESSAGES = "messages"
"""The name of a member whose value, a list, is stored as a chain of messages."""
MESSAGES_IN = b'"messages"'
"""The text that any JSON with such a member contains."""
_LIST = "l"
_VALUE = "v"
_ROOT = b"\0" * DIGEST_BYTES
_NUL = "\0"
_NUL_SHOWN = "␀"
_PLACEHOLDER = msgspec.Raw(b"null")

SLICE_BYTES = 65_536
"""How many bytes of rows are shortened before other work of the event loop runs."""
_ROW_BYTES = 2_048
"""What a row costs in addition to its input, as bytes."""
UNSHORTENED_BYTES = 2_048
"""A record under this size is left as it is."""
REMEMBERED_LISTS = 10_000
"""Lists that a process remembers for each partition, 100 bytes each."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_step = msgspec.json.Decoder(Step).decode


class FormerPlace(msgspec.Struct, array_like=True, frozen=True):
    """The former place of a value that was moved out of a step's input or output."""

    member: str | None
    """The name of the member; None for the whole value."""
    kind: str
    """`l` for a list of messages, `v` for a value."""
    digest: str
    """Hexadecimal."""


REFERENCES = msgspec.json.Decoder(list[FormerPlace])


@dataclass(frozen=True, slots=True)
class Node:
    """A message at its place in a list."""

    parent: bytes | None
    """The list before this message; None for the first message."""
    message: bytes
    """Digest of the message itself."""


@dataclass(slots=True)
class Contents:
    """The values that the steps of a batch, or of a page, refer to."""

    values: dict[bytes, str] = field(default_factory=dict)
    """JSON by digest."""
    nodes: dict[bytes, Node] = field(default_factory=dict)
    """By digest, each after its parent."""

    def extract(self, text: str, data: bytes, after: bytes | None = None) -> tuple[str | None, list[FormerPlace]]:
        """Move large values and messages out of a step's JSON: return the rest of `text`, and references to the moved
        values.

        `data` is the same JSON in bytes; its messages come after the list `after`, if any. The rest is None if the
        whole value was moved. Invalid JSON stays unchanged. Only data of `LARGE_BYTES`, or with
        `MESSAGES_IN`, can have anything to move.
        """
        references: list[FormerPlace] = []
        if data[:1] == b"{":
            try:
                members = _members(data)
                for name, value in members.items():
                    taken = self._take_member(name, bytes(value), after)
                    if taken is not None:
                        references.append(taken)
                        members[name] = _PLACEHOLDER
            except (msgspec.MsgspecError, ValueError, RecursionError):
                return text, []
            if references:
                return text_of_json(ENCODER.encode(members)), references
        if len(data) < LARGE_BYTES:
            return text, []
        return None, [FormerPlace(None, _VALUE, self._keep(data).hex())]

    def _take_member(self, name: str, value: bytes, after: bytes | None) -> FormerPlace | None:
        if name == MESSAGES and value[:1] == b"[":
            head = self._chain(_elements(value), after)
            return FormerPlace(name, _LIST, head.hex()) if head is not None else None
        if len(value) >= LARGE_BYTES:
            return FormerPlace(name, _VALUE, self._keep(value).hex())
        return None

    def _chain(self, messages: Iterable[msgspec.Raw], head: bytes | None) -> bytes | None:
        nodes = self.nodes
        for message in messages:
            content = self._keep(bytes(message))
            digest = extended_digest(head, content)
            if digest not in nodes:
                nodes[digest] = Node(head, content)
            head = digest
        return head

    def _keep(self, data: bytes) -> bytes:
        digest = message_digest(data)
        if digest not in self.values:
            self.values[digest] = text_of_json(data)
        return digest

    def restore(self, text: str | None, references: Iterable[FormerPlace]) -> bytes:
        """Return the JSON that `extract` got, with the spacing of its first level normalised."""
        members: dict[str, msgspec.Raw] = {}
        for reference in references:
            if reference.member is None:
                return self._value(reference)
            members = members or _members((text or "{}").encode())
            members[reference.member] = msgspec.Raw(self._value(reference))
        return ENCODER.encode(members)

    def has_gap(self, references: Iterable[FormerPlace]) -> bool:
        """Return whether the beginning of a list is missing: it was erased, or never arrived."""
        for reference in references:
            if reference.kind == _LIST:
                at: bytes | None = bytes.fromhex(reference.digest)
                while at is not None:
                    node = self.nodes.get(at)
                    if node is None:
                        return True
                    at = node.parent
        return False

    def _value(self, reference: FormerPlace) -> bytes:
        digest = bytes.fromhex(reference.digest)
        # A missing value was erased with its task while this page was read.
        if reference.kind == _VALUE:
            return self.values.get(digest, "null").encode()
        messages: list[str] = []
        node = self.nodes.get(digest)
        while node is not None:
            messages.append(self.values[node.message])
            node = self.nodes.get(node.parent) if node.parent is not None else None
        return f"[{','.join(reversed(messages))}]".encode()


def missing_nodes(
    heads: Iterable[bytes], nodes: Mapping[bytes, Node]
) -> Generator[list[bytes], set[bytes], list[bytes]]:
    """Find the nodes that the store lacks, in an order in which each comes after its parent.

    Yields digests to look up; the caller sends back those that the store has. A stored node has all its predecessors,
    so the search goes from the end of each list to its beginning, in growing strides: its cost depends on the new
    nodes.
    """
    lacking: dict[bytes, None] = {}
    frontier = list(dict.fromkeys(heads))
    stride = 1
    while frontier:
        asked: dict[bytes, None] = {}
        for head in frontier:
            at: bytes | None = head
            for _ in range(stride):
                # Nodes that are not in this batch were written before.
                if at is None or at in lacking or at in asked or at not in nodes:
                    break
                asked[at] = None
                at = nodes[at].parent
        known = yield list(asked)
        following: dict[bytes, None] = {}
        for head in frontier:
            at = head
            while at is not None and at in asked and at not in known:
                lacking[at] = None
                at = nodes[at].parent
            if at is not None and at in nodes and at not in asked and at not in lacking:
                following[at] = None
        frontier = list(following)
        stride = min(stride * 4, 4_096)
    return [digest for digest in nodes if digest in lacking]


def message_digest(data: bytes) -> bytes:
    """Return the digest of a message or any other value, given as JSON."""
    return _digest(b"v" + data)


def extended_digest(head: bytes | None, message: bytes) -> bytes:
    """Return the digest of the list `head` (None: empty) plus one message."""
    return _digest(b"l" + (head or _ROOT) + message)


def text_of_json(data: bytes) -> str:
    """Return JSON as text that both databases can hold: reading skips over Raw JSON without checking it."""
    text = str(data, "utf-8", "replace")
    return without_nul(text) if "\0" in text else text


def without_nul(text: str) -> str:
    """Return `text` as both databases can hold it: PostgreSQL refuses NUL, so NUL is stored as ␀."""
    return text.replace(_NUL, _NUL_SHOWN) if _NUL in text else text


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _SentList:
    """A list that was sent on the record stream."""

    digest: bytes
    """The digest that the recorder computes from the redacted messages."""
    whole: int
    """The number of messages in its last full row."""


Redact = Callable[[bytes], Awaitable[bytes]]
NewLists = dict[bytes, _SentList]
"""Sent lists, by the digest of the original messages."""


class SentLists:
    """The lists that one process has sent on the record stream of one partition."""

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, _SentList] = OrderedDict()

    async def shortened(self, record: bytes, redact: Redact) -> tuple[bytes, NewLists]:
        """Return redacted rows (a JSON array) for the record, and the lists to remember once the rows are on it.

        Unreadable rows stay unchanged.
        """
        if len(record) < UNSHORTENED_BYTES or MESSAGES_IN not in record:
            return await redact(record), {}
        new: NewLists = {}
        try:
            slices = Slices(SLICE_BYTES)
            rows = []
            for step in STEPS.decode(record):
                await slices.worked(_ROW_BYTES + len(bytes(step.input)))
                rows.append(await self._row(step, redact, new))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return await redact(record), {}
        return b"[%b]" % b",".join(rows), new

    def remember(self, new: NewLists) -> None:
        """Remember the lists of rows that are on the record now."""
        for given, sent in new.items():
            self._sent[given] = sent
            self._sent.move_to_end(given)
        while len(self._sent) > REMEMBERED_LISTS:
            self._sent.popitem(last=False)

    def forget(self) -> None:
        """Forget all lists: the record may have lost rows, since an unreachable broker may have lost its last
        writes."""
        self._sent.clear()

    async def _row(self, step: Step, redact: Redact, new: NewLists) -> bytes:
        data = bytes(step.input)
        members = _members(data) if data[:1] == b"{" and MESSAGES_IN in data else {}
        value = bytes(members.get(MESSAGES, b""))
        if value[:1] != b"[":
            return await redact(ENCODER.encode(step))
        messages = _elements(value)
        given: list[bytes] = []
        for message in messages:
            given.append(extended_digest(given[-1] if given else None, message_digest(bytes(message))))
        if not given:
            return await redact(ENCODER.encode(step))
        known, before = self._longest(given, new)
        whole = len(given)
        if before is not None and whole < 2 * before.whole:
            whole = before.whole
            members[MESSAGES] = msgspec.Raw(b"[%b]" % b",".join(map(bytes, messages[known:])))
            step.input = msgspec.Raw(ENCODER.encode(members))
            step.input_after = before.digest.hex()
        row = await redact(ENCODER.encode(step))
        # Count as the recorder does: by the content of the row.
        head = before.digest if step.input_after and before is not None else None
        for message in _elements(_members(bytes(_step(row).input))[MESSAGES]):
            head = extended_digest(head, message_digest(bytes(message)))
        if head is not None:
            new[given[-1]] = _SentList(head, whole)
        return row

    def _longest(self, given: list[bytes], new: NewLists) -> tuple[int, _SentList | None]:
        """Return the longest sent prefix of a list: its length and its entry."""
        for length in range(len(given), 0, -1):
            sent = new.get(given[length - 1]) or self._sent.get(given[length - 1])
            if sent is not None:
                return length, sent
        return 0, None
