"""The settings of a Weft process: read from the environment once, checked, named when wrong."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime_core.blobs.store import blob_url
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.redaction import patterns_of
from runtime_core.unknown_settings import refuse_unknown

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
REDIS_URL = re.compile(r"(redis|rediss|valkey|valkeys)(\+[a-z]+)?://.+|unix://.+|memory://.*")
TRAJECTORY_URL = re.compile(r"sqlite(\+\w+)?:///.+|postgres(ql)?(\+\w+)?://.+")
RAY_ADDRESS = re.compile(r"auto|[^\s/:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
SPARK_REMOTE = re.compile(r"sc://[^\s/]+(/\S*)?")
PASSWORD = re.compile(r"(?<=://)([^:/@]*):.*@")

DURABILITIES = ("fast", "fsync", "quorum")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class Settings:
    """What a process was told. The variable of a field is `WEFT_` and the field's name in capitals.

    A variable that is set to nothing counts as not set.
    """

    data_dir: Path
    """Absolute. It may not exist yet: see `make_data_dir`. Default: `.weft` in the working directory."""
    trajectory_url: str
    """`sqlite:///path` or `postgresql://…`. Default: a SQLite file in `data_dir`."""
    redis_url: str | None = None
    """None: no broker was named (`weft up` starts one of its own)."""
    namespace: str = "weft"
    partitions: int = 1
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """None: no metrics and health over HTTP. 0: a free port, told in the log."""
    lease_seconds: float = 3.0
    """How long an owner may be silent before others adopt what it holds."""
    retention_seconds: float = 3600.0
    """How long a finished task stays on the broker."""
    dedupe_max: int = 1_000_000
    """How many submits are remembered to recognise a repeated one."""
    mailbox_max: int = 10_000
    """How many events may wait for one agent instance."""
    stream_max: int = 100_000
    """How much open work a work stream may hold before submits are answered with `overloaded`."""
    record_max: int = 200_000
    """How many entries of the record may wait for the recorder before submits are answered so."""
    pools: tuple[str, ...] = ()
    """Named pools that this process serves, in the order given."""
    durability: str = "fast"
    """`fast`, `fsync` or `quorum`."""
    app: str | None = None
    """`package.module:app`."""
    instance: str | None = None
    """How this process is called in logs, where several of one service run side by side."""
    log_level: str = "info"
    log_format: str = "text"
    engine_processes: int = 0
    """How many worker processes run `ctx.engine("local")`; 0: threads of the agent-handler do."""
    engine_in_flight: int = 0
    """How many steps a gateway runs on its engine at once; 0: as many as suit the engine."""
    ray_address: str | None = None
    """`auto` or `host:port` of a Ray cluster. None: the ray-gateway starts a local Ray."""
    spark_remote: str | None = None
    """`sc://…` of a Spark Connect server. None: the spark-gateway starts a local one."""
    blob_url: str | None = None
    """`file:///folder`, `s3://bucket/…`: where large results lie. Default: `blobs` in a `data_dir` that was named; None
    where none was."""
    blob_retention_seconds: float = 604_800.0
    """How long a large result is kept, counted from when it was written."""
    result_inline_bytes: int = 262_144
    """The largest result of an engine function that travels by value, where there is a blob store."""
    result_max_bytes: int = 1_073_741_824
    """The largest result of an engine function."""
    shutdown_seconds: float = 20.0
    """How long a process may take to finish what it holds after SIGTERM."""
    redact: str | None = None
    """Regular expressions, with white space between them, of what is to be kept out of the record, errors and logs."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Reads and checks every variable.

        Raises ConfigurationError: one line with the variable, its value and what is allowed; also for a variable
        that begins with `WEFT_` and is no setting.
        """
        refuse_unknown(environ, [field.name for field in dataclasses.fields(cls)])
        read = _Reader(environ)
        data_dir = Path(os.path.abspath(Path(read.text("WEFT_DATA_DIR") or ".weft").expanduser()))
        return cls(
            data_dir=data_dir,
            trajectory_url=read.url(
                "WEFT_TRAJECTORY_URL",
                TRAJECTORY_URL,
                "sqlite:///path or postgresql://<user>:<password>@host/name",
            )
            or f"sqlite:///{data_dir / 'trajectory.db'}",
            redis_url=read.url("WEFT_REDIS_URL", REDIS_URL, "redis://host:port, rediss://…, unix:///path or memory://"),
            namespace=read.name("WEFT_NAMESPACE") or cls.namespace,
            partitions=read.whole("WEFT_PARTITIONS", 1, 1024, cls.partitions),
            metrics_host=read.text("WEFT_METRICS_HOST") or cls.metrics_host,
            metrics_port=read.port("WEFT_METRICS_PORT"),
            lease_seconds=read.seconds("WEFT_LEASE_SECONDS", 0.1, 3600.0, cls.lease_seconds),
            retention_seconds=read.seconds("WEFT_RETENTION_SECONDS", 0.0, 31_536_000.0, cls.retention_seconds),
            dedupe_max=read.whole("WEFT_DEDUPE_MAX", 1, 1_000_000_000, cls.dedupe_max),
            mailbox_max=read.whole("WEFT_MAILBOX_MAX", 1, 10_000_000, cls.mailbox_max),
            stream_max=read.whole("WEFT_STREAM_MAX", 1, 1_000_000_000, cls.stream_max),
            record_max=read.whole("WEFT_RECORD_MAX", 1, 1_000_000_000, cls.record_max),
            pools=read.names("WEFT_POOLS"),
            durability=read.choice("WEFT_DURABILITY", DURABILITIES, cls.durability),
            app=read.text("WEFT_APP"),
            instance=read.name("WEFT_INSTANCE"),
            log_level=read.choice("WEFT_LOG_LEVEL", LOG_LEVELS, cls.log_level),
            log_format=read.choice("WEFT_LOG_FORMAT", LOG_FORMATS, cls.log_format),
            engine_processes=read.whole("WEFT_ENGINE_PROCESSES", 0, 1024, cls.engine_processes),
            engine_in_flight=read.whole("WEFT_ENGINE_IN_FLIGHT", 0, 100_000, cls.engine_in_flight),
            ray_address=read.url(
                "WEFT_RAY_ADDRESS",
                RAY_ADDRESS,
                "auto, or host:port of the cluster's head (Ray Client, ray://, is not used)",
            ),
            spark_remote=read.url("WEFT_SPARK_REMOTE", SPARK_REMOTE, "sc://host:port of a Spark Connect server"),
            blob_url=blob_url(environ) or None,
            blob_retention_seconds=read.seconds(
                "WEFT_BLOB_RETENTION_SECONDS", 60.0, 3_153_600_000.0, cls.blob_retention_seconds
            ),
            result_inline_bytes=read.whole("WEFT_RESULT_INLINE_BYTES", 1, MAX_DATA_BYTES, cls.result_inline_bytes),
            result_max_bytes=read.whole("WEFT_RESULT_MAX_BYTES", 1, 1_099_511_627_776, cls.result_max_bytes),
            shutdown_seconds=read.seconds("WEFT_SHUTDOWN_SECONDS", 0.0, 3600.0, cls.shutdown_seconds),
            redact=read.patterns("WEFT_REDACT"),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that give a child process these same settings; what is None is left out."""
        variables = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = ",".join(value) or None
            if value is not None:
                variables[f"WEFT_{field.name.upper()}"] = str(value)
        return variables

    def make_data_dir(self) -> Path:
        """Makes the data folder where it is missing, and returns it.

        Only who keeps data calls this: a handler must start where nothing can be written.
        Raises ConfigurationError where it is not a folder that this user can write.
        """
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigurationError(
                f"WEFT_DATA_DIR={str(self.data_dir)!r}: not a directory; name a folder that can be written"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"WEFT_DATA_DIR={str(self.data_dir)!r}: cannot be made ({error.strerror});"
                " name a folder that can be written"
            ) from None
        if not os.access(self.data_dir, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"WEFT_DATA_DIR={str(self.data_dir)!r}: cannot be written by this user;"
                " change its rights or name another folder"
            )
        return self.data_dir


def without_password(url: str) -> str:
    """The URL as it may be shown: the password is replaced by `***`."""
    return PASSWORD.sub(r"\1:***@", url)


class _Reader:
    """Reads single variables. Every method returns None or the default where the variable is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, variable: str) -> str | None:
        return self._environ.get(variable, "").strip() or None

    def name(self, variable: str) -> str | None:
        value = self.text(variable)
        if value is not None and not NAME.fullmatch(value):
            raise _wrong(variable, value, "1 to 64 letters, digits, `_` or `-`")
        return value

    def names(self, variable: str) -> tuple[str, ...]:
        text = self.text(variable)
        if text is None:
            return ()
        values = tuple(value.strip() for value in text.split(","))
        if not all(NAME.fullmatch(value) for value in values) or len(set(values)) < len(values):
            raise _wrong(variable, text, "different names with commas between them (letters, digits, `_` or `-`)")
        return values

    def patterns(self, variable: str) -> str | None:
        text = self.text(variable)
        patterns_of(text or "")
        return text

    def whole(self, variable: str, low: int, high: int, default: int) -> int:
        text = self.text(variable)
        if text is None:
            return default
        # isdecimal alone would take digits of other scripts, and int alone `1_000` and ` 1`.
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise _wrong(variable, text, f"a whole number from {low} to {high}")
        return value

    def port(self, variable: str) -> int | None:
        return None if self.text(variable) is None else self.whole(variable, 0, 65535, 0)

    def seconds(self, variable: str, low: float, high: float, default: float) -> float:
        text = self.text(variable)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not low <= value <= high:  # NaN is refused here too
            raise _wrong(variable, text, f"seconds from {low:g} to {high:g}")
        return value

    def choice(self, variable: str, allowed: tuple[str, ...], default: str) -> str:
        text = self.text(variable)
        if text is None:
            return default
        if text.lower() not in allowed:
            raise _wrong(variable, text, " or ".join(allowed))
        return text.lower()

    def url(self, variable: str, pattern: re.Pattern[str], allowed: str) -> str | None:
        text = self.text(variable)
        if text is not None and not pattern.fullmatch(text):
            raise _wrong(variable, without_password(text), allowed)
        return text


def _wrong(variable: str, value: str, allowed: str) -> ConfigurationError:
    shown = value if len(value) <= 80 else value[:80] + "…"
    return ConfigurationError(f"{variable}={shown!r}: must be {allowed}")
