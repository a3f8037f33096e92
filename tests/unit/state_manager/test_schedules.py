"""The times of cron expressions, even when the clock changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from runtime_core.state_manager.schedules import Cron
from weft.errors import InvalidInput

BERLIN = "Europe/Berlin"
NEW_YORK = "America/New_York"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(expression: str, after: str, count: int, zone: str = "UTC") -> list[str]:
    """Return the next times in the zone's local time, with its offset."""
    cron, moment, found = Cron.parse(expression, ZoneInfo(zone)), utc(after), []
    for _ in range(count):
        following = cron.after(moment)
        assert following is not None
        moment = following
        found.append(moment.astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M %z"))
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/20 * * * *", ["01-31 23:40", "02-01 00:00", "02-01 00:20"]),
        ("5/25 23 * * *", ["01-31 23:30", "01-31 23:55", "02-01 23:05"]),
        ("0 9-17/4 * * mon-fri", ["02-01 09:00", "02-01 13:00", "02-01 17:00"]),
        ("0 0 * * fri-sun", ["02-02 00:00", "02-03 00:00", "02-04 00:00"]),
        ("0 0 * * 7", ["02-04 00:00", "02-11 00:00", "02-18 00:00"]),
        ("30 6 1,15 * *", ["02-01 06:30", "02-15 06:30", "03-01 06:30"]),
        ("0 0 13 * fri", ["02-02 00:00", "02-09 00:00", "02-13 00:00"]),
        ("0 0 31 * *", ["03-31 00:00", "05-31 00:00", "07-31 00:00"]),
        ("0 12 * JAN,dec sat", ["12-07 12:00", "12-14 12:00", "12-21 12:00"]),
        ("@monthly", ["02-01 00:00", "03-01 00:00", "04-01 00:00"]),
        ("@Hourly", ["02-01 00:00", "02-01 01:00", "02-01 02:00"]),
    ],
)
def test_times_follow_the_expression(expression: str, expected: list[str]) -> None:
    """2024-01-31 is a Wednesday."""
    assert times(expression, "2024-01-31 23:25", 3) == [f"{time} +0000" for time in expected]


def test_a_distant_leap_day_is_found() -> None:
    assert Cron.parse("0 0 29 2 *", ZoneInfo("UTC")).after(utc("2096-03-01 00:00")) == utc("2104-02-29 00:00")


def test_a_next_time_is_always_later() -> None:
    cron = Cron.parse("0 9 * * *", ZoneInfo("UTC"))
    assert cron.after(utc("2024-05-01 09:00")) == utc("2024-05-02 09:00")
    assert cron.after(utc("2024-05-01 08:59:59.999")) == utc("2024-05-01 09:00")


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("", "not a cron expression"),
        ("* * * *", "not a cron expression"),
        ("60 * * * *", "from 0 to 59"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day of month"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "day of week"),
        ("*/0 * * * *", "step of 0"),
        ("9-5 * * * *", "backwards"),
        ("*-5 * * * *", "not a minute"),
        ("1,,2 * * * *", "not a minute"),
        ("x * * * *", "not a minute"),
        ("0 0 31 feb *", "never matches"),
    ],
)
def test_an_invalid_expression_is_refused_by_name(expression: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word) as error:
        Cron.parse(expression, ZoneInfo("UTC"), "data.cron")
    assert error.value.field == "data.cron"


def test_a_skipped_time_starts_one_task_later() -> None:
    """In Berlin 02:00 to 02:59 of 2024-03-31 do not exist."""
    assert times("30 2 * * *", "2024-03-30 00:00", 3, BERLIN) == [
        "03-30 02:30 +0100", "03-31 03:30 +0200", "04-01 02:30 +0200",
    ]  # fmt: skip
    assert times("0 2,3 * * *", "2024-03-31 00:00", 3, BERLIN) == [
        "03-31 03:00 +0200", "04-01 02:00 +0200", "04-01 03:00 +0200",
    ]  # fmt: skip


def test_a_repeated_time_starts_one_task() -> None:
    """In New York 01:00 to 01:59 of 2024-11-03 come twice."""
    assert times("30 1 * * *", "2024-11-03 00:00", 2, NEW_YORK) == ["11-03 01:30 -0400", "11-04 01:30 -0500"]


def test_every_hour_follows_the_hours_that_pass() -> None:
    assert times("30 * * * *", "2024-11-03 05:00", 3, NEW_YORK) == [
        "11-03 01:30 -0400", "11-03 01:30 -0500", "11-03 02:30 -0500",
    ]  # fmt: skip
    assert times("30 * * * *", "2024-03-31 00:00", 2, BERLIN) == ["03-31 01:30 +0100", "03-31 03:30 +0200"]


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Australia/Lord_Howe", "America/Havana", "UTC"])
@pytest.mark.parametrize("expression", ["*/15 * * * *", "0,30 0-4 * * *", "20 3 * * sun", "0 0 1 * *"])
def test_times_only_go_forward_and_agree_with_each_other(zone: str, expression: str) -> None:
    """From every moment of a year with both clock changes, the next time is the first of all later ones."""
    cron = Cron.parse(expression, ZoneInfo(zone))
    moment, last = utc("2024-01-01 00:00"), utc("2025-01-01 00:00")
    found = []
    while (following := cron.after(moment)) is not None and following < last:
        assert following > moment
        assert cron.after(following - timedelta(seconds=1)) == following
        found.append(following)
        moment = following + timedelta(hours=5)
    assert found == sorted(set(found))


@pytest.mark.parametrize("expression", ["*/15 * * * *", "0 9 * * *", "0 0 1 * *", "0 0 29 2 *"])
@pytest.mark.parametrize("later", [timedelta(0), timedelta(minutes=40), timedelta(days=3), timedelta(days=4000)])
def test_the_last_time_until_a_moment_is_found(expression: str, later: timedelta) -> None:
    cron = Cron.parse(expression, ZoneInfo(BERLIN))
    since = cron.after(utc("2024-01-01 00:00"))
    assert since is not None
    found = cron.before_or_at(since + later, since)
    assert since <= found <= since + later
    following = cron.after(found)
    assert following is not None
    assert following > since + later
