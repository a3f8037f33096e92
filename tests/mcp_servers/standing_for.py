"""Stands for a server that `tests.mcp_servers.stdio` forks, to which it gives its streams and its environment.

The fork ends when this process does, and this process ends as its fork has ended.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.connect(sys.argv[1])
    socket.send_fds(end, [json.dumps(dict(os.environ)).encode()], [0, 1, 2])
    # The fork alone holds the streams, so that the client sees their end.
    for stream in (0, 1, 2):
        os.close(stream)
    status = int(end.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
