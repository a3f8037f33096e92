"""Tasks from programs that are not in Python, with nothing but a socket: XADD and XREAD."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.fleet import Fleet
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

BASH = r"""
# Usage: PORT STREAM ANSWERS TASK. Submits the task and prints the data of its final event.
export LC_ALL=C
exec 3<>"/dev/tcp/127.0.0.1/$1"
send() {
  printf '*%d\r\n' "$#" >&3
  for word in "$@"; do printf '$%d\r\n%s\r\n' "${#word}" "$word" >&3; done
}
# Reads one reply into the array `values`, flat.
reply() {
  local line count i
  IFS= read -r line <&3
  line=${line%$'\r'}
  case $line in
    \**) count=${line:1}; for ((i = 0; i < count; i++)); do reply; done ;;
    \$-1) ;;
    \$*) IFS= read -r -N "${line:1}" line <&3; values+=("$line"); IFS= read -r line <&3 ;;
    *) values+=("$line") ;;
  esac
}
send XADD "$2" '*' type weft.task.submit id from-bash replyto "$3" data "$4"
reply
last=0
while true; do
  values=()
  send XREAD BLOCK 0 COUNT 1 STREAMS "$3" "$last"
  reply
  last=${values[1]}
  case " ${values[*]} " in
    *weft.task.completed* | *weft.task.failed* | *weft.task.rejected*) break ;;
  esac
done
for ((i = 2; i < ${#values[@]}; i += 2)); do
  [ "${values[i]}" = data ] && printf '%s\n' "${values[i + 1]}"
done
"""

NODE = r"""
// Usage: PORT STREAM ANSWERS TASK. Submits the task and prints the data of its final event.
const [port, stream, answers, task] = process.argv.slice(2);
const socket = require("net").connect(Number(port), "127.0.0.1");
let buffer = Buffer.alloc(0), last = "0";
const send = (...words) => socket.write(
  `*${words.length}\r\n` + words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join(""));
// Returns [value, rest], or null while the reply is not complete.
const parse = (at) => {
  const end = buffer.indexOf("\r\n", at);
  if (end < 0) return null;
  const kind = String.fromCharCode(buffer[at]), line = buffer.toString("utf8", at + 1, end), rest = end + 2;
  if (kind === "$") {
    const size = Number(line);
    if (size < 0) return [null, rest];
    return buffer.length < rest + size + 2 ? null : [buffer.toString("utf8", rest, rest + size), rest + size + 2];
  }
  if (kind !== "*") return [line, rest];
  const list = [];
  for (let next = rest, left = Number(line); ; left--) {
    if (left <= 0) return [list, next];
    const one = parse(next);
    if (one === null) return null;
    list.push(one[0]);
    next = one[1];
  }
};
const read = () => send("XREAD", "BLOCK", "0", "COUNT", "1", "STREAMS", answers, last);
socket.on("data", (bytes) => {
  buffer = Buffer.concat([buffer, bytes]);
  for (let found; (found = parse(0)) !== null; ) {
    buffer = buffer.subarray(found[1]);
    if (!Array.isArray(found[0])) { read(); continue; }
    const [[, [[id, fields]]]] = found[0];
    last = id;
    const event = Object.fromEntries(fields.flatMap((name, i) => (i % 2 ? [] : [[name, fields[i + 1]]])));
    if (/completed|failed|rejected/.test(event.type)) { console.log(event.data); socket.end(); return; }
    read();
  }
});
send("XADD", stream, "*", "type", "weft.task.submit", "id", "from-node", "replyto", answers, "data", task);
"""


@pytest.mark.parametrize(("program", "code"), [("bash", BASH), ("node", NODE)])
async def test_a_program_in_another_language_runs_a_task_with_a_swarm(
    program: str, code: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    found = shutil.which(program)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is not installed")
        pytest.skip(f"NOT TESTED: {program} is not installed")
    (tmp_path / "client").write_text(code)
    task = {
        "agent": "weft.task",
        "input": {
            "swarm": {"topology": ["first", {"parallel": ["left", "right"]}, "joins"]},
            "input": {"path": str(tmp_path / "effects é"), "way": []},
        },
    }
    async with Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runners_app:app"):
        arguments = (str(valkey.port), f"{namespace}:tasks", f"answers-of-{namespace}", json.dumps(task))
        process = await asyncio.create_subprocess_exec(
            found, str(tmp_path / "client"), *arguments, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    answer = json.loads(printed)
    assert answer["status"] == "completed", answer
    assert answer["output"]["way"] == [["first", "left"], ["first", "right"]]
