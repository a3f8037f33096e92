"""Fixtures that all tests share: real servers and fresh namespaces."""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest
from hypothesis import settings

from tests.openai_server.driver import OpenAIServer
from tests.servers.containers import CONTAINERS, Containers
from tests.servers.matrix import (
    ALL,
    MATRIX,
    SELECTION,
    VALKEY_9,
    Servers,
    make_server,
    named_servers,
    repeat_on,
)
from tests.servers.process import Append, Server
from tests.servers.unavailable import Unavailable

ROOT = Path(__file__).resolve().parent.parent
KNOWN_SERVERS = (*MATRIX, *CONTAINERS)
UNIT = ROOT / "tests" / "unit"
COMMAND = "tests/integration/cli/"
"""Its files share one `weft up`, which takes seconds to start."""
TOGETHER = (COMMAND, "tests/architecture/")
"""Folders whose files run in one process. Those of the architecture share all parsed modules."""

# Their tests are inherited, so pytest does not see by their names that their assertions are to be explained.
pytest.register_assert_rewrite("tests.contracts.engine.promises")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background deaf to Ctrl-C, and our child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a deadline for each example: how busy a machine is decides no test. The same examples in every run, so that
# a change is judged by what it changed; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("weft", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000, derandomize=False)
if settings.get_current_profile_name() != "search":
    settings.load_profile("weft")


class OwnServer(Protocol):
    """Starts a server for one test."""

    def __call__(
        self, kind: str = VALKEY_9, *, append: Append | None = "everysec", options: Sequence[str] = ()
    ) -> Server: ...


@pytest.fixture(scope="session")
def server_cache() -> Path:
    """Where unpacked server programs are kept between test runs."""
    return Path(os.environ.get("WEFT_TEST_CACHE") or ROOT / ".cache") / "servers"


def pytest_configure(config: pytest.Config) -> None:
    # Here, and not where the first test asks for a server: each of several processes that run tests would find it.
    if unknown := (named_servers() or frozenset()).difference(KNOWN_SERVERS):
        known = ", ".join((ALL, *KNOWN_SERVERS))
        raise pytest.UsageError(f"{SELECTION}: unknown {', '.join(sorted(unknown))}; known are {known}")


# What pytest collects stays until the end: looking through a million objects again and again takes seconds.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first and unit tests last, so that all processes that run tests end together.

    The order within a file stays. --no-loadscope-reorder keeps this order of the files.
    """
    long = {item.path for item in items if item.get_closest_marker("slow") or item.nodeid.startswith(COMMAND)}
    items.sort(key=lambda item: (item.path not in long, UNIT in item.path.parents))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # Any: not every environment has xdist
    """With --dist=loadfile, keep the folders of `TOGETHER` in one process each, and other files, too."""
    if config.getvalue("dist") != "loadfile":
        return None
    scheduler = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    file_of = scheduler._split_scope
    scheduler._split_scope = lambda test: next(filter(test.startswith, TOGETHER), "") or file_of(test)
    return scheduler


@pytest.fixture(scope="session")
def wanted_servers() -> frozenset[str]:
    """Return the servers that tests may start: those that `WEFT_TEST_SERVERS` lists, or any."""
    return named_servers() or frozenset(KNOWN_SERVERS)


@pytest.fixture(scope="session")
def shared_server(
    server_cache: Path, wanted_servers: frozenset[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """Gives the shared server of a kind, as in `shared_server("redis-7.0")`; use `namespace` on it."""
    with Servers(server_cache, tmp_path_factory.mktemp("servers")) as servers:

        def get(kind: str) -> Server:
            skip_unless_wanted(kind, wanted_servers)
            try:
                return servers.get(kind)
            except Unavailable as reason:
                missing(kind, reason)

        yield get


@pytest.fixture(scope="session")
def container_url(wanted_servers: frozenset[str]) -> Iterator[Callable[[str], str]]:
    """Gives the URL of a shared server in a container, as `container_url("docker-redis-7.2")`; use `namespace`."""
    with Containers() as containers:

        def get(kind: str) -> str:
            skip_unless_wanted(kind, wanted_servers)
            try:
                return containers.get(kind)
            except Unavailable as reason:
                # Also in CI: whether it has Docker, and reaches a registry, is not of this repository.
                pytest.skip(f"NOT TESTED in containers: {reason}")

        yield get


@pytest.fixture(scope="session")
def valkey(shared_server: Callable[[str], Server]) -> Server:
    """The shared Valkey 9, for tests that do not change it."""
    return shared_server(VALKEY_9)


@pytest.fixture(params=repeat_on(*MATRIX))
def any_server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    """Each selected server of the matrix in turn, shared: use `namespace`, change no settings, kill nothing."""
    kind: str = request.param
    return shared_server(kind)


@pytest.fixture
def own_server(server_cache: Path, wanted_servers: frozenset[str], tmp_path: Path) -> Iterator[OwnServer]:
    """Starts servers for this test alone, as in `own_server("redis-7.0", append="always")`."""
    with ExitStack() as stack:
        count = 0

        def start(kind: str = VALKEY_9, *, append: Append | None = "everysec", options: Sequence[str] = ()) -> Server:
            nonlocal count
            skip_unless_wanted(kind, wanted_servers)
            count += 1
            directory = tmp_path / f"server-{count}"
            try:
                server = make_server(kind, server_cache, directory, append=append, options=options)
            except Unavailable as reason:
                missing(kind, reason)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def own_valkey(own_server: OwnServer) -> Server:
    """A Valkey 9 for this test alone, which may kill, pause and restart it."""
    return own_server()


@pytest.fixture
def openai_server(tmp_path: Path) -> Iterator[OpenAIServer]:
    """A server with OpenAI's APIs, for this test alone: give it a script before its first request."""
    with OpenAIServer(tmp_path / "openai") as server:
        yield server


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses, so that a shared server needs no flush."""
    return f"w{secrets.token_hex(4)}"


@pytest.fixture
def chaos_rounds() -> int:
    """How often a chaos test repeats its scenario: few times by default, `WEFT_CHAOS_ROUNDS` times in a hunt."""
    return int(os.environ.get("WEFT_CHAOS_ROUNDS") or 2)


@pytest.fixture
def chaos_seed() -> int:
    """The seed of a chaos test, printed so that a failure can be repeated with `WEFT_CHAOS_SEED`."""
    seed = int(os.environ.get("WEFT_CHAOS_SEED") or secrets.randbits(32))
    print(f"WEFT_CHAOS_SEED={seed}")
    return seed


def skip_unless_wanted(kind: str, wanted: frozenset[str]) -> None:
    if kind not in wanted:
        pytest.skip(f"{kind} is not among WEFT_TEST_SERVERS")


def missing(kind: str, reason: Unavailable) -> NoReturn:
    """Skip on a laptop, with a visible line. Fail in CI, where a skip would hide a gap."""
    message = f"NOT TESTED on {kind}: {reason}"
    if os.environ.get("CI"):
        pytest.fail(f"{message} (the variable CI is set, so this is a failure)")
    pytest.skip(message)
