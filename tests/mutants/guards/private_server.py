"""The server behind `memory://`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

SERVER = "bus/private_server.py"

MUTANTS: tuple[Mutant, ...] = (
    python(
        "bus/connection.py",
        "lost_calls",
        "                    _fail(self._unsent, self._lost)\n",
        "",
        "a call does not wait for a dead server",
        "unit/bus:private_server",
    ),
    python(
        "bus/replies.py",
        "lost_answers",
        "                    _fail(future, lost)\n                return\n",
        "                    pass\n                return\n",
        "no request waits for an answer of a dead server",
        "unit/bus:private_server",
    ),
    python(
        "client/task.py",
        "lost_stream",
        "            except BusLost:\n                raise\n",
        "",
        "a stream of a dead server fails",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "waits_for_its_end",
        "            status = self.process.wait()\n",
        "            return\n",
        "the server lives as long as the process, and not only as its thread",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "tied",
        "            tied(command, signal.SIGTERM),\n",
        "            tied(command, signal.SIGKILL),\n",
        "the server removes its socket when its process is killed",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "forked",
        "    os.register_at_fork(after_in_child=_forked)\n",
        "    pass\n",
        "a forked child neither uses nor kills the server of its parent",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "umask",
        "            umask=OURS_ALONE,\n",
        "",
        "other users of the machine cannot read what is on the server",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "tried_again",
        "if _server is None or _server.failed:",
        "if _server is None:",
        "a server that could not start is tried again",
        "unit/bus:private_server",
    ),
    python(
        SERVER,
        "ended",
        "@atexit.register\n",
        "",
        "the socket is removed when its process ends",
        "unit/bus:private_server",
    ),
    python(
        "client/client.py",
        "memory_is_fast",
        'if url.startswith(MEMORY) and durability != "fast":',
        "if False:",
        "a durability that memory:// cannot provide is refused",
        "unit/bus:private_server",
    ),
    python(
        "host/local.py",
        "leaves_nothing",
        "        await drop_database(self._url, transport)\n",
        "",
        "an app that has ended leaves nothing on the server that all apps of a process share",
        "unit/bus:private_server",
    ),
    python(
        "integrations/actors/host.py",
        "leaves_nothing",
        "            await self._forget()\n",
        "            pass\n",
        "a closed runtime leaves nothing on the server that all of a process share",
        "unit/bus:private_server",
    ),
    python(
        "bus/connection.py",
        "end_of_loop",
        "                calls.extend(connection.waiting)\n                connection.abort()\n",
        "                calls.extend(connection.waiting)\n",
        "an event loop that ends leaves no open connection behind",
        "unit/bus:private_server",
    ),
)
