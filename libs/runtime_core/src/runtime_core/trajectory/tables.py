"""The tables of the trajectory store, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

FORMAT = 3
"""Version of the tables below; raised by a change that an older release cannot read or write."""

METADATA = MetaData()


def _key() -> Text:
    # A key sorts by its bytes. SQLite does so already; PostgreSQL would follow the database's locale.
    return Text().with_variant(Text(collation="C"), "postgresql")


FORMATS = Table("weft_format", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))

STEPS = Table(
    "weft_steps",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    # Stands for run and step in the key, and sorts as they do.
    Column("place", _key(), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("run", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    # Epoch milliseconds.
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("key", Text, nullable=False),
    # JSON as it came. Not a JSON type: that would rewrite it, and PostgreSQL's refuses \u0000.
    Column("input", Text),
    Column("output", Text),
    Column("error", Text),
    Column("errors", Text),
    Column("usage", Text),
    Column("cause", Text, nullable=False),
    Column("owner", Text, nullable=False),
    # What was taken out of input and output (JSON, `contents.Reference`); null: nothing.
    Column("input_refs", Text),
    Column("output_refs", Text),
    # JSON object; null: none.
    Column("attributes", Text),
    # In SQLite this leaves a rowid table with a unique index: appends stay appends, and only the small
    # index is written at random places.
    PrimaryKeyConstraint("namespace", "task", "place", "attempt"),
)

TASKS = Table(
    "weft_tasks",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("status", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("steps", Integer, nullable=False),
    # Epoch milliseconds.
    Column("created", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("error", Text),
    Column("session", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "task"),
    Index("weft_tasks_by_end", "namespace", "ended", "task"),
    Index("weft_tasks_by_session", "namespace", "session", "ended", "task"),
)

CONTENTS = Table(
    "weft_contents",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    # JSON: a message, or a large value.
    Column("content", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "digest"),
)

LISTS = Table(
    "weft_lists",
    METADATA,
    Column("namespace", _key(), nullable=False),
    # Stands for a list of messages: `parent` with one message more.
    Column("digest", LargeBinary, nullable=False),
    Column("parent", LargeBinary),
    Column("message", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "digest"),
    Index("weft_lists_by_parent", "namespace", "parent"),
    Index("weft_lists_by_message", "namespace", "message"),
)

USES = Table(
    "weft_uses",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    # A content or a list that a step of the task refers to.
    Column("digest", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "task", "digest"),
    Index("weft_uses_by_digest", "namespace", "digest"),
)

FORKS = Table(
    "weft_forks",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("fork_of_task", _key(), nullable=False),
    Column("fork_of_step", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "task"),
)

CURSORS = Table(
    "weft_cursors",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("partition", Integer, nullable=False),
    # The highest epoch that has written; a lower one is fenced.
    Column("epoch", BigInteger, nullable=False),
    Column("entry", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "partition"),
)

UNREADABLE = Table(
    "weft_unreadable",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("partition", Integer, nullable=False),
    Column("entry", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("reason", Text, nullable=False),
    Column("steps", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "partition", "entry"),
    Index("weft_unreadable_by_task", "namespace", "task"),
)
