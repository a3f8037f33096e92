"""The command `weft`: its subcommands and their exit status.

0: success. 1: the command or the task failed; one line gives the reason. 2: wrong usage. 130: Ctrl-C.
141: the reader of the output has exited.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from runtime_core.base.lazy import collect_seldom
from runtime_core.errors import InvalidInput, WeftError

WRONG_USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk has no room, the user no quota, or the process may not write such a large file."""

COMPLETION = "_WEFT_COMPLETE"
"""The variable with which a shell requests completions."""

COMMANDS = {
    "new": "Create a project with an agent, a tool, a test and a Dockerfile.",
    "up": "Run everything on this machine.",
    "submit": "Start a task and wait for its answer.",
    "task": "List, show, fork, cancel, answer and delete tasks.",
    "trajectory": "Show and export the recorded steps of tasks.",
    "replay": "Check new code against recorded tasks.",
    "schedule": "Start tasks at a set time, or repeatedly.",
    "publisher": "Register untrusted publishers, each with its own ingress stream.",
    "tenant": "Set the weights and limits of tenants.",
    "key": "Create and revoke API keys of the HTTP gateway.",
    "dead": "Inspect, redrive or drop dead letters.",
    "agents": "List agent types of runtimes, and forget those that no process runs.",
    "top": "Show the work in progress, live.",
    "lag": "Show how much work is waiting, and where.",
    "doctor": "Check the installation.",
    "acl": "Print ACL rules for the broker's users.",
    "completion": "Print the completion script of a shell.",
}
"""Each one is `app` in the module of its name, unless PLACES names another place."""
PLACES = {
    "new": "develop:new_commands",
    "up": "develop:up_commands",
    "replay": "develop:replay_commands",
    "completion": "develop:completion_commands",
    "lag": "monitor:lag_commands",
    "top": "monitor:top_commands",
    "doctor": "monitor:doctor_commands",
    "acl": "admin:acl_commands",
    "publisher": "admin:publisher_commands",
    "tenant": "admin:tenant_commands",
    "key": "admin:key_commands",
    "agents": "admin:agents_commands",
}
GROUPS = ("task", "trajectory", "replay", "schedule", "publisher", "tenant", "key", "dead", "agents")
"""The commands that have subcommands."""

HELP = """Run durable agents, and inspect and operate them.

\b
Get started:
  weft new desk
  cd desk && weft up --app app:app
  weft submit researcher "Redis Streams"        (in another terminal, same folder)

Commands connect to the broker at WEFT_REDIS_URL, or to that of a running `weft up` with the same data folder \
(WEFT_DATA_DIR; default: .weft). WEFT_NAMESPACE selects a namespace on the broker. --json prints output for programs. \
Exit status: 0 success, 1 failure, 2 wrong usage."""


class Weft(TyperGroup):
    """The commands. Each is imported when it is used: `weft --help` imports none of them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # Any, here and below: Typer's types
        if cmd_name not in COMMANDS:
            return None
        module, _, name = PLACES.get(cmd_name, f"{cmd_name}:app").partition(":")
        return get_command(getattr(import_module(f"runtime_core.cli.{module}"), name))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the names of commands without importing them."""
        here = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return here if not incomplete.startswith("-") else super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def build() -> Weft:
    """Return the command with all its groups. Help is plain text, so that it reads the same in a file."""
    return Weft(
        name="weft",
        help=HELP,
        commands=[TyperCommand(name) for name in COMMANDS],  # for their names
        params=_root_options(),
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def _root_options() -> Any:
    """Return the options of `weft` itself, as Typer makes them."""
    root = typer.Typer(add_completion=False)

    @root.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
        ] = False,
    ) -> None: ...

    @root.command()
    def nothing() -> None: ...

    return get_command(root).params


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"weft {version('weft')}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Without arguments, this process is the command."""
    if arguments is None:
        collect_seldom()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Print another character where the terminal lacks one, instead of failing.
            stream.reconfigure(errors="replace")
    try:
        status = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in FULL:
            raise
        _abandon_output()
        return _say("weft", f"a file was not written: {error.strerror}; free space, or use another disk")
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _abandon_output() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Python flushes again when it exits: to /dev/null, or it would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _invoke(arguments: list[str]) -> int:
    """Run the command and return its exit status. An unexpected error is raised."""
    if asked := os.environ.get(COMPLETION):
        from typer._completion_classes import completion_init
        from typer.completion import shell_complete

        completion_init()
        return shell_complete(build(), {}, "weft", COMPLETION, asked)
    words = [word for word in arguments[:2] if word.isalpha()]
    path = " ".join(["weft", *words[: 2 if words and words[0] in GROUPS else 1]])
    try:
        # Not Typer's own `main`, which handles a broken pipe and Ctrl-C in its own way.
        with build().make_context("weft", arguments) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return _say(path, "not confirmed: nothing was changed")
    except typer.TyperException as error:
        return _wrong_usage(error)
    except InvalidInput as error:
        return _say(path, _as_typed(error))
    except WeftError as error:
        return _say(path, str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        return _say(path, f"{error.filename}: {error.strerror}")
    return 0


def _wrong_usage(error: typer.TyperException) -> int:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if "\n" in message and context is not None and isinstance(context.command, TyperGroup):
        print(message)  # a group without a subcommand: the message is its help
    else:
        # Typer puts `Value error, ` before the text of some of its own errors.
        message = " ".join(message.split()).replace(": Value error, ", ": ", 1)
        path = context.command_path if context is not None else "weft"
        _say(path, f"{message.rstrip('.')}{' See' if message.endswith('?') else '; see'} `{path} --help`")
    return WRONG_USAGE


NAMED = frozenset({"task_id", "schedule_id", "letter_id", "request_id", "agent"})
"""Fields whose errors name the value, so that the name of the field adds nothing."""


def _as_typed(error: InvalidInput) -> str:
    """Return an error with the name that a value has on the command line, not its path in a command on the wire."""
    field = error.field.removeprefix("data.").removeprefix("conf.")
    return error.message if field in NAMED else f"{field}: {error.message}"


def _say(path: str, message: str) -> int:
    print(f"{path}: {message}".replace("\r", "\\r").replace("\n", "\\n"), file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
