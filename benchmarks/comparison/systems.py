"""The systems that Weft is compared with: their programs and settings."""

from __future__ import annotations

from dataclasses import dataclass, field

DRIVERS = "benchmarks.comparison.drivers."


@dataclass(frozen=True, slots=True)
class System:
    """One system. Commands are run in its environment: the first word is a program of its `bin`."""

    name: str
    lock: str
    """The file in `requirements/`, without `.txt`."""
    driver: tuple[str, ...]
    keeps: str
    """The data of a task that survives a crash of all its processes."""
    tasks: int
    """The tasks of one round, which take about ten seconds."""
    workers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name → command of each further process."""
    settings: str = ""
    """What differs from the system's defaults; each was chosen since it is faster, or as safe as Weft's defaults."""
    broker: bool = False
    """It needs a Valkey, which has the same settings as Weft's."""
    listens: str = ""
    """The worker that opens the address which `{address}` stands for; the others start after it."""
    restate: bool = False
    """It needs a Restate server."""


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return ("python", "-m", DRIVERS + module, *arguments)


def _taskiq(queue: str) -> tuple[str, ...]:
    return (
        *("taskiq", "worker", f"{DRIVERS}on_taskiq:{queue}", "--workers", "1"),
        *("--max-async-tasks", "200", "--log-level", "ERROR"),
    )


def _celery(queue: str) -> tuple[str, ...]:
    return (
        *("celery", "--app", f"{DRIVERS}on_celery", "--quiet", "worker", "--loglevel", "ERROR"),
        *("--pool", "threads", "--concurrency", "4", "--queues", queue, "--hostname", f"{queue}@%h"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    )


AUTOGEN = System(
    "AutoGen, in memory",
    "autogen",
    _python("on_autogen", "uvloop"),
    keeps="nothing",
    tasks=12_000,
    settings="uvloop",
)

SYSTEMS = (
    AUTOGEN,
    System(
        "AutoGen, gRPC",
        "autogen",
        _python("on_autogen_grpc"),
        keeps="nothing",
        tasks=2_000,
        workers={name: _python("on_autogen_grpc", name) for name in ("host", "look_up", "asker")},
        listens="host",
    ),
    System(
        "FastStream, Redis Streams",
        "faststream",
        _python("on_faststream"),
        keeps="each event, no state of the task",
        tasks=3_000,
        workers={"agent": _python("on_faststream", "agent"), "tool": _python("on_faststream", "tool")},
        settings="uvloop, reads of 50 entries",
        broker=True,
    ),
    System(
        "taskiq, Redis Streams",
        "taskiq",
        _python("on_taskiq"),
        keeps="each task; a waiting one starts over",
        tasks=3_000,
        workers={"agent": _taskiq("agents"), "tool": _taskiq("tools")},
        settings="uvloop, polls for results every 5 ms",
        broker=True,
    ),
    System(
        "Celery, Redis",
        "celery",
        _python("on_celery"),
        keeps="each task of the chain",
        tasks=2_000,
        workers={"agent": _celery("agents"), "tool": _celery("tools")},
        settings="4 threads per worker, prefetch 16, late acknowledgement, no gossip",
        broker=True,
    ),
    System(
        "LangGraph, in memory",
        "langgraph",
        _python("on_langgraph", "memory"),
        keeps="nothing",
        tasks=3_000,
        settings="uvloop",
    ),
    System(
        "LangGraph, SQLite",
        "langgraph",
        _python("on_langgraph", "sqlite"),
        keeps="each step",
        tasks=1_000,
        settings="uvloop, AsyncSqliteSaver",
    ),
    System("DBOS, SQLite", "dbos", _python("on_dbos"), keeps="each step", tasks=500),
    System(
        "Restate",
        "restate",
        _python("on_restate"),
        keeps="each step",
        tasks=1_000,
        workers={
            "worker": ("hypercorn", "--worker-class", "uvloop", "--bind", "{address}", f"{DRIVERS}on_restate:app"),
        },
        settings="one server, uvloop, HTTP/2 to the worker",
        listens="worker",
        restate=True,
    ),
)
