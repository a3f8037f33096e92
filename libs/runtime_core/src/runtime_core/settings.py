"""The settings of a Weft process: read from the environment once, validated, and named in errors."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


Value = TypeVar("Value")
Read = Callable[[str, str], Value]
"""Checks the name of a variable and its text, and returns its value.

Raises ConfigurationError: one line with the variable, its value and what is allowed.
"""


def _stripped(variable: str, environ: Mapping[str, str]) -> str | None:
    """Return the text without surrounding white space. Refuses text in quotes, which would be part of it."""
    text = environ.get(variable, "").strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
        # `docker run --env-file` keeps quotes. The error does not show the value, which may be a secret.
        raise ConfigurationError(f"{variable}: the quotes around its value are part of it: remove them")
    return text or None


def _text(variable: str, text: str) -> str:
    return text


def _path(variable: str, text: str) -> Path:
    """Return an absolute path, with `~` expanded."""
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise wrong(variable, text, "a folder: this user has no home folder for the ~ in it") from None


def _name(variable: str, text: str) -> str:
    if not SETTING_NAME.fullmatch(text):
        raise wrong(variable, text, "1 to 64 letters, digits, `_` or `-`")
    return text


def _names(variable: str, text: str) -> tuple[str, ...]:
    what = "different names separated by commas (letters, digits, `_` or `-`)"
    values = _separated(variable, text, SETTING_NAME, what)
    if len(set(values)) < len(values):
        raise wrong(variable, ",".join(values), what)
    return values


def _origins(variable: str, text: str) -> tuple[str, ...]:
    what = "origins separated by commas, as in https://desk.example,http://localhost:3000"
    return _separated(variable, text, ORIGIN, what)


def _separated(variable: str, text: str, pattern: re.Pattern[str], what: str) -> tuple[str, ...]:
    """Return values separated by commas, each of which matches the pattern."""
    values = tuple(value.strip() for value in text.split(","))
    if not all(pattern.fullmatch(value) for value in values):
        raise wrong(variable, text, what)
    return values


def _patterns(variable: str, text: str) -> str:
    """Return regular expressions separated by white space."""
    patterns_of(text)
    return text


def _whole(low: int, high: int) -> Read[int]:
    def read(variable: str, text: str) -> int:
        # isdecimal alone would take digits of other scripts, and int alone `1_000` and ` 1`.
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise wrong(variable, text, f"a whole number from {low} to {high}")
        return value

    return read


def _flag(variable: str, text: str) -> bool:
    return _whole(0, 1)(variable, text) == 1


def _heap(variable: str, text: str) -> str:
    """Return memory in the JVM's notation: `512m`, `2g`."""
    unit, number = HEAP_UNITS.get(text[-1].lower(), 0), text[:-1]
    if not (text.isascii() and number.isdecimal() and len(text) < 20) or int(number) * unit < LEAST_SPARK_MEMORY_BYTES:
        raise wrong(variable, text, "512m or more, as in 512m or 2g")
    return text


def _number(low: float, high: float, unit: str = "seconds") -> Read[float]:
    def read(variable: str, text: str) -> float:
        try:
            # float alone would take digits of other scripts, and `1_000`.
            value = float(text) if text.isascii() and "_" not in text else -1.0
        except ValueError:
            value = -1.0
        if not low <= value <= high:  # NaN is refused here too
            raise wrong(variable, text, f"{unit} from {low:g} to {high:g}")
        return value

    return read


def _choice(*allowed: str) -> Read[str]:
    def read(variable: str, text: str) -> str:
        if text.lower() not in allowed:
            raise wrong(variable, text, " or ".join(allowed))
        return text.lower()

    return read


def _matching(pattern: re.Pattern[str], allowed: str) -> Read[str]:
    """Take a URL, or another value that matches a pattern. Errors show no password in it."""

    def read(variable: str, text: str) -> str:
        if not pattern.fullmatch(text):
            raise wrong(variable, without_password(text).partition(";")[0], allowed)  # a token may follow
        return text

    return read


def _setting(default: Value, read: Read[Any]) -> Value:  # Any: the type of a value that is not None
    """Return a field of Settings with its default, and what reads its variable."""
    return dataclasses.field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class Settings:
    """The settings of a process. The variable of a field is `WEFT_` and the field's name in capitals.

    An empty variable counts as unset.
    """

    data_dir: Path = dataclasses.field(metadata={"read": _text})
    """Absolute. It may not exist yet: see `make_data_dir`. Default: `.weft` in the working directory."""
    trajectory_url: str = dataclasses.field(
        metadata={"read": _matching(TRAJECTORY_URL, "sqlite:///path or postgresql://<user>:<password>@host/name")}
    )
    """`sqlite:///path` or `postgresql://…`. Default: a SQLite file in `data_dir`."""
    redis_url: str | None = _setting(
        None, _matching(REDIS_URL, "redis://host:port, rediss://…, unix:///path or memory://")
    )
    """None: no broker is configured (`weft up` starts a private one)."""
    operator_redis_url: str | None = _setting(
        None, _matching(REDIS_URL, "redis://<user>:<password>@host:port or rediss://…")
    )
    """The broker with the user of `weft` commands, if the service's own user has fewer rights."""
    namespace: str = _setting("weft", _name)
    partitions: int = _setting(1, _whole(1, 1024))
    metrics_host: str = _setting("127.0.0.1", _text)
    metrics_port: int | None = _setting(None, _whole(0, 65535))
    """None: no metrics and health over HTTP. 0: a free port, which is logged."""
    http_host: str = _setting("127.0.0.1", _text)
    """Where the gateway listens."""
    http_port: int | None = _setting(None, _whole(0, 65535))
    """None: 8080. 0: a free port, which is logged."""
    http_auth: str = _setting("open", _choice("open", "keys"))
    """`open`: on this machine only, where everyone may do everything. `keys`: callers need an API key."""
    http_origins: tuple[str, ...] = _setting((), _origins)
    """Web origins, as `https://desk.example`, whose pages may call the gateway; empty: none."""
    http_oidc_issuer: str | None = _setting(None, _matching(SAFE_URL, "https://host/path"))
    """The identity provider (`https://…`) whose tokens callers may send instead of keys."""
    http_oidc_audience: str | None = _setting(None, _text)
    """What its tokens for this gateway have as `aud`."""
    http_oidc_tenant_claim: str = _setting("tenant", _text)
    """The claim that binds a token to a tenant; `*` in it: to none."""
    http_oidc_roles_claim: str = _setting("roles", _text)
    """The claim with a token's roles: a list, or words."""
    http_oidc_client_id: str | None = _setting(None, _text)
    """The identity provider's name for the console: with it, people log in there. None: by API key only."""
    http_oidc_client_secret: str | None = _setting(None, _text)
    """The password of that client, if the provider gave one."""
    http_trace_url: str | None = _setting(None, _matching(LINK, "http(s)://host/…{trace_id}"))
    """Where a task's trace is, with `{trace_id}` in it; the console links to it."""
    http_log_url: str | None = _setting(None, _matching(LINK, "http(s)://host/…{task_id}"))
    """Where a task's logs are, with `{task_id}` or `{trace_id}` in it; the console links to it."""
    http_rate: float = _setting(0.0, _number(0.0, 1_000_000.0, "requests per second"))
    """Requests per second that one caller of the gateway may send; 0: no limit."""
    http_streams_max: int = _setting(1000, _whole(1, 100_000))
    """How many streams of events one gateway serves at once."""
    http_caller_streams_percent: int = _setting(50, _whole(1, 100))
    """How many of those that others leave one caller may have: all keys of a tenant together, a key without one, or an
    address.
    """
    lease_seconds: float = _setting(3.0, _number(0.1, 3600.0))
    """How long an owner may be silent before others reclaim its deliveries."""
    loop_block_seconds: float = _setting(10.0, _number(0.1, 3600.0))
    """How long code of an agent or a tool may block the event loop before it is interrupted."""
    retention_seconds: float = _setting(3600.0, _number(0.0, 31_536_000.0))
    """How long a finished task stays on the broker."""
    dedupe_max: int = _setting(1_000_000, _whole(1, 1_000_000_000))
    """How many submits are remembered to recognize a repeated one."""
    mailbox_max: int = _setting(10_000, _whole(1, 10_000_000))
    """How many events may wait for one agent instance."""
    stream_max: int = _setting(100_000, _whole(1, 1_000_000_000))
    """How much open work a work stream may hold before submits are answered with `overloaded`."""
    output_max_bytes: int = _setting(16_777_216, _whole(MAX_DATA_BYTES, 1_099_511_627_776))
    """How much one task may write to its output: deltas, chunks of answers and progress."""
    output_run_bytes: int = _setting(1_048_576, _whole(1024, 1_073_741_824))
    """How much output of one run may be on its way to the broker before `ctx.emit` waits."""
    output_process_bytes: int = _setting(33_554_432, _whole(1024, 1_099_511_627_776))
    """The same for all runs of a process."""
    ready_max: int = _setting(128, _whole(1, 1_000_000_000))
    """How many unread entries a work stream may hold before new tasks wait for their tenants' turns."""
    record_max: int = _setting(200_000, _whole(1, 1_000_000_000))
    """How many entries of the record may wait for the recorder before submits are answered with `overloaded`."""
    dead_max_bytes: int = _setting(67_108_864, _whole(LEAST_DEAD_BYTES, 1_099_511_627_776))
    """How many bytes the dead letters of a partition may have before the oldest of the largest share are trimmed."""
    dead_retention_seconds: float = _setting(2_592_000.0, _number(60.0, 3_153_600_000.0))
    """How long a dead letter is kept."""
    answers_max_bytes: int = _setting(67_108_864, _whole(LEAST_ANSWER_BYTES, 1_099_511_627_776))
    """How many bytes of answers a partition keeps for one registered publisher."""
    answers_retention_seconds: float = _setting(604_800.0, _number(60.0, 3_153_600_000.0))
    """How long they are kept if the publisher does not delete them."""
    tenant_schedules_max: int = _setting(10_000, _whole(1, 100_000))
    """How many schedules the registered publishers of one tenant may have."""
    tenant_schedules_max_bytes: int = _setting(16_777_216, _whole(1024, 1_099_511_627_776))
    """How many bytes these schedules may take together."""
    request_timeout_seconds: float = _setting(3600.0, _number(0.001, 31_536_000.0))
    """How long a request to an agent in another partition may take, unless it has its own limit."""
    pools: tuple[str, ...] = _setting((), _names)
    """Named pools that this process serves, in the order given."""
    durability: str = _setting("fast", _choice(*DURABILITIES))
    """`fast`, `fsync` or `quorum`."""
    app: str | None = _setting(None, _text)
    """`package.module:app`."""
    instance: str | None = _setting(None, _name)
    """The name of this process in logs, if several processes of one service run side by side."""
    log_level: str = _setting("info", _choice(*LOG_LEVELS))
    log_format: str = _setting("text", _choice(*LOG_FORMATS))
    engine_processes: int = _setting(0, _whole(0, 1024))
    """How many worker processes run `ctx.engine("local")`; 0: threads of the agent-handler do."""
    engine_in_flight: int = _setting(0, _whole(0, 100_000))
    """How many steps a gateway runs on its engine concurrently; 0: a default for the engine."""
    ray_address: str | None = _setting(
        None, _matching(RAY_ADDRESS, "auto, or host:port of the cluster's head (Ray Client, ray://, is not used)")
    )
    """`auto` or `host:port` of a Ray cluster. None: the ray-gateway starts a local Ray."""
    ray_local_cpus: int | None = _setting(None, _whole(1, 10_000))
    """The processors that a local Ray offers. None: all of the machine."""
    ray_local_store_bytes: int = _setting(536_870_912, _whole(LEAST_RAY_STORE_BYTES, 1_125_899_906_842_624))
    """The object store of a local Ray."""
    ray_dashboard: bool = _setting(False, _flag)
    """Whether a local Ray has a dashboard, which batch jobs need."""
    ray_jobs_url: str | None = _setting(None, _matching(RAY_JOBS_URL, "as http://ray-head:8265"))
    """The URL of Ray's Jobs API. None: the cluster's dashboard."""
    spark_remote: str | None = _setting(None, _matching(SPARK_REMOTE, "sc://host:port of a Spark Connect server"))
    """`sc://…` of a Spark Connect server. None: the spark-gateway starts a local one."""
    spark_local_master: str = _setting(
        "local[*]", _matching(SPARK_LOCAL_MASTER, "local[4] for 4 tasks at once, or local[*]")
    )
    """How many tasks a local Spark runs concurrently, as in `local[4]`."""
    spark_local_memory: str = _setting("512m", _heap)
    """The heap of a local Spark's JVM, in the JVM's notation."""
    blob_url: str | None = None
    """`file:///folder`, `s3://bucket/…`: the store for large results. Default: `blobs` in `data_dir`, if that is set;
    otherwise None."""
    blob_retention_seconds: float = _setting(604_800.0, _number(60.0, 3_153_600_000.0))
    """How long a large result is kept after it was written."""
    result_inline_bytes: int = _setting(262_144, _whole(1, MAX_DATA_BYTES))
    """The largest result of an engine function that is passed by value, if there is a blob store."""
    result_max_bytes: int = _setting(1_073_741_824, _whole(1, 1_099_511_627_776))
    """The largest result of an engine function."""
    shutdown_seconds: float = _setting(20.0, _number(0.0, 3600.0))
    """How long a process may take to finish its deliveries after SIGTERM."""
    redact: str | None = _setting(None, _patterns)
    """Regular expressions, separated by white space, for text to keep out of the record, errors and logs."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read and check every variable.

        Raises ConfigurationError: one line with the variable, its value and what is allowed; also for an unknown
        variable that begins with `WEFT_`.
        """
        refuse_unknown_variables(environ, [field.name for field in dataclasses.fields(cls)])
        given = {field.name: read_setting(field.name, environ) for field in dataclasses.fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        data_dir = given["data_dir"] = _path("WEFT_DATA_DIR", given.get("data_dir", ".weft"))
        given.setdefault("trajectory_url", f"sqlite:///{data_dir / 'trajectory.db'}")
        given["blob_url"] = blob_url(environ) or None
        return cls(**given)

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


def read_setting(name: str, environ: Mapping[str, str]) -> Any:  # Any: the field's type
    """Read and check the variable of one field of Settings; its default, or None, if it is not set."""
    field = Settings.__dataclass_fields__[name]
    variable = f"{VARIABLE_PREFIX}{name.upper()}"
    text = _stripped(variable, environ) if "read" in field.metadata else None
    if text is not None:
        return field.metadata["read"](variable, text)
    return None if field.default is dataclasses.MISSING else field.default


def without_password(url: str) -> str:
    """Return the URL with `***` in place of each password."""
    return PASSWORD_IN_OPTION.sub("***", PASSWORD_IN_URL.sub(r"\1:***@", url))


def wrong(variable: str, value: str, allowed: str) -> ConfigurationError:
    """Return the error for a value that is not allowed."""
    shown = value if len(value) <= 80 else value[:80] + "…"
    return ConfigurationError(f"{variable}={shown!r}: must be {allowed}")


def refuse_unknown_variables(environ: Mapping[str, str], fields: Collection[str]) -> None:
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
