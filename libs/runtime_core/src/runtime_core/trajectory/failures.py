"""Where errors of the databases become errors of Weft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, SQLAlchemyError

from runtime_core.errors import StoreUnavailable


@contextmanager
def translated(consequence: str) -> Iterator[None]:
    """Turn what a database or its connection raises into StoreUnavailable: cause, then consequence."""
    try:
        yield
    except DBAPIError as error:
        raise StoreUnavailable(f"{_line(error.orig or error)}: {consequence}") from error
    except (SQLAlchemyError, InterfaceError, OSError) as error:
        raise StoreUnavailable(f"{_line(error)}: {consequence}") from error


def _line(error: BaseException) -> str:
    # The drivers append statement and parameters on further lines; these may hold users' data.
    return (str(error).splitlines() or [type(error).__name__])[0]
