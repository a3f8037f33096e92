"""`tests.mcp_servers.desk` over stdio, forked for each client that starts it, since its imports take a second.

`python -m tests.mcp_servers.stdio SOCKET` listens and forks. What a client starts is `standing_for.py SOCKET`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime_core.base.lifeline import tie
from tests.service_forks import LARGEST, SOURCES, STDIO_SERVERS, start

START_SECONDS = 60.0


@contextmanager
def command(folder: Path) -> Iterator[list[str]]:
    """Give the command that starts a server."""
    path = folder / "stdio"
    log = folder / "stdio.log"
    process = start((STDIO_SERVERS, str(path)), {**os.environ, "PYTHONPATH": SOURCES}, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not path.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield [sys.executable, "-I", "-S", str(Path(__file__).with_name("standing_for.py")), str(path)]
    finally:
        process.kill()
        process.wait()


def serve(listener: socket.socket) -> None:
    """Fork for each client. Return in each fork, with the client's streams and environment."""
    me = os.getpid()
    clients: dict[int, tuple[socket.socket, int, int]] = {}
    """By the descriptors of a client's connection and of its fork: both, and the fork's id."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready == listener.fileno():
                client, _ = listener.accept()
                environ, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
                child = os.fork()
                if child == 0:
                    tie(me, signal.SIGKILL)
                    os.setsid()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    os.environ.clear()
                    os.environ.update(json.loads(environ))
                    return
                for stream in streams:
                    os.close(stream)
                ends = os.pidfd_open(child)
                clients[client.fileno()] = clients[ends] = (client, ends, child)
                waiting.register(client, select.POLLIN)
                waiting.register(ends, select.POLLIN)
            elif ready in clients:
                client, ends, child = clients[ready]
                if ready != ends:
                    os.kill(child, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                del clients[client.fileno()], clients[ends]
                waiting.unregister(client)
                waiting.unregister(ends)
                os.close(ends)
                if ready == ends:
                    client.send(str(status).encode())
                client.close()


def main(path: Path) -> None:
    from tests.mcp_servers import desk  # only here: the tests need it in this process alone

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bound = path.with_suffix(".bound")
    listener.bind(str(bound))
    listener.listen()
    bound.rename(path)
    serve(listener)
    sys.argv = [desk.__file__]
    desk.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
