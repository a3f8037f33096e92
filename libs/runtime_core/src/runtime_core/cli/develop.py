"""Commands for developing an app: create a project, run it, check new code, complete commands in a shell."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, BadParameter, Exit, Option, Typer
from typer._completion_shared import get_completion_script

from runtime_core.app.loading import load_app
from runtime_core.base.text import plain
from runtime_core.cli.connection import Commands, existing_trajectories, read_settings
from runtime_core.cli.main import COMPLETION
from runtime_core.cli.output import Json, counter, past_moment, print_json
from runtime_core.declare.declaration import NAME
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.settings import Settings

# ---- weft new -------------------------------------------------------------------------------------------------

new_commands = Typer(add_completion=False, rich_markup_mode=None)

APP = '''\
from weft import AgentContext, App

app = App("{name}")


@app.tool
async def search(query: str) -> str:
    """Find a page about the query."""
    return f"a page about {{query}}"


@app.agent("researcher")
async def researcher(ctx: AgentContext, topic: str) -> str:
    pages = await ctx.gather(
        ctx.tool(search, query=f"{{topic}} in theory"),
        ctx.tool(search, query=f"{{topic}} in practice"),
    )
    await ctx.emit(f"read {{len(pages)}} pages")
    return f"{{topic}}: found {{' and '.join(pages)}}"
'''
TEST = """\
from app import app, search
from weft.testing import AppTest

__all__ = ["app"]  # the fixture weft_app runs it


async def test_the_researcher_reads_two_pages(weft_app: AppTest) -> None:
    fake = weft_app.override(search, lambda query: f"<{{query}}>")
    task = await weft_app.submit("researcher", "streams")
    assert await weft_app.assert_completed(task) == "streams: found <streams in theory> and <streams in practice>"
    assert len(fake.calls) == 2


async def test_the_researcher_survives_a_kill_at_each_step(weft_app: AppTest) -> None:
    await weft_app.kill_and_recover("researcher", "streams")
"""
DOCKERFILE = """\
FROM python:3.13-slim
WORKDIR /app
COPY . .
# For packages that no index has, put their wheels into the folder wheels. Weft's own wheel is one of them until Weft is
# published: `make dist` in a clone of Weft builds it in the clone's folder dist.
RUN mkdir -p wheels && pip install --no-cache-dir --find-links wheels --requirement requirements.txt
RUN useradd --system weft
USER weft
# One image for all services: SERVICE is agent-handler, tool-handler, state-manager or trajectory-recorder.
ENV WEFT_APP=app:app SERVICE=agent-handler
# Set WEFT_REDIS_URL to your Redis or Valkey.
CMD ["python", "-m", "runtime_core.host"]
"""
FILES = {
    "app.py": APP,
    "test_app.py": TEST,
    "Dockerfile": DOCKERFILE,
    "requirements.txt": "pytest\n# Until Weft is published: its wheel, see Dockerfile.\nweft=={version}\n",
    ".dockerignore": ".venv\n.weft\n",
    ".gitignore": ".venv\n.weft\n__pycache__\n",
}


@new_commands.command("new")
def new(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The folder to create; its name becomes the app's.")],
) -> None:
    """Create a project with an agent, a tool, a test and a Dockerfile.

    Never overwrites a file.

    \b
    Example:
      weft new desk
      cd desk && pytest
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise InvalidInput("FOLDER", f"{name!r} cannot be an app's name: use letters, digits, _ . or -, a letter first")
    if there := [each for each in FILES if (folder / each).exists()]:
        raise InvalidInput("FOLDER", f"{folder} already has {', '.join(there)}: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for each, text in FILES.items():
        (folder / each).write_text(text.format(name=name, version=version("weft")), encoding="utf-8")
    print(f"created {folder}; next:\n  cd {folder}\n  pytest\n  weft up --app app:app --reload")


# ---- weft up --------------------------------------------------------------------------------------------------

up_commands = Typer(add_completion=False, rich_markup_mode=None)


@up_commands.command("up")
def up_command(
    app: Annotated[
        str | None, Option(metavar="MODULE:APP", help="Your app, as in desk:app. Default: WEFT_APP.")
    ] = None,
    replicas: Annotated[int, Option(metavar="N", min=1, max=256, help="The number of handlers of each kind.")] = 1,
    ray: Annotated[
        bool, Option("--ray", help="Also run steps on Ray: on a local one, or on the cluster at WEFT_RAY_ADDRESS.")
    ] = False,
    spark: Annotated[
        bool,
        Option("--spark", help="Also run steps on Spark: on a local one, or on the server at WEFT_SPARK_REMOTE."),
    ] = False,
    reload: Annotated[
        bool, Option("--reload", help="Restart the handlers when a Python file in this folder changes.")
    ] = False,
    data_dir: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            help="The data folder. Default: WEFT_DATA_DIR or .weft. Other commands find it by WEFT_DATA_DIR.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="The first service's HTTP port for metrics and health; the others use the next ports. 0: free ports.",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Also offer tasks over HTTP, at this port. 0: a free port. Default: off.",
        ),
    ] = None,
) -> None:
    """Run everything on this machine.

    Import the app, then start a broker, unless WEFT_REDIS_URL names one, and all services. Print their log lines.
    Ctrl-C stops them.

    \b
    Example:
      weft up --app desk:app --reload
      weft up --app desk:app --http-port 8080
    """
    given = {
        "WEFT_APP": app, "WEFT_DATA_DIR": data_dir, "WEFT_METRICS_PORT": metrics_port, "WEFT_HTTP_PORT": http_port,
    }  # fmt: skip
    environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    from runtime_core.host.stack import services_for, up  # here: the other commands do not need it

    settings = Settings.from_environment(environ)
    if settings.app is None:
        raise ConfigurationError(
            'no app is named: define one in a module, such as desk.py with `app = App("desk")`, and run in its folder: '
            "weft up --app desk:app"
        )
    raise Exit(asyncio.run(up(settings, replicas, services_for(settings, ray=ray, spark=spark), reload=reload)))


# ---- weft replay ----------------------------------------------------------------------------------------------

replay_commands = Commands("Check new code against recorded tasks.")


@replay_commands.callback()
def group() -> None:
    """Keep `check` a subcommand, although it is the only one."""


@replay_commands.verb("check", seconds=None)
async def check_recorded(
    app_name: Annotated[
        str, Option("--app", metavar="MODULE:APP", help="The app with the new code. Default: WEFT_APP.")
    ] = "",
    since: Annotated[
        str, Option(metavar="TIME", help="Only tasks that ended since: 7d, 12h, or a time as in 2026-11-01T08:00Z.")
    ] = "7d",
    agent: Annotated[str, Option(metavar="NAME", help="Only tasks of this agent.")] = "",
    limit: Annotated[int | None, Option(metavar="N", min=1, help="Check at most N tasks.")] = None,
    as_json: Json = False,
) -> None:
    """Run the code of an app on recorded tasks.

    Names the first difference of each task: a running task like it would be parked. Calls no tool, agent or model, and
    does not need the broker. The exit status is 1 if a task differs.

    \b
    Example:
      weft replay check --app desk:app --since 7d
    """
    settings = read_settings()
    named = app_name or settings.app
    if not named:
        raise ConfigurationError("no app: name it with --app package.module:app, or set WEFT_APP")
    after = past_moment(since, "--since")
    if after is None:
        raise BadParameter("--since is empty: give a span, as in 7d, or a time, as in 2026-11-01")
    loaded = load_app(named)
    from runtime_core.client.replay import check

    async with existing_trajectories(settings) as store:
        with counter("tasks checked") as show:
            found = await check(
                store,
                loaded,
                namespace=settings.namespace,
                since=after,
                agent=agent or None,
                limit=limit,
                progress=show,
            )
    if as_json:
        differences = [asdict(difference) for difference in found.differences]
        further = [asdict(each) for each in found.further]
        print_json({"ok": found.ok, "tasks": found.tasks, "runs": found.runs, "differences": differences,
                    "further": further, "skipped": dict(found.skipped)})  # fmt: skip
    else:
        for line in str(found).splitlines():
            print(plain(line))
    if not found.ok:
        raise Exit(1)


# ---- weft completion ------------------------------------------------------------------------------------------

completion_commands = Typer(add_completion=False, rich_markup_mode=None)


@completion_commands.command("completion")
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      echo 'eval "$(weft completion bash)"' >> ~/.bashrc
      echo 'eval "$(weft completion zsh)"' >> ~/.zshrc
      weft completion fish > ~/.config/fish/completions/weft.fish
    """
    print(get_completion_script(prog_name="weft", complete_var=COMPLETION, shell=shell))
