"""Connections: finding a broker, signing in, and finding it again."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

MUTANTS: tuple[Mutant, ...] = (
    python(
        "bus/replies.py",
        "waits_for_broker",
        "            except (BusError, TimeoutError):\n                keep_at = 0.0\n",
        "            except BusError:\n                keep_at = 0.0\n",
        "answers arrive however long the broker was away",
        "integration/bus:replies",
    ),
    python(
        "bus/connection.py",
        "hung_up",
        "        if reader.at_eof() or self.transport.is_closing():\n",
        "        if False:\n",
        "a server that hangs up while its connection is handed over is noticed",
        "unit/bus:connection",
    ),
    python(
        "bus/connector.py",
        "asks_who_is_left",
        "            place = await self._look_up()\n",
        "            pass\n",
        "a Cluster goes on without the server that the URL names",
        "integration/bus:connection",
    ),
    python(
        "bus/connector.py",
        "cancelled",
        "        if task.cancelling() > cancelled_before:\n",
        "        if False:\n",
        "a cancellation that arrives while a connection is made is kept",
        "integration/bus:connection",
    ),
    python(
        "bus/connector.py",
        "learns",
        "                await self._learn()\n",
        "                pass\n",
        "a Cluster goes on without the server that the URL names",
        "integration/bus:connection",
    ),
    python(
        "bus/connector.py",
        "database",
        '    if path and ("db" not in options or "/" in path):\n',
        "    if False:\n",
        "a mistyped database is refused, and not taken for the first one",
        "unit/bus:connector",
    ),
    python(
        "bus/connector.py",
        "both_credentials",
        '    if options.keys() & {"username", "password"}:\n',
        "    if False:\n",
        "a password beside a credential provider is refused",
        "unit/bus:connector",
    ),
    python(
        "consumer/consumer.py",
        "burying",
        "(*self._loops, *self._running.values(), *self._burying)",
        "(*self._loops, *self._running.values())",
        "a stop leaves no task behind that keeps a dead letter",
        "integration/bus:connection",
    ),
    python(
        "config/settings.py",
        "password_options",
        'PASSWORD_IN_OPTION.sub("***", PASSWORD_IN_URL.sub(r"\\1:***@", url))',
        'PASSWORD_IN_URL.sub(r"\\1:***@", url)',
        "a password among the options of a URL is not shown",
        "unit/bus:connector",
    ),
)
