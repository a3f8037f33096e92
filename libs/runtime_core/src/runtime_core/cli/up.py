"""`weft up`: the embedded server, where no broker is named, and the services, until Ctrl-C."""

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
    replicas: Annotated[int, Option(min=1, max=256, help="How many handlers of each kind to run.")] = 1,
    ray: Annotated[
        bool, Option("--ray", help="Run steps on Ray too: a local one, or the cluster that WEFT_RAY_ADDRESS names.")
    ] = False,
    spark: Annotated[
        bool,
        Option("--spark", help="Run steps on Spark too: a local one, or the server that WEFT_SPARK_REMOTE names."),
    ] = False,
    data_dir: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            help="Where data is kept. Default: WEFT_DATA_DIR, or .weft here. Other commands find it by WEFT_DATA_DIR.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        Option(
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
    given = {"WEFT_APP": app, "WEFT_DATA_DIR": data_dir, "WEFT_METRICS_PORT": metrics_port}
    environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    settings = Settings.from_environment(environ)
    if settings.app is None:
        raise ConfigurationError(
            'no app is named; write one, as in desk.py with `app = App("desk")`, and start it from its folder: '
            "weft up --app desk:app"
        )
    raise Exit(asyncio.run(up(settings, replicas, services_for(settings, ray=ray, spark=spark))))
