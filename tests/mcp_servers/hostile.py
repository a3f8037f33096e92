"""A server that breaks the protocol when a tool is called: `python -m tests.mcp_servers.hostile`.

It speaks raw JSON-RPC. A tool's name is what its call does.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

TOOLS = ("endless_line", "long_line", "wrong_lines", "endless_notes", "answer")
PART = b"x" * 65536


def send(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    sys.stdout.buffer.flush()


def forever(part: bytes) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        sys.stdout.buffer.write(part)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    method, params = request["method"], request.get("params", {})
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hostile", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
    match params["name"]:
        case "endless_line":
            forever(PART)
        case "wrong_lines":
            forever(b"\n" * 65536)
        case "endless_notes":
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
            forever(json.dumps(note).encode() + b"\n")
        case "long_line":
            sys.stdout.buffer.write(b"[" * (params["arguments"]["mib"] * 1024 * 1024))
    return {"content": [{"type": "text", "text": "answered"}]}


def main() -> None:
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "id" in request:
            send({"id": request["id"], "result": answer(request)})


if __name__ == "__main__":
    main()
