"""The write statements, made from the tables so that each column is named once."""

from __future__ import annotations

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite


def sqlite_upsert(table: Table) -> str:
    """Return an upsert whose `?` parameters are in the order of the table's columns."""
    insert = sqlite.insert(table)
    update = {name: insert.excluded[name] for name in _values(table)}
    statement = insert.on_conflict_do_update(index_elements=_keys(table), set_=update)
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


def postgres_upsert(table: Table) -> str:
    """Return an upsert whose `$1`, `$2`, … are arrays, one per column of the table and in their order.

    One statement for a whole batch saves a protocol message per row. A key must not stand in it twice.
    """
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    quote = dialect.identifier_preparer.quote
    update = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in _values(table))
    return (
        f"INSERT INTO {table.name} {_from_arrays(table)} "
        f"ON CONFLICT ({', '.join(map(quote, _keys(table)))}) DO UPDATE SET {update}"
    )


def sqlite_insert(table: Table) -> str:
    """Return an insert with `?` parameters that leaves rows alone whose key is there: they say the same."""
    statement = sqlite.insert(table).on_conflict_do_nothing()
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


def postgres_insert(table: Table) -> str:
    """Return the same for PostgreSQL, with one array per column as in `postgres_upsert`."""
    return f"INSERT INTO {table.name} {_from_arrays(table)} ON CONFLICT DO NOTHING"


def _from_arrays(table: Table) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    arrays = ", ".join(
        f"${number}::{column.type.compile(dialect).partition(' COLLATE')[0]}[]"
        for number, column in enumerate(table.columns, 1)
    )
    columns = ", ".join(dialect.identifier_preparer.quote(column.name) for column in table.columns)
    # Names from the tables' definition only; values travel as parameters.
    return f"({columns}) SELECT * FROM unnest({arrays})"  # noqa: S608 (as said above)


def _keys(table: Table) -> list[str]:
    return [column.name for column in table.primary_key]


def _values(table: Table) -> list[str]:
    return [column.name for column in table.columns if not column.primary_key]
