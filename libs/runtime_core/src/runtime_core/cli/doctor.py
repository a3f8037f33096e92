"""`weft doctor`: is everything as it must be, and what to do where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from runtime_core.cli.output import Json, print_json
from runtime_core.text import plain

if TYPE_CHECKING:
    from runtime_core.cli.checks import Finding, Wanted


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    repair: Annotated[
        bool, typer.Option("--repair", help="Free what is stuck: lost work becomes dead letters, instances go on.")
    ] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove functions of other releases from the broker.")] = False,
    as_json: Json = False,
) -> None:
    """Check that everything is as it must be.

    The broker, the services and the trajectory store; what is wrong comes with a remedy. The status is then 1.

    \b
    Example:
      weft doctor
    """
    from runtime_core.cli.checks import Wanted
    from runtime_core.cli.connection import run

    # Large namespaces take a while: each check may, not all together.
    run(_doctor(Wanted(repair, clean), as_json), None)


async def _doctor(wanted: Wanted, as_json: bool) -> None:
    from runtime_core.cli.checks import CHECKS, Finding
    from runtime_core.cli.connection import broker
    from runtime_core.errors import ConfigurationError, ServerError

    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            _print(finding)

    try:
        async with broker(unchecked=True) as opened:
            for check in CHECKS:
                try:
                    async for finding in check(opened, wanted):
                        found(finding)
                except ServerError as error:
                    found(Finding(check.__name__, False, f"could not be checked: {error}", "may this user ask that?"))
    except ConfigurationError as error:
        found(Finding("server", False, str(error)))
    wrong = [finding for finding in findings if not finding.ok]
    if as_json:
        print_json({"ok": not wrong, "checks": [finding.to_json() for finding in findings]})
    else:
        print(f"\n{len(wrong)} of {len(findings)} are wrong" if wrong else "\nall is well")
    if wrong:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    print(f"{'✓' if finding.ok else '✗'} {finding.check}: {plain(finding.message)}", flush=True)
    if finding.remedy:
        print(f"    → {plain(finding.remedy)}", flush=True)
