"""`weft new`: creates a project."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from typer import Argument, Typer

from runtime_core.declare.declaration import NAME
from runtime_core.errors import InvalidInput

app = Typer(add_completion=False, rich_markup_mode=None)

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
# Put the wheels of packages that no index has into the folder wheels.
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
    "requirements.txt": "pytest\nweft=={version}\n",
    ".dockerignore": ".venv\n.weft\n",
    ".gitignore": ".venv\n.weft\n__pycache__\n",
}


@app.command("new")
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
