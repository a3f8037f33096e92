"""The settings of a Weft process: read from the environment once, validated, and named in errors."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime_core.blobs.urls import blob_url
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.config.values import SettingValues, refuse_unknown
from runtime_core.errors import ConfigurationError

PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
HOST = r"([^\s/:@\[\]]+|\[[0-9a-fA-F:.]+\])"
REDIS_URL = re.compile(r"(redis|rediss|valkey|valkeys)(\+[a-z]+)?://.+|unix://.+|memory://.*")
TRAJECTORY_URL = re.compile(r"sqlite(\+\w+)?:///.+|postgres(ql)?(\+\w+)?://.+")
RAY_ADDRESS = re.compile(rf"auto|{HOST}:{PORT}", re.ASCII)
RAY_JOBS_URL = re.compile(rf"https?://([^\s/@]+@)?{HOST}(:{PORT})?(/\S*)?", re.ASCII)
SPARK_REMOTE = re.compile(rf"sc://{HOST}(:{PORT})?(/\S*)?", re.ASCII)
SPARK_LOCAL_MASTER = re.compile(r"local(\[(\*|[1-9]\d{0,3})(, ?[1-9]\d{0,3})?\])?", re.ASCII)

LEAST_DEAD_BYTES = 4 * 1024**2
"""The largest dead letter fits."""
LEAST_RAY_STORE_BYTES = 80 * 1024**2
"""Ray refuses less."""
LEAST_SPARK_MEMORY_BYTES = 512 * 1024**2
"""With less a JVM of Spark ends at its start."""

DURABILITIES = ("fast", "fsync", "quorum")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class Settings:
    """The settings of a process. The variable of a field is `WEFT_` and the field's name in capitals.

    An empty variable counts as unset.
    """

    data_dir: Path
    """Absolute. It may not exist yet: see `make_data_dir`. Default: `.weft` in the working directory."""
    trajectory_url: str
    """`sqlite:///path` or `postgresql://…`. Default: a SQLite file in `data_dir`."""
    redis_url: str | None = None
    """None: no broker was named (`weft up` starts a private one)."""
    operator_redis_url: str | None = None
    """The broker with the user of `weft` commands, if the service's own user has fewer rights."""
    namespace: str = "weft"
    partitions: int = 1
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """None: no metrics and health over HTTP. 0: a free port, which is logged."""
    lease_seconds: float = 3.0
    """How long an owner may be silent before others adopt its deliveries."""
    retention_seconds: float = 3600.0
    """How long a finished task stays on the broker."""
    dedupe_max: int = 1_000_000
    """How many submits are remembered to recognize a repeated one."""
    mailbox_max: int = 10_000
    """How many events may wait for one agent instance."""
    stream_max: int = 100_000
    """How much open work a work stream may hold before submits are answered with `overloaded`."""
    output_max_bytes: int = 16_777_216
    """How much one task may write to its output: deltas, chunks of answers and progress."""
    ready_max: int = 128
    """How many unread entries a work stream may hold before new tasks wait for their tenants' turns."""
    record_max: int = 200_000
    """How many entries of the record may wait for the recorder before submits are answered with `overloaded`."""
    dead_max_bytes: int = 67_108_864
    """How many bytes the dead letters of a partition may have before the oldest of the largest share are trimmed."""
    dead_retention_seconds: float = 2_592_000.0
    """How long a dead letter is kept."""
    request_timeout_seconds: float = 3600.0
    """How long a request to an agent in another partition may take, unless it has its own limit."""
    pools: tuple[str, ...] = ()
    """Named pools that this process serves, in the order given."""
    durability: str = "fast"
    """`fast`, `fsync` or `quorum`."""
    app: str | None = None
    """`package.module:app`."""
    instance: str | None = None
    """The name of this process in logs, if several processes of one service run side by side."""
    log_level: str = "info"
    log_format: str = "text"
    engine_processes: int = 0
    """How many worker processes run `ctx.engine("local")`; 0: threads of the agent-handler do."""
    engine_in_flight: int = 0
    """How many steps a gateway runs on its engine concurrently; 0: a default for the engine."""
    ray_address: str | None = None
    """`auto` or `host:port` of a Ray cluster. None: the ray-gateway starts a local Ray."""
    ray_local_cpus: int | None = None
    """The processors that a local Ray offers. None: all of the machine."""
    ray_local_store_bytes: int = 536_870_912
    """The object store of a local Ray."""
    ray_dashboard: bool = False
    """Whether a local Ray has a dashboard, which batch jobs need."""
    ray_jobs_url: str | None = None
    """The URL of Ray's Jobs API. None: the cluster's dashboard."""
    spark_remote: str | None = None
    """`sc://…` of a Spark Connect server. None: the spark-gateway starts a local one."""
    spark_local_master: str = "local[*]"
    """How many tasks a local Spark runs concurrently, as in `local[4]`."""
    spark_local_memory: str = "512m"
    """The heap of a local Spark's JVM, in the JVM's notation."""
    blob_url: str | None = None
    """`file:///folder`, `s3://bucket/…`: the store for large results. Default: `blobs` in a `data_dir` that was named;
    otherwise None."""
    blob_retention_seconds: float = 604_800.0
    """How long a large result is kept after it was written."""
    result_inline_bytes: int = 262_144
    """The largest result of an engine function that is passed by value, if there is a blob store."""
    result_max_bytes: int = 1_073_741_824
    """The largest result of an engine function."""
    shutdown_seconds: float = 20.0
    """How long a process may take to finish its deliveries after SIGTERM."""
    redact: str | None = None
    """Regular expressions, separated by white space, for text to keep out of the record, errors and logs."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Reads and checks every variable.

        Raises ConfigurationError: one line with the variable, its value and what is allowed; also for a variable
        that begins with `WEFT_` and is no setting.
        """
        refuse_unknown(environ, [field.name for field in dataclasses.fields(cls)])
        read = SettingValues(environ)
        data_dir = read.path("WEFT_DATA_DIR", ".weft")
        return cls(
            data_dir=data_dir,
            trajectory_url=read.matching(
                "WEFT_TRAJECTORY_URL",
                TRAJECTORY_URL,
                "sqlite:///path or postgresql://<user>:<password>@host/name",
            )
            or f"sqlite:///{data_dir / 'trajectory.db'}",
            redis_url=read.matching(
                "WEFT_REDIS_URL", REDIS_URL, "redis://host:port, rediss://…, unix:///path or memory://"
            ),
            operator_redis_url=read.matching(
                "WEFT_OPERATOR_REDIS_URL", REDIS_URL, "redis://<user>:<password>@host:port or rediss://…"
            ),
            namespace=read.name("WEFT_NAMESPACE") or cls.namespace,
            partitions=read.whole("WEFT_PARTITIONS", 1, 1024, cls.partitions),
            metrics_host=read.text("WEFT_METRICS_HOST") or cls.metrics_host,
            metrics_port=read.port("WEFT_METRICS_PORT"),
            lease_seconds=read.seconds("WEFT_LEASE_SECONDS", 0.1, 3600.0, cls.lease_seconds),
            retention_seconds=read.seconds("WEFT_RETENTION_SECONDS", 0.0, 31_536_000.0, cls.retention_seconds),
            dedupe_max=read.whole("WEFT_DEDUPE_MAX", 1, 1_000_000_000, cls.dedupe_max),
            mailbox_max=read.whole("WEFT_MAILBOX_MAX", 1, 10_000_000, cls.mailbox_max),
            stream_max=read.whole("WEFT_STREAM_MAX", 1, 1_000_000_000, cls.stream_max),
            output_max_bytes=read.whole(
                "WEFT_OUTPUT_MAX_BYTES", MAX_DATA_BYTES, 1_099_511_627_776, cls.output_max_bytes
            ),
            ready_max=read.whole("WEFT_READY_MAX", 1, 1_000_000_000, cls.ready_max),
            record_max=read.whole("WEFT_RECORD_MAX", 1, 1_000_000_000, cls.record_max),
            dead_max_bytes=read.whole("WEFT_DEAD_MAX_BYTES", LEAST_DEAD_BYTES, 1_099_511_627_776, cls.dead_max_bytes),
            dead_retention_seconds=read.seconds(
                "WEFT_DEAD_RETENTION_SECONDS", 60.0, 3_153_600_000.0, cls.dead_retention_seconds
            ),
            request_timeout_seconds=read.seconds(
                "WEFT_REQUEST_TIMEOUT_SECONDS", 0.001, 31_536_000.0, cls.request_timeout_seconds
            ),
            pools=read.names("WEFT_POOLS"),
            durability=read.choice("WEFT_DURABILITY", DURABILITIES, cls.durability),
            app=read.text("WEFT_APP"),
            instance=read.name("WEFT_INSTANCE"),
            log_level=read.choice("WEFT_LOG_LEVEL", LOG_LEVELS, cls.log_level),
            log_format=read.choice("WEFT_LOG_FORMAT", LOG_FORMATS, cls.log_format),
            engine_processes=read.whole("WEFT_ENGINE_PROCESSES", 0, 1024, cls.engine_processes),
            engine_in_flight=read.whole("WEFT_ENGINE_IN_FLIGHT", 0, 100_000, cls.engine_in_flight),
            ray_address=read.matching(
                "WEFT_RAY_ADDRESS",
                RAY_ADDRESS,
                "auto, or host:port of the cluster's head (Ray Client, ray://, is not used)",
            ),
            ray_local_cpus=read.whole("WEFT_RAY_LOCAL_CPUS", 1, 10_000, cls.ray_local_cpus),
            ray_local_store_bytes=read.whole(
                "WEFT_RAY_LOCAL_STORE_BYTES", LEAST_RAY_STORE_BYTES, 1_125_899_906_842_624, cls.ray_local_store_bytes
            ),
            ray_dashboard=read.flag("WEFT_RAY_DASHBOARD"),
            ray_jobs_url=read.matching("WEFT_RAY_JOBS_URL", RAY_JOBS_URL, "as http://ray-head:8265"),
            spark_remote=read.matching("WEFT_SPARK_REMOTE", SPARK_REMOTE, "sc://host:port of a Spark Connect server"),
            spark_local_master=read.matching(
                "WEFT_SPARK_LOCAL_MASTER", SPARK_LOCAL_MASTER, "local[4] for 4 tasks at once, or local[*]"
            )
            or cls.spark_local_master,
            spark_local_memory=read.heap("WEFT_SPARK_LOCAL_MEMORY", LEAST_SPARK_MEMORY_BYTES, cls.spark_local_memory),
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
        """The variables that give a child process these same settings, without those that are None."""
        variables = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = ",".join(value) or None
            elif isinstance(value, bool):
                value = int(value)
            if value is not None:
                variables[f"WEFT_{field.name.upper()}"] = str(value)
        return variables

    def make_data_dir(self) -> Path:
        """Create the data folder if it is missing, and return it.

        Only processes that store data call this: a handler must start even if nothing can be written. Raises
        ConfigurationError if it is not a folder that this user can write.
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
