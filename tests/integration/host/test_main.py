"""A container that waits for the broker ends when the broker answers its user, and says why it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping

import redis

from tests.servers.process import Server

COMMAND = [sys.executable, "-m", "runtime_core.host", "wait-for-broker"]


def started(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(COMMAND, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_ends_when_the_broker_answers(own_valkey: Server) -> None:
    url = own_valkey.url
    own_valkey.kill()
    with started({"WEFT_REDIS_URL": url}) as waiting:
        assert waiting.stdout is not None
        assert "no answer from" in waiting.stdout.readline()
        own_valkey.start()
        assert waiting.wait(60) == 0


def test_it_ends_when_its_user_exists(own_valkey: Server) -> None:
    url = own_valkey.url.replace("//", "//agent-handler:secret-word@")
    with started({"WEFT_REDIS_URL": url}) as waiting:
        assert waiting.stdout is not None
        line = waiting.stdout.readline()
        assert "WRONGPASS" in line
        assert "secret-word" not in line
        with redis.Redis.from_url(own_valkey.url) as client:
            client.acl_setuser(
                "agent-handler", enabled=True, passwords=["+secret-word"], commands=["+@all"], keys=["*"]
            )
        assert waiting.wait(60) == 0


def test_a_signal_ends_it() -> None:
    with started({"WEFT_REDIS_URL": "redis://127.0.0.1:1"}) as waiting:
        assert waiting.stdout is not None
        waiting.stdout.readline()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(60) == 0


def test_a_missing_url_is_reported_in_one_line() -> None:
    done = subprocess.run(COMMAND, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "weft wait-for-broker: WEFT_REDIS_URL is not set\n")
