"""The command `weft`: its groups, and how every command ends.

Exit status: 0 done · 1 it could not be done, or the task failed (one line says why) · 2 used wrongly · 130 Ctrl-C ·
141 whoever read the output has gone.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from runtime_core.cli import acl, dead, doctor, lag, publisher, schedule, submit, task, tenant, trajectory
from runtime_core.errors import ConfigurationError, WeftError

USED_WRONGLY = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

GROUPS = ("task", "trajectory", "schedule", "publisher", "tenant", "dead")
"""Commands that have commands of their own."""


def build() -> typer.Typer:
    """The command with all its groups. Help is plain text, so that it reads the same in a file."""
    app = typer.Typer(
        name="weft",
        help=(
            "Run agents durably, and look after what they do.\n\n"
            "\b\nA first run, with an app in desk.py:\n"
            "  weft up --app desk:app\n"
            '  weft submit researcher "Redis Streams"        (in another terminal, same folder)\n\n'
            "Commands find the broker by WEFT_REDIS_URL, or through the data folder (WEFT_DATA_DIR, .weft here) of a "
            "`weft up` that runs. WEFT_NAMESPACE chooses among namespaces on one broker. With --json they print "
            "for programs. Exit status: 0 done, 1 failed, 2 used wrongly."
        ),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.command("up")(up)
    submit.register(app)
    app.add_typer(task.group(), name="task")
    app.add_typer(trajectory.group(), name="trajectory")
    app.add_typer(schedule.group(), name="schedule")
    app.add_typer(publisher.group(), name="publisher")
    app.add_typer(tenant.group(), name="tenant")
    app.add_typer(dead.group(), name="dead")
    lag.register(app)
    doctor.register(app)
    acl.register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character shows another one instead of ending the command.
            stream.reconfigure(errors="replace")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = _invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _invoke(arguments: Sequence[str]) -> int:
    """Ends are values here; what is not expected goes on to Python with its traceback."""
    try:
        # Not by the framework's own `main`: it would end a broken pipe and Ctrl-C in its own way.
        with get_command(build()).make_context("weft", list(arguments)) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return _say(arguments, "not confirmed: nothing was changed", 1)
    except typer.TyperException as error:
        return _used_wrongly(arguments, error)
    except WeftError as error:
        return _say(arguments, str(error), 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        return _say(arguments, f"{error.filename}: {error.strerror}", 1)
    return 0


def _used_wrongly(arguments: Sequence[str], error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "weft"
    message = error.format_message()
    if "\n" in message:  # a group without a command: the message is its help
        print(message)
        return USED_WRONGLY
    _line(f"{path}: {message.rstrip('.')}; see `{path} --help`")
    return USED_WRONGLY


def _say(arguments: Sequence[str], message: str, status: int) -> int:
    words = [word for word in arguments[:2] if word.isalpha()]
    named = words[:2] if words[:1] and words[0] in GROUPS else words[:1]
    _line(f"{' '.join(['weft', *named])}: {message}")
    return status


def _line(text: str) -> None:
    print(text.replace("\r", "\\r").replace("\n", "\\n"), file=sys.stderr, flush=True)


def _silence(stream: object) -> None:
    """Python flushes once more at its end: into nothing, or it would complain."""
    if isinstance(stream, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def up(
    app: Annotated[
        str | None, typer.Option("--app", metavar="MODULE:APP", help="Your app, as in desk:app. Default: WEFT_APP.")
    ] = None,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=256, help="How many handlers of each kind to run.")
    ] = 1,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run steps on Ray too: a local one, or the cluster that WEFT_RAY_ADDRESS names."),
    ] = False,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark", help="Run steps on Spark too: a local one, or the server that WEFT_SPARK_REMOTE names."
        ),
    ] = False,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            metavar="FOLDER",
            help="Where data is kept. Default: WEFT_DATA_DIR, or .weft here. Other commands find it by WEFT_DATA_DIR.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            help="Metrics and health over HTTP: the first service's port, the next ones count on. 0: free ports.",
        ),
    ] = None,
) -> None:
    """Run everything on this machine.

    A broker, unless WEFT_REDIS_URL names one, and all services, until Ctrl-C. What they say is shown line by line.

    \b
    Example:
      weft up --app desk:app --replicas 2
    """
    import asyncio

    from runtime_core.cli.up import services_for
    from runtime_core.cli.up import up as run_up
    from runtime_core.config.settings import Settings

    given = {"WEFT_APP": app, "WEFT_DATA_DIR": data_dir, "WEFT_METRICS_PORT": metrics_port}
    environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    settings = Settings.from_environment(environ)
    if settings.app is None:
        raise ConfigurationError(
            'no app is named; write one, as in desk.py with `app = App("desk")`, and start it from its folder: '
            "weft up --app desk:app"
        )
    raise typer.Exit(asyncio.run(run_up(settings, replicas, services_for(settings, ray=ray, spark=spark))))


if __name__ == "__main__":
    sys.exit(main())
