"""The command `weft`: its commands, and how each of them ends.

Exit status: 0 done · 1 it could not be done, or the task failed (one line says why) · 2 used wrongly · 130 Ctrl-C ·
141 whoever read the output has gone.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from runtime_core.errors import WeftError

USED_WRONGLY = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

COMMANDS = {
    "up": "Run everything on this machine.",
    "submit": "Start a task and wait for its answer.",
    "task": "List tasks, look, fork, cancel, answer, delete.",
    "trajectory": "What tasks did, step by step.",
    "schedule": "Start tasks at a time, or again and again.",
    "publisher": "Register publishers that are not trusted, each with an ingress stream of its own.",
    "tenant": "Share handlers fairly among tenants, and limit what one may start.",
    "dead": "Look after what failed for good.",
    "lag": "Show how much work waits, and where.",
    "doctor": "Check that everything is as it must be.",
    "acl": "Print the broker's users, each with least rights.",
}
"""Each one is in the module of its name."""
GROUPS = ("task", "trajectory", "schedule", "publisher", "tenant", "dead")
"""Those that have commands of their own."""

HELP = """Run agents durably, and look after what they do.

\b
A first run, with an app in desk.py:
  weft up --app desk:app
  weft submit researcher "Redis Streams"        (in another terminal, same folder)

Commands find the broker by WEFT_REDIS_URL, or through the data folder (WEFT_DATA_DIR, .weft here) of a `weft up` that \
runs. WEFT_NAMESPACE chooses among namespaces on one broker. With --json they print for programs. Exit status: 0 done, \
1 failed, 2 used wrongly."""


class Weft(TyperGroup):
    """The commands. Each is imported when it is named: `weft --help` imports none of them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # Any, here and below: the framework's own
        if cmd_name not in COMMANDS:
            return None
        return get_command(import_module(f"runtime_core.cli.{cmd_name}").app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def build() -> Weft:
    """The command with all its groups. Help is plain text, so that it reads the same in a file."""
    return Weft(
        name="weft",
        help=HELP,
        commands=[TyperCommand(name) for name in COMMANDS],  # for their names
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character shows another one instead of ending the command.
            stream.reconfigure(errors="replace")
    try:
        status = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Python flushes once more at its end: into nothing, or it would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _invoke(arguments: list[str]) -> int:
    """Ends are values here; what is not expected goes on to Python with its traceback."""
    words = [word for word in arguments[:2] if word.isalpha()]
    path = " ".join(["weft", *words[: 2 if words and words[0] in GROUPS else 1]])
    try:
        # Not by the framework's own `main`: it would end a broken pipe and Ctrl-C in its own way.
        with build().make_context("weft", arguments) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return _say(path, "not confirmed: nothing was changed")
    except typer.TyperException as error:
        return _used_wrongly(error)
    except WeftError as error:
        return _say(path, str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        return _say(path, f"{error.filename}: {error.strerror}")
    return 0


def _used_wrongly(error: typer.TyperException) -> int:
    message = error.format_message()
    if "\n" in message:  # a group without a command: the message is its help
        print(message)
    else:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "weft"
        _say(path, f"{message.rstrip('.')}; see `{path} --help`")
    return USED_WRONGLY


def _say(path: str, message: str) -> int:
    print(f"{path}: {message}".replace("\r", "\\r").replace("\n", "\\n"), file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
