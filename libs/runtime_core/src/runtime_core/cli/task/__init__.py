"""`weft task`: tasks that were submitted, by whomever.

1. listing.py  which tasks there are
2. show.py     all that is known of one: view.py reads it
3. answer.py   what tasks ask, and answering it
4. fork.py     a new task with another's results
5. end.py      cancel, and delete for ever
"""

from __future__ import annotations

import typer

from runtime_core.cli.task.answer import questions, signal
from runtime_core.cli.task.end import cancel, delete
from runtime_core.cli.task.fork import fork
from runtime_core.cli.task.listing import list_tasks
from runtime_core.cli.task.show import show


def group() -> typer.Typer:
    app = typer.Typer(
        help="List tasks, look, fork, cancel, answer, delete.", no_args_is_help=True, rich_markup_mode=None
    )
    app.command("list")(list_tasks)
    app.command("show")(show)
    app.command("fork")(fork)
    app.command("cancel")(cancel)
    app.command("questions")(questions)
    app.command("signal")(signal)
    app.command("delete")(delete)
    return app
