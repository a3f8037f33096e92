"""The server as a process: `python -m tests.openai_server --port-file … [--ledger …] [--key …]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec

from tests.openai_server.control import Control
from tests.openai_server.gates import Gates
from tests.openai_server.ledger import Ledger
from tests.openai_server.serving import FORMATS, Ended, Model, error_body
from tests.openai_server.wire import BadRequest, Request, json_reply, read_request

HOST = "127.0.0.1"


async def serve(port: int, port_file: Path, model: Model) -> None:
    """Serve until SIGTERM. The port is in the file once requests are read."""
    control = Control(model)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # `drain` then returns when the system has taken everything: only then is an answer whole.
        writer.transport.set_write_buffer_limits(0)
        try:
            while (request := await read_request(reader)) is not None:
                await answer(request, reader, writer)
                await writer.drain()
        except (Ended, ConnectionError):
            pass
        except BadRequest as error:
            writer.write(json_reply(411, error_body(str(error), "invalid_request_error", None)))
        finally:
            writer.close()

    async def answer(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST" and request.path in FORMATS:
            return await model.answer(request, reader, writer)
        if request.method == "GET" and request.path == "/v1/models":
            return writer.write(models(request, model))
        if (reply := control.answer(request)) is None:
            message = f"Invalid URL ({request.method} {request.path})"
            reply = json_reply(404, error_body(message, "invalid_request_error", None))
        writer.write(reply)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = await asyncio.start_server(connected, HOST, port, backlog=1024, limit=1 << 20)
    written = port_file.with_name(f"{port_file.name}.new")
    written.write_text(str(server.sockets[0].getsockname()[1]))
    written.rename(port_file)
    await stopped.wait()
    server.close()


def models(request: Request, model: Model) -> bytes:
    if (refused := model.refused(request)) is not None:
        return json_reply(401, refused)
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in model.models]
    return json_reply(200, msgspec.json.encode({"object": "list", "data": listed}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.openai_server")
    parser.add_argument("--port", type=int, default=0, help="0 (the default): one that is free")
    parser.add_argument("--port-file", type=Path, required=True, help="where the port is written")
    parser.add_argument("--ledger", type=Path, help="a file for the ledger, one JSON object a line")
    parser.add_argument("--key", action="append", help="an accepted key (default: test-key); may be given again")
    options = parser.parse_args()
    model = Model(Ledger(options.ledger), Gates(), frozenset(options.key or ("test-key",)))
    asyncio.run(serve(options.port, options.port_file, model))
    # Connections that wait at a gate must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
