"""Stores values that steps repeat once, under a digest of their content.

A conversation passes all its messages to each of its model calls. So a member `messages` of a step's input or output is
stored as a chain: each node is one message and the previous node, and its digest stands for the whole list up to it. A
list that continues another one adds only its new messages; 1,000 turns take the space of 1,000 turns and not of their
square. Other large members, and large values as a whole, are stored once by their content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from runtime_core.record.step import ENCODER

DIGEST_BYTES = 20
LARGE_BYTES = 4_096
"""A value of at least this size is stored apart from its step: below it, the digest and its row would cost more."""

MESSAGES = "messages"
"""The name of a member whose value, a list, is stored as a chain of messages."""
_MESSAGES_IN = b'"messages"'
_LIST = "l"
_VALUE = "v"
_ROOT = b"\0" * DIGEST_BYTES
_NUL = "\0"
_NUL_SHOWN = "␀"
_PLACEHOLDER = msgspec.Raw(b"null")

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Reference(msgspec.Struct, array_like=True, frozen=True):
    """The place of a stored value that was taken out of a step's input or output."""

    member: str | None
    """The name of the member; None for the whole value."""
    kind: str
    """`l` for a list of messages, `v` for a value."""
    digest: str
    """Hexadecimal."""


REFERENCES = msgspec.json.Decoder(list[Reference])


@dataclass(frozen=True, slots=True)
class Node:
    """A message at its place in a list."""

    parent: bytes | None
    """The list before this message; None: it is the first."""
    message: bytes
    """Digest of the message itself."""


@dataclass(slots=True)
class Contents:
    """The values that the steps of a batch, or of a page, refer to."""

    values: dict[bytes, str] = field(default_factory=dict)
    """JSON by digest."""
    nodes: dict[bytes, Node] = field(default_factory=dict)
    """By digest, each after its parent."""

    def take_out(self, text: str, data: bytes, after: bytes | None = None) -> tuple[str | None, list[Reference]]:
        """Move large values and messages out of a step's JSON: return the rest of `text`, and references to the moved
        values.

        `data` is the same JSON in bytes; its messages come after the list `after`, if any. The rest is None if the
        whole value was moved. JSON that cannot be read stays as it is.
        """
        if len(data) < LARGE_BYTES and _MESSAGES_IN not in data:
            return text, []
        references: list[Reference] = []
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
                return readable(ENCODER.encode(members)), references
        if len(data) < LARGE_BYTES:
            return text, []
        return None, [Reference(None, _VALUE, self._keep(data).hex())]

    def _take_member(self, name: str, value: bytes, after: bytes | None) -> Reference | None:
        if name == MESSAGES and value[:1] == b"[":
            head = self._chain(_elements(value), after)
            return Reference(name, _LIST, head.hex()) if head is not None else None
        if len(value) >= LARGE_BYTES:
            return Reference(name, _VALUE, self._keep(value).hex())
        return None

    def _chain(self, messages: Iterable[msgspec.Raw], head: bytes | None) -> bytes | None:
        nodes = self.nodes
        for message in messages:
            content = self._keep(bytes(message))
            digest = following(head, content)
            if digest not in nodes:
                nodes[digest] = Node(head, content)
            head = digest
        return head

    def _keep(self, data: bytes) -> bytes:
        digest = message_digest(data)
        if digest not in self.values:
            self.values[digest] = readable(data)
        return digest

    def put_back(self, text: str | None, references: Iterable[Reference]) -> bytes:
        """The JSON that `take_out` was given, with the spacing of its first level normalised."""
        members: dict[str, msgspec.Raw] = {}
        for reference in references:
            if reference.member is None:
                return self._value(reference)
            members = members or _members((text or "{}").encode())
            members[reference.member] = msgspec.Raw(self._value(reference))
        return ENCODER.encode(members)

    def lacks(self, references: Iterable[Reference]) -> bool:
        """Whether the beginning of a list is missing: it was erased, or never came."""
        for reference in references:
            if reference.kind == _LIST:
                at: bytes | None = bytes.fromhex(reference.digest)
                while at is not None:
                    node = self.nodes.get(at)
                    if node is None:
                        return True
                    at = node.parent
        return False

    def _value(self, reference: Reference) -> bytes:
        digest = bytes.fromhex(reference.digest)
        # What is not there was erased with its task while this page was read.
        if reference.kind == _VALUE:
            return self.values.get(digest, "null").encode()
        messages: list[str] = []
        node = self.nodes.get(digest)
        while node is not None:
            messages.append(self.values[node.message])
            node = self.nodes.get(node.parent) if node.parent is not None else None
        return f"[{','.join(reversed(messages))}]".encode()


def missing(heads: Iterable[bytes], nodes: Mapping[bytes, Node]) -> Generator[list[bytes], set[bytes], list[bytes]]:
    """Find the nodes that the store lacks, in an order in which each comes after its parent.

    Yields digests to look up and is sent those that the store has. A stored node has all its predecessors, so the
    search goes from the end of each list to its beginning, in growing strides: its cost depends on the new nodes.
    """
    lacking: dict[bytes, None] = {}
    frontier = list(dict.fromkeys(heads))
    stride = 1
    while frontier:
        asked: dict[bytes, None] = {}
        for head in frontier:
            at: bytes | None = head
            for _ in range(stride):
                # What this batch only refers to was written before.
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
    """The digest of a message, or any value, given as JSON."""
    return _digest(b"v" + data)


def following(head: bytes | None, message: bytes) -> bytes:
    """The digest of the list `head` (None: empty) with one more message."""
    return _digest(b"l" + (head or _ROOT) + message)


def readable(data: bytes) -> str:
    """JSON as text that both databases can hold: reading skips over Raw JSON without checking it."""
    text = str(data, "utf-8", "replace")
    return text.replace(_NUL, _NUL_SHOWN) if _NUL in text else text


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
