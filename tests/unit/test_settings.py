"""Settings: defaults, a one-line error for every wrong value, and how child processes get them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from runtime_core.errors import ConfigurationError
from runtime_core.settings import Settings, without_password


def test_an_empty_environment_gives_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environment({}) == Settings(
        data_dir=tmp_path / ".weft",
        trajectory_url=f"sqlite:///{tmp_path}/.weft/trajectory.db",
        redis_url=None,
        namespace="weft",
        partitions=1,
        metrics_host="127.0.0.1",
        metrics_port=None,
        lease_seconds=3.0,
        retention_seconds=3600.0,
        dedupe_max=1_000_000,
        mailbox_max=10_000,
        stream_max=100_000,
        output_max_bytes=16_777_216,
        output_run_bytes=1_048_576,
        output_process_bytes=33_554_432,
        ready_max=128,
        record_max=200_000,
        request_timeout_seconds=3600.0,
        pools=(),
        durability="fast",
        app=None,
        instance=None,
        log_level="info",
        log_format="text",
        engine_processes=0,
        engine_in_flight=0,
        ray_address=None,
        ray_local_cpus=None,
        ray_local_store_bytes=536_870_912,
        ray_dashboard=False,
        ray_jobs_url=None,
        spark_remote=None,
        spark_local_master="local[*]",
        spark_local_memory="512m",
        shutdown_seconds=20.0,
        redact=None,
    )
    assert not (tmp_path / ".weft").exists(), "reading settings must not write anything"


def test_an_empty_variable_counts_as_unset() -> None:
    empty = {f"WEFT_{field.name.upper()}": " " for field in dataclasses.fields(Settings)}
    assert Settings.from_environment(empty) == Settings.from_environment({})


def test_every_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "WEFT_REDIS_URL": "redis://:secret@broker:6379/0",
            "WEFT_NAMESPACE": "team-a_1",
            "WEFT_PARTITIONS": "16",
            "WEFT_DATA_DIR": "/var/lib/weft",
            "WEFT_TRAJECTORY_URL": "postgresql://u:p@db/weft",
            "WEFT_METRICS_HOST": "0.0.0.0",
            "WEFT_METRICS_PORT": "0",
            "WEFT_HTTP_HOST": "::1",
            "WEFT_HTTP_PORT": "8081",
            "WEFT_HTTP_ORIGINS": "https://desk.example, http://localhost:3000",
            "WEFT_HTTP_RATE": "2.5",
            "WEFT_HTTP_STREAMS_MAX": "11",
            "WEFT_HTTP_CALLER_STREAMS_PERCENT": "20",
            "WEFT_LEASE_SECONDS": "1.5",
            "WEFT_LOOP_BLOCK_SECONDS": "2.5",
            "WEFT_RETENTION_SECONDS": "60",
            "WEFT_DEDUPE_MAX": "5",
            "WEFT_MAILBOX_MAX": "6",
            "WEFT_STREAM_MAX": "7",
            "WEFT_OUTPUT_MAX_BYTES": "2000000",
            "WEFT_OUTPUT_RUN_BYTES": "3000",
            "WEFT_OUTPUT_PROCESS_BYTES": "4000",
            "WEFT_READY_MAX": "9",
            "WEFT_RECORD_MAX": "8",
            "WEFT_ANSWERS_MAX_BYTES": "4194304",
            "WEFT_ANSWERS_RETENTION_SECONDS": "86400",
            "WEFT_DEAD_MAX_BYTES": "4194304",
            "WEFT_DEAD_RETENTION_SECONDS": "86400",
            "WEFT_TENANT_SCHEDULES_MAX": "10",
            "WEFT_TENANT_SCHEDULES_MAX_BYTES": "2048",
            "WEFT_REQUEST_TIMEOUT_SECONDS": "90.5",
            "WEFT_POOLS": "gpu, billing",
            "WEFT_DURABILITY": "FSYNC",
            "WEFT_APP": "desk.app:app",
            "WEFT_INSTANCE": "agent-handler-2",
            "WEFT_LOG_LEVEL": "debug",
            "WEFT_LOG_FORMAT": "json",
            "WEFT_ENGINE_PROCESSES": "3",
            "WEFT_ENGINE_IN_FLIGHT": "12",
            "WEFT_RAY_ADDRESS": "head:6379",
            "WEFT_RAY_LOCAL_CPUS": "2",
            "WEFT_RAY_LOCAL_STORE_BYTES": "83886080",
            "WEFT_RAY_DASHBOARD": "1",
            "WEFT_RAY_JOBS_URL": "http://head:8265",
            "WEFT_SPARK_REMOTE": "sc://connect:15002/;token=abc",
            "WEFT_SPARK_LOCAL_MASTER": "local[2, 3]",
            "WEFT_SPARK_LOCAL_MEMORY": "2G",
            "WEFT_BLOB_URL": "s3://bucket/weft/",
            "WEFT_BLOB_RETENTION_SECONDS": "3600",
            "WEFT_RESULT_INLINE_BYTES": "1000",
            "WEFT_RESULT_MAX_BYTES": "2000",
            "WEFT_SHUTDOWN_SECONDS": "0",
            "WEFT_REDACT": r" IBAN\d+ ^4\d{15}$ ",
        }
    )
    assert settings == Settings(
        data_dir=Path("/var/lib/weft"),
        trajectory_url="postgresql://u:p@db/weft",
        redis_url="redis://:secret@broker:6379/0",
        namespace="team-a_1",
        partitions=16,
        metrics_host="0.0.0.0",
        metrics_port=0,
        http_host="::1",
        http_port=8081,
        http_origins=("https://desk.example", "http://localhost:3000"),
        http_rate=2.5,
        http_streams_max=11,
        http_caller_streams_percent=20,
        lease_seconds=1.5,
        loop_block_seconds=2.5,
        retention_seconds=60.0,
        dedupe_max=5,
        mailbox_max=6,
        stream_max=7,
        output_max_bytes=2_000_000,
        output_run_bytes=3_000,
        output_process_bytes=4_000,
        ready_max=9,
        record_max=8,
        answers_max_bytes=4_194_304,
        answers_retention_seconds=86_400.0,
        dead_max_bytes=4_194_304,
        dead_retention_seconds=86_400.0,
        tenant_schedules_max=10,
        tenant_schedules_max_bytes=2048,
        request_timeout_seconds=90.5,
        pools=("gpu", "billing"),
        durability="fsync",
        app="desk.app:app",
        instance="agent-handler-2",
        log_level="debug",
        log_format="json",
        engine_processes=3,
        engine_in_flight=12,
        ray_address="head:6379",
        ray_local_cpus=2,
        ray_local_store_bytes=83_886_080,
        ray_dashboard=True,
        ray_jobs_url="http://head:8265",
        spark_remote="sc://connect:15002/;token=abc",
        spark_local_master="local[2, 3]",
        spark_local_memory="2G",
        blob_url="s3://bucket/weft",
        blob_retention_seconds=3600.0,
        result_inline_bytes=1000,
        result_max_bytes=2000,
        shutdown_seconds=0.0,
        redact=r"IBAN\d+ ^4\d{15}$",
    )
    assert Settings.from_environment(settings.to_environment()) == settings


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("WEFT_NAMESPACE", "a b", "letters, digits"),
        ("WEFT_NAMESPACE", "x" * 65, "1 to 64"),
        ("WEFT_NAMESPACE", "{weft}", "letters, digits"),
        ("WEFT_REDACT", "(", "not a regular expression"),
        ("WEFT_PARTITIONS", "0", "from 1 to 1024"),
        ("WEFT_PARTITIONS", "two", "whole number"),
        ("WEFT_PARTITIONS", "1_0", "whole number"),
        ("WEFT_PARTITIONS", "٣", "whole number"),
        ("WEFT_PARTITIONS", "9" * 10_000, "whole number"),
        ("WEFT_METRICS_PORT", "65536", "from 0 to 65535"),
        ("WEFT_METRICS_PORT", "-1", "from 0 to 65535"),
        ("WEFT_HTTP_ORIGINS", "desk.example", "as in https://desk.example"),
        ("WEFT_HTTP_RATE", "-1", "requests per second from 0"),
        ("WEFT_LEASE_SECONDS", "0", "from 0.1"),
        ("WEFT_LEASE_SECONDS", "nan", "seconds from"),
        ("WEFT_LEASE_SECONDS", "3s", "seconds from"),
        ("WEFT_RETENTION_SECONDS", "inf", "seconds from"),
        ("WEFT_REQUEST_TIMEOUT_SECONDS", "0", "from 0.001"),
        ("WEFT_POOLS", "gpu,,cpu", "commas"),
        ("WEFT_POOLS", "gpu,gpu", "different names"),
        ("WEFT_DURABILITY", "safe", "fast or fsync or quorum"),
        ("WEFT_LOG_FORMAT", "xml", "text or json"),
        ("WEFT_REDIS_URL", "localhost:6379", "redis://"),
        ("WEFT_RAY_ADDRESS", "ray://head:10001", "Ray Client, ray://, is not used"),
        ("WEFT_RAY_ADDRESS", "head", "host:port"),
        ("WEFT_SPARK_REMOTE", "spark://head:7077", "sc://host:port"),
        ("WEFT_RAY_ADDRESS", "head:65536", "host:port"),
        ("WEFT_RAY_LOCAL_CPUS", "0", "from 1 to 10000"),
        ("WEFT_RAY_LOCAL_STORE_BYTES", "83886079", "from 83886080"),
        ("WEFT_RAY_DASHBOARD", "true", "from 0 to 1"),
        ("WEFT_RAY_JOBS_URL", "ray-head:8265", "http://ray-head:8265"),
        ("WEFT_SPARK_REMOTE", "sc://head:0", "sc://host:port"),
        ("WEFT_SPARK_LOCAL_MASTER", "local[0]", "local[4]"),
        ("WEFT_SPARK_LOCAL_MASTER", "spark://head:7077", "local[4]"),
        ("WEFT_SPARK_LOCAL_MEMORY", "512", "512m or 2g"),
        ("WEFT_SPARK_LOCAL_MEMORY", "511m", "512m or more"),
        ("WEFT_SPARK_LOCAL_MEMORY", "-1g", "512m or more"),
        ("WEFT_DATA_DIR", "~nobody-here/data", "no home folder"),
        ("WEFT_LEASE_SECONDS", "1_0", "seconds from"),
        ("WEFT_LEASE_SECONDS", "٣", "seconds from"),
        ("WEFT_ENGINE_IN_FLIGHT", "-1", "from 0 to 100000"),
        ("WEFT_TRAJECTORY_URL", "mysql://x", "postgresql://"),
        ("WEFT_TRAJECTORY_URL", "sqlite://", "sqlite:///path"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({variable: value})
    message = str(caught.value)
    assert message.startswith(f"{variable}='{value[:80]}")
    assert allowed in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Settings)])
def test_a_value_in_quotes_is_refused(field: str) -> None:
    variable = f"WEFT_{field.upper()}"
    for quoted in ('"/a"', "'1'"):
        with pytest.raises(ConfigurationError, match=f"^{variable}[:=]"):
            Settings.from_environment({variable: quoted})
    assert Settings.from_environment({"WEFT_REDACT": '"token":"[^"]*"'}).redact, "quotes of a pattern's own"


def test_no_message_shows_a_password() -> None:
    with pytest.raises(ConfigurationError, match=r"^WEFT_SPARK_REMOTE='sc://h:99999/': must be"):
        Settings.from_environment({"WEFT_SPARK_REMOTE": "sc://h:99999/;token=s3cr"})
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({"WEFT_REDIS_URL": "http://user:s3cr:et@host"})
    assert "s3cr" not in str(caught.value)
    assert "et@" not in str(caught.value)
    assert without_password("redis://:pa/ss@h:1/0") == "redis://:***@h:1/0"
    assert without_password("redis://h:6379") == "redis://h:6379"


def test_the_data_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    settings = Settings.from_environment({"WEFT_DATA_DIR": str(tmp_path / "a" / "b")})
    assert settings.make_data_dir() == tmp_path / "a" / "b"
    assert settings.make_data_dir().is_dir(), "a second call finds it made"


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings.from_environment({"WEFT_DATA_DIR": str(tmp_path / path)})
    with pytest.raises(ConfigurationError, match=r"^WEFT_DATA_DIR='.*file.*': not a directory; [^\n]*$"):
        settings.make_data_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_data_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for path in (tmp_path, tmp_path / "below"):
        settings = Settings.from_environment({"WEFT_DATA_DIR": str(path)})
        with pytest.raises(ConfigurationError, match=r"^WEFT_DATA_DIR="):
            settings.make_data_dir()
    tmp_path.chmod(0o700)
