"""An unavailable server gives its reason, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers.redis import REDIS_7_0, RedisServer
from tests.servers.unavailable import Unavailable

UNKNOWN = replace(REDIS_7_0, name="redis-0.1", called="no-such-redis-server")


def test_without_apt_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no apt of Debian"):
        RedisServer(UNKNOWN, tmp_path / "cache", tmp_path / "data")


def test_a_failed_fetch_leaves_nothing_behind_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder, cache = tmp_path / "bin", tmp_path / "cache"
    bin_folder.mkdir()
    for name in ("apt-get", "dpkg"):
        (bin_folder / name).write_text('#!/bin/sh\necho x >> "$CALLS"\necho "E: the mirror is away" >&2\nexit 100\n')
        (bin_folder / name).chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PATH", f"{bin_folder}:/bin:/usr/bin")
    monkeypatch.setattr("tests.servers.debian.KEYRING", bin_folder)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the mirror is away"):
            RedisServer(UNKNOWN, cache, tmp_path / "data")
    assert calls.read_text() == "x\n"
    assert [path.name for path in cache.iterdir()] == ["redis-0.1.lock"]
