"""The settings of a Weft process: read from the environment once, validated, and named in errors."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.redaction import patterns_of
from runtime_core.wire.blobs import blob_url
from runtime_core.wire.codec import MAX_DATA_BYTES

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
_HOST = r"([^\s/:@\[\]]+|\[[0-9a-fA-F:.]+\])"
REDIS_URL = re.compile(r"(redis|rediss|valkey|valkeys)(\+[a-z]+)?://.+|unix://.+|memory://.*")
TRAJECTORY_URL = re.compile(r"sqlite(\+\w+)?:///.+|postgres(ql)?(\+\w+)?://.+")
RAY_ADDRESS = re.compile(rf"auto|{_HOST}:{_PORT}", re.ASCII)
RAY_JOBS_URL = re.compile(rf"https?://([^\s/@]+@)?{_HOST}(:{_PORT})?(/\S*)?", re.ASCII)
SAFE_URL = re.compile(r"https://[^\s/?#@]+[^\s?#]*|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/[^\s?#]*)?")
"""A URL whose answer nobody on the way can change."""
LINK = re.compile(r"https?://[^\s/?#]+/\S*\{(task|trace)_id\}\S*")
ORIGIN = re.compile(rf"https?://{_HOST}(:{_PORT})?", re.ASCII)
SPARK_REMOTE = re.compile(rf"sc://{_HOST}(:{_PORT})?(/\S*)?", re.ASCII)
SPARK_LOCAL_MASTER = re.compile(r"local(\[(\*|[1-9]\d{0,3})(, ?[1-9]\d{0,3})?\])?", re.ASCII)

LEAST_DEAD_BYTES = 4 * 1024**2
"""The largest dead letter fits."""
LEAST_ANSWER_BYTES = 4 * 1024**2
"""The largest answer fits."""
LEAST_RAY_STORE_BYTES = 80 * 1024**2
"""Ray's minimum."""
LEAST_SPARK_MEMORY_BYTES = 512 * 1024**2
"""With less, Spark's JVM exits at its start."""

SETTING_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PASSWORD_IN_URL = re.compile(r"(?<=://)([^:/@]*):.*@")
PASSWORD_IN_OPTION = re.compile(r"(?<=password=)[^&]*")
HEAP_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

VARIABLE_PREFIX = "WEFT_"
FOREIGN_PREFIXES = ("WEFT_APP_", "WEFT_TEST_", "WEFT_CHAOS_", "WEFT_SIMULATION_", "WEFT_NIGHTLY_")
"""Prefixes that Weft never reads: `WEFT_APP_…` is for the user's app, the others for the tests of this repository."""
KUBERNETES_VARIABLE = re.compile(
    r"WEFT(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""Variables that Kubernetes sets in a container for a Service called `weft` or `weft-…`."""

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
    """None: no broker is configured (`weft up` starts a private one)."""
    operator_redis_url: str | None = None
    """The broker with the user of `weft` commands, if the service's own user has fewer rights."""
    namespace: str = "weft"
    partitions: int = 1
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """None: no metrics and health over HTTP. 0: a free port, which is logged."""
    http_host: str = "127.0.0.1"
    """Where the gateway listens."""
    http_port: int | None = None
    """None: 8080. 0: a free port, which is logged."""
    http_auth: str = "open"
    """`open`: on this machine only, where everyone may do everything. `keys`: callers need an API key."""
    http_origins: tuple[str, ...] = ()
    """Web origins, as `https://desk.example`, whose pages may call the gateway; empty: none."""
    http_oidc_issuer: str | None = None
    """The identity provider (`https://…`) whose tokens callers may send instead of keys."""
    http_oidc_audience: str | None = None
    """What its tokens for this gateway have as `aud`."""
    http_oidc_tenant_claim: str = "tenant"
    """The claim that binds a token to a tenant; `*` in it: to none."""
    http_oidc_roles_claim: str = "roles"
    """The claim with a token's roles: a list, or words."""
    http_oidc_client_id: str | None = None
    """The identity provider's name for the console: with it, people log in there. None: by API key only."""
    http_oidc_client_secret: str | None = None
    """The password of that client, if the provider gave one."""
    http_trace_url: str | None = None
    """Where a task's trace is, with `{trace_id}` in it; the console links to it."""
    http_log_url: str | None = None
    """Where a task's logs are, with `{task_id}` or `{trace_id}` in it; the console links to it."""
    http_rate: float = 0.0
    """Requests per second that one caller of the gateway may send; 0: no limit."""
    http_streams_max: int = 1000
    """How many streams of events one gateway serves at once."""
    http_caller_streams_percent: int = 50
    """How many of those that others leave one caller may have: all keys of a tenant together, a key without one, or an
    address.
    """
    lease_seconds: float = 3.0
    """How long an owner may be silent before others reclaim its deliveries."""
    loop_block_seconds: float = 10.0
    """How long code of an agent or a tool may block the event loop before it is interrupted."""
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
    output_run_bytes: int = 1_048_576
    """How much output of one run may be on its way to the broker before `ctx.emit` waits."""
    output_process_bytes: int = 33_554_432
    """The same for all runs of a process."""
    ready_max: int = 128
    """How many unread entries a work stream may hold before new tasks wait for their tenants' turns."""
    record_max: int = 200_000
    """How many entries of the record may wait for the recorder before submits are answered with `overloaded`."""
    dead_max_bytes: int = 67_108_864
    """How many bytes the dead letters of a partition may have before the oldest of the largest share are trimmed."""
    dead_retention_seconds: float = 2_592_000.0
    """How long a dead letter is kept."""
    answers_max_bytes: int = 67_108_864
    """How many bytes of answers a partition keeps for one registered publisher."""
    answers_retention_seconds: float = 604_800.0
    """How long they are kept if the publisher does not delete them."""
    tenant_schedules_max: int = 10_000
    """How many schedules the registered publishers of one tenant may have."""
    tenant_schedules_max_bytes: int = 16_777_216
    """How many bytes these schedules may take together."""
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
    """`file:///folder`, `s3://bucket/…`: the store for large results. Default: `blobs` in `data_dir`, if that is set;
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
        """Read and check every variable.

        Raises ConfigurationError: one line with the variable, its value and what is allowed; also for an unknown
        variable that begins with `WEFT_`.
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
            http_host=read.text("WEFT_HTTP_HOST") or cls.http_host,
            http_port=read.port("WEFT_HTTP_PORT"),
            http_auth=read.choice("WEFT_HTTP_AUTH", ("open", "keys"), cls.http_auth),
            http_origins=read.origins("WEFT_HTTP_ORIGINS"),
            http_oidc_issuer=read.matching("WEFT_HTTP_OIDC_ISSUER", SAFE_URL, "https://host/path"),
            http_oidc_audience=read.text("WEFT_HTTP_OIDC_AUDIENCE"),
            http_oidc_tenant_claim=read.text("WEFT_HTTP_OIDC_TENANT_CLAIM") or cls.http_oidc_tenant_claim,
            http_oidc_roles_claim=read.text("WEFT_HTTP_OIDC_ROLES_CLAIM") or cls.http_oidc_roles_claim,
            http_oidc_client_id=read.text("WEFT_HTTP_OIDC_CLIENT_ID"),
            http_oidc_client_secret=read.text("WEFT_HTTP_OIDC_CLIENT_SECRET"),
            http_trace_url=read.matching("WEFT_HTTP_TRACE_URL", LINK, "http(s)://host/…{trace_id}"),
            http_log_url=read.matching("WEFT_HTTP_LOG_URL", LINK, "http(s)://host/…{task_id}"),
            http_rate=read.seconds("WEFT_HTTP_RATE", 0.0, 1_000_000.0, cls.http_rate, "requests per second"),
            http_streams_max=read.whole("WEFT_HTTP_STREAMS_MAX", 1, 100_000, cls.http_streams_max),
            http_caller_streams_percent=read.whole(
                "WEFT_HTTP_CALLER_STREAMS_PERCENT", 1, 100, cls.http_caller_streams_percent
            ),
            lease_seconds=read.seconds("WEFT_LEASE_SECONDS", 0.1, 3600.0, cls.lease_seconds),
            loop_block_seconds=read.seconds("WEFT_LOOP_BLOCK_SECONDS", 0.1, 3600.0, cls.loop_block_seconds),
            retention_seconds=read.seconds("WEFT_RETENTION_SECONDS", 0.0, 31_536_000.0, cls.retention_seconds),
            dedupe_max=read.whole("WEFT_DEDUPE_MAX", 1, 1_000_000_000, cls.dedupe_max),
            mailbox_max=read.whole("WEFT_MAILBOX_MAX", 1, 10_000_000, cls.mailbox_max),
            stream_max=read.whole("WEFT_STREAM_MAX", 1, 1_000_000_000, cls.stream_max),
            output_max_bytes=read.whole(
                "WEFT_OUTPUT_MAX_BYTES", MAX_DATA_BYTES, 1_099_511_627_776, cls.output_max_bytes
            ),
            output_run_bytes=read.whole("WEFT_OUTPUT_RUN_BYTES", 1024, 1_073_741_824, cls.output_run_bytes),
            output_process_bytes=read.whole(
                "WEFT_OUTPUT_PROCESS_BYTES", 1024, 1_099_511_627_776, cls.output_process_bytes
            ),
            ready_max=read.whole("WEFT_READY_MAX", 1, 1_000_000_000, cls.ready_max),
            record_max=read.whole("WEFT_RECORD_MAX", 1, 1_000_000_000, cls.record_max),
            dead_max_bytes=read.whole("WEFT_DEAD_MAX_BYTES", LEAST_DEAD_BYTES, 1_099_511_627_776, cls.dead_max_bytes),
            dead_retention_seconds=read.seconds(
                "WEFT_DEAD_RETENTION_SECONDS", 60.0, 3_153_600_000.0, cls.dead_retention_seconds
            ),
            answers_max_bytes=read.whole(
                "WEFT_ANSWERS_MAX_BYTES", LEAST_ANSWER_BYTES, 1_099_511_627_776, cls.answers_max_bytes
            ),
            answers_retention_seconds=read.seconds(
                "WEFT_ANSWERS_RETENTION_SECONDS", 60.0, 3_153_600_000.0, cls.answers_retention_seconds
            ),
            tenant_schedules_max=read.whole("WEFT_TENANT_SCHEDULES_MAX", 1, 100_000, cls.tenant_schedules_max),
            tenant_schedules_max_bytes=read.whole(
                "WEFT_TENANT_SCHEDULES_MAX_BYTES", 1024, 1_099_511_627_776, cls.tenant_schedules_max_bytes
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
        """Return variables that give a child process the same settings, without those that are None."""
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
                f"WEFT_DATA_DIR={str(self.data_dir)!r}: cannot be created ({error.strerror});"
                " name a folder that can be written"
            ) from None
        if not os.access(self.data_dir, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"WEFT_DATA_DIR={str(self.data_dir)!r}: cannot be written by this user;"
                " change its rights or name another folder"
            )
        return self.data_dir


class SettingValues:
    """Reads and checks variables of one environment. Every method returns None or the default if it is not set.

    Raises ConfigurationError: one line with the variable, its value and what is allowed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, variable: str) -> str | None:
        """Return the value without surrounding white space. Refuses a value in quotes, which would be part of it."""
        text = self._environ.get(variable, "").strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
            # `docker run --env-file` keeps quotes. The error does not show the value, which may be a secret.
            raise ConfigurationError(f"{variable}: the quotes around its value are part of it: remove them")
        return text or None

    def path(self, variable: str, default: str) -> Path:
        """Return an absolute path, with `~` expanded."""
        text = self.text(variable) or default
        try:
            return Path(os.path.abspath(Path(text).expanduser()))
        except RuntimeError:
            raise wrong(variable, text, "a folder: this user has no home folder for the ~ in it") from None

    def name(self, variable: str) -> str | None:
        value = self.text(variable)
        if value is not None and not SETTING_NAME.fullmatch(value):
            raise wrong(variable, value, "1 to 64 letters, digits, `_` or `-`")
        return value

    def names(self, variable: str) -> tuple[str, ...]:
        what = "different names separated by commas (letters, digits, `_` or `-`)"
        values = self._separated(variable, SETTING_NAME, what)
        if len(set(values)) < len(values):
            raise wrong(variable, ",".join(values), what)
        return values

    def origins(self, variable: str) -> tuple[str, ...]:
        """Return web origins separated by commas."""
        what = "origins separated by commas, as in https://desk.example,http://localhost:3000"
        return self._separated(variable, ORIGIN, what)

    def _separated(self, variable: str, pattern: re.Pattern[str], what: str) -> tuple[str, ...]:
        """Return values separated by commas, each of which matches the pattern."""
        text = self.text(variable)
        if text is None:
            return ()
        values = tuple(value.strip() for value in text.split(","))
        if not all(pattern.fullmatch(value) for value in values):
            raise wrong(variable, text, what)
        return values

    def patterns(self, variable: str) -> str | None:
        """Return regular expressions separated by white space."""
        text = self.text(variable)
        patterns_of(text or "")
        return text

    @overload
    def whole(self, variable: str, low: int, high: int, default: int) -> int: ...
    @overload
    def whole(self, variable: str, low: int, high: int, default: None) -> int | None: ...
    def whole(self, variable: str, low: int, high: int, default: int | None) -> int | None:
        text = self.text(variable)
        if text is None:
            return default
        # isdecimal alone would take digits of other scripts, and int alone `1_000` and ` 1`.
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise wrong(variable, text, f"a whole number from {low} to {high}")
        return value

    def port(self, variable: str) -> int | None:
        return self.whole(variable, 0, 65535, None)

    def flag(self, variable: str) -> bool:
        return self.whole(variable, 0, 1, 0) == 1

    def heap(self, variable: str, least_bytes: int, default: str) -> str:
        """Return memory in the JVM's notation: `512m`, `2g`."""
        text = self.text(variable)
        if text is None:
            return default
        unit = HEAP_UNITS.get(text[-1].lower(), 0)
        if not (text.isascii() and text[:-1].isdecimal() and len(text) < 20) or int(text[:-1]) * unit < least_bytes:
            raise wrong(variable, text, f"{default} or more, as in {default} or 2g")
        return text

    def seconds(self, variable: str, low: float, high: float, default: float, unit: str = "seconds") -> float:
        text = self.text(variable)
        if text is None:
            return default
        try:
            # float alone would take digits of other scripts, and `1_000`.
            value = float(text) if text.isascii() and "_" not in text else -1.0
        except ValueError:
            value = -1.0
        if not low <= value <= high:  # NaN is refused here too
            raise wrong(variable, text, f"{unit} from {low:g} to {high:g}")
        return value

    def choice(self, variable: str, allowed: tuple[str, ...], default: str) -> str:
        text = self.text(variable)
        if text is None:
            return default
        if text.lower() not in allowed:
            raise wrong(variable, text, " or ".join(allowed))
        return text.lower()

    def matching(self, variable: str, pattern: re.Pattern[str], allowed: str) -> str | None:
        """Return a URL, or another value that matches a pattern. Errors show no password in it."""
        text = self.text(variable)
        if text is not None and not pattern.fullmatch(text):
            raise wrong(variable, without_password(text).partition(";")[0], allowed)  # a token may follow
        return text


def without_password(url: str) -> str:
    """Return the URL with `***` in place of each password."""
    return PASSWORD_IN_OPTION.sub("***", PASSWORD_IN_URL.sub(r"\1:***@", url))


def wrong(variable: str, value: str, allowed: str) -> ConfigurationError:
    """Return the error for a value that is not allowed."""
    shown = value if len(value) <= 80 else value[:80] + "…"
    return ConfigurationError(f"{variable}={shown!r}: must be {allowed}")


def refuse_unknown(environ: Mapping[str, str], fields: Collection[str]) -> None:
    """Raise ConfigurationError for an unknown non-empty variable that begins with `WEFT_`.

    `fields` are the names of the settings, as `lease_seconds` for `WEFT_LEASE_SECONDS`.
    """
    known = {f"{VARIABLE_PREFIX}{field.upper()}" for field in fields}
    for variable in sorted(environ):
        if not variable.startswith(VARIABLE_PREFIX) or variable in known or variable.startswith(FOREIGN_PREFIXES):
            continue
        if not environ[variable].strip():
            continue
        raise ConfigurationError(f"{variable}: {_remedy(variable, known)}")


def _remedy(variable: str, known: Collection[str]) -> str:
    if KUBERNETES_VARIABLE.fullmatch(variable):
        return "Kubernetes set it for a Service of that name: set enableServiceLinks: false in the pod"
    if "CORS" in variable:
        return "there is no such setting; did you mean WEFT_HTTP_ORIGINS?"
    near = difflib.get_close_matches(variable, sorted(known), n=1, cutoff=0.8)
    if near:
        return f"there is no such setting; did you mean {near[0]}?"
    return "there is no such setting: remove it; variables of your app may begin with WEFT_APP_"
