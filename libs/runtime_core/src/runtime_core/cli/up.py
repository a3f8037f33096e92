"""`weft up`: runs all services on this machine, and a broker if none is configured, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from typer import Exit, Option, Typer

from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError
from runtime_core.host.stack import services_for, up

app = Typer(add_completion=False, rich_markup_mode=None)


@app.command("up")
def up_command(
    app: Annotated[
        str | None, Option(metavar="MODULE:APP", help="Your app, as in desk:app. Default: WEFT_APP.")
    ] = None,
    replicas: Annotated[int, Option(min=1, max=256, help="The number of handlers of each kind.")] = 1,
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
            min=0,
            max=65535,
            help="The first service's HTTP port for metrics and health; the others use the next ports. 0: free ports.",
        ),
    ] = None,
) -> None:
    """Run everything on this machine.

    Import the app, then start a broker, unless WEFT_REDIS_URL names one, and all services. Print their log lines.
    Ctrl-C stops them.

    \b
    Example:
      weft up --app desk:app --reload
    """
    given = {"WEFT_APP": app, "WEFT_DATA_DIR": data_dir, "WEFT_METRICS_PORT": metrics_port}
    environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    settings = Settings.from_environment(environ)
    if settings.app is None:
        raise ConfigurationError(
            'no app is named: define one in a module, such as desk.py with `app = App("desk")`, and run in its folder: '
            "weft up --app desk:app"
        )
    raise Exit(asyncio.run(up(settings, replicas, services_for(settings, ray=ray, spark=spark), reload=reload)))
