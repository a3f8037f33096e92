"""`weft completion`: prints the completion script of a shell."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Typer
from typer._completion_shared import get_completion_script

from runtime_core.cli.main import COMPLETION

app = Typer(add_completion=False, rich_markup_mode=None)


@app.command("completion")
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
