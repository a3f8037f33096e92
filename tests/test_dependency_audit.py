"""`make audit` fails for known vulnerabilities, and says what it could not look up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dependency_audit import audit, ignored, main, report

BAD = {"name": "leaky", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
GOOD = {"name": "sound", "version": "2.0", "vulns": []}
UNKNOWN = {"name": "private", "skip_reason": "Dependency not found"}


def says(folder: Path, text: str, status: int = 0) -> list[str]:
    """A program that prints a text, and logs its arguments."""
    script = folder / "asks.py"
    script.write_text(
        f"import pathlib, sys\npathlib.Path({str(folder / 'asked')!r}).write_text(' '.join(sys.argv[1:]))\n"
        f"print({text!r})\nprint('no route to host', file=sys.stderr)\nsys.exit({status})\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([GOOD], 0, "1 packages looked up, 0 known"),
        ([GOOD, BAD], 1, "leaky 1.0 has PYSEC-1, which is mended in 1.1"),
        ([GOOD, UNKNOWN], 0, "NOT AUDITED: the service knows nothing of 1 packages: private"),
    ],
)
def test_a_known_vulnerability_fails(
    packages: list[dict[str, object]], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # pip-audit's own status says nothing: it is 1 for a vulnerability and for a service that is away.
    command = says(tmp_path, json.dumps({"dependencies": packages}), status)
    assert report(audit([tmp_path / "dev.txt"], command, ["PYSEC-9"])) == status
    assert said in capsys.readouterr().out
    assert "--ignore-vuln PYSEC-9" in (tmp_path / "asked").read_text()


def test_a_missing_network_is_reported_and_fails_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(audit([tmp_path / "dev.txt"], says(tmp_path, "", 1), [])) == 0
    assert main([str(tmp_path / "no-such-program")]) == 0
    said = capsys.readouterr().out
    assert "NOT AUDITED: dev.txt: no route to host" in said
    assert "is not reached from here" in said


def test_a_service_without_data_is_asked_for_one_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(says(tmp_path, json.dumps({"dependencies": [UNKNOWN]}))) == 0
    assert "has no data" in capsys.readouterr().out
    assert "run.txt --disable-pip" in (tmp_path / "asked").read_text()
    assert main(says(tmp_path, json.dumps({"dependencies": [BAD]}))) == 1


def test_an_ignored_advisory_needs_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "ignored.txt"
    file.write_text("# none yet\nPYSEC-1  # only its command line\n")
    assert ignored(file) == ["PYSEC-1"]
    file.write_text("PYSEC-1\n")
    with pytest.raises(ValueError, match="give the reason behind PYSEC-1"):
        ignored(file)
