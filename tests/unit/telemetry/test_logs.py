"""Log lines of hostile texts: no secrets, no forged lines, a bounded size, and never a line of the default handler."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from runtime_core.telemetry import logs
from runtime_core.telemetry.logs import LONGEST, LONGEST_LINE
from runtime_core.telemetry.redaction import Redactor, use
from runtime_core.telemetry.secret_search import HIDDEN

KEY = "sk-" + "abcdefgh12345678ijkl"
PAIR = "AKIA" + "0123456789ABCDEF"
FORMATS = ("text", "json")


class Unshowable:
    """An argument whose text fails, with a secret in the error."""

    def __str__(self) -> str:
        raise ValueError(f"no text for {KEY}")


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield logging.getLogger("weft.test")
    root.handlers[:], _ = before
    root.setLevel(before[1])


def written_by(format: str) -> io.StringIO:
    stream = io.StringIO()
    logging.getLogger().handlers.clear()  # pytest's own raises what cannot be formatted
    logs.configure("tool-handler", "info", format, stream)
    return stream


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("secret", [KEY, PAIR, "Bearer abcdefg12345", "hf_" + "a1" * 20])
def test_a_secret_at_the_start_of_a_line_of_the_message_is_hidden(
    log: logging.Logger, format: str, secret: str
) -> None:
    stream = written_by(format)
    for text in (f"the page says:\n{secret}", f"\t{secret}", f"\x1b[31m{secret}\x1b[0m", repr(f"a\n{secret}")):
        log.info("%s", text)
        log.info("a field", extra={"fields": {"page": text}})
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("failed")
    shown = stream.getvalue()
    assert secret.removeprefix("Bearer ") not in shown
    assert shown.count(HIDDEN) == 12


def test_the_last_line_of_a_process_hides_a_secret_behind_a_line_break() -> None:
    for format in FORMATS:
        line = logs.last_line("tool-handler", format, f"no app:\n{KEY}\x1b[2J")
        assert KEY not in line
        assert line.isprintable()


@pytest.mark.parametrize("format", FORMATS)
def test_a_known_secret_of_several_lines_is_hidden(log: logging.Logger, format: str) -> None:
    stream = written_by(format)
    with use(Redactor(["first line\nsecond line"])):
        log.info("it says: %s", "first line\nsecond line")
    assert "first line" not in stream.getvalue()


@pytest.mark.parametrize("format", FORMATS)
def test_a_line_that_cannot_be_formatted_names_its_message_and_no_argument(
    log: logging.Logger, format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = written_by(format)
    log.info("took %d", KEY)
    log.info("took %s", Unshowable())
    log.info("took it", extra={"fields": {"odd": Unshowable(), "large": 10**5000, "half": "\ud800", "n": 1}})
    log.info("half of a pair: %s", "\ud800")
    lines = stream.getvalue().splitlines()
    assert [("took" in line, KEY in line) for line in lines] == [(True, False)] * 3 + [(False, False)]
    assert "its arguments cannot be shown" in lines[0]
    assert "half of a pair: ?" in lines[3]
    assert capfd.readouterr() == ("", "")


def test_a_line_that_cannot_be_written_names_its_logger_alone(
    log: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = written_by("text")
    stream.close()
    log.info("took %s", KEY)
    assert capfd.readouterr().err == "weft: a log line of 'weft.test' could not be written: ValueError\n"


def test_control_characters_cannot_forge_a_line_or_drive_a_terminal(log: logging.Logger) -> None:
    stream = written_by("text")
    log.info("a\x1b[2J\r\n\x85\u2028b\u202ec\x00\té")
    assert stream.getvalue().endswith("✓ a\\x1b[2J\\r\\n\\x85\\u2028b\\u202ec\\x00\té\n")
    try:
        raise ValueError("a\x1b[2J\nb\x9b2J")
    except ValueError:
        log.exception("failed")
    assert stream.getvalue().endswith("\n    ValueError: a\\x1b[2J\n    b\\x9b2J\n")


def test_the_frames_of_a_failed_attempt_follow_its_line(log: logging.Logger) -> None:
    stream = written_by("text")
    log.error("failed", extra={"fields": {"traceback": 'File "app.py"\n  raise\x1b[2J', "n": 1}})
    assert stream.getvalue().endswith('failed  n=1\n    File "app.py"\n      raise\\x1b[2J\n')


@pytest.mark.parametrize("format", FORMATS)
def test_a_long_text_is_shortened(log: logging.Logger, format: str) -> None:
    stream = written_by(format)
    long = "word " * 1_000_000
    try:
        raise ValueError(f"first {long} last")
    except ValueError:
        log.exception("%s", long, extra={"fields": {"page": long, "n": 1}})
    shown = stream.getvalue()
    assert len(shown) < 4 * LONGEST
    assert "ValueError: first" not in shown
    assert " last" in shown


def test_fields_of_json_are_shortened_where_together_they_are_too_large(log: logging.Logger) -> None:
    stream = written_by("json")
    log.info("took it", extra={"fields": {"rows": ["x" * 100] * (LONGEST_LINE // 100), "n": 1}})
    line = json.loads(stream.getvalue())
    assert (line["message"], line["n"], len(line["rows"])) == ("took it", "1", LONGEST)
