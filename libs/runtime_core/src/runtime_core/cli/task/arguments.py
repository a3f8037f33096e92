"""What several commands of `weft task` have."""

from __future__ import annotations

from typing import Annotated

import typer

LOOKED_AT_MAX = 20_000
"""Tasks on the broker that a list looks through."""

Id = Annotated[str, typer.Argument(metavar="ID", help="The task's id.")]
