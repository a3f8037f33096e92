"""The times of a cron expression: five fields, in a time zone, through changes of the clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput

MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# A 29th of February may be eight years away.
SEARCH_DAYS = 366 * 9

_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_DAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 7, _DAYS),
)
_ITEM = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class Cron:
    """Minute, hour, day of month, month, day of week, as in `*/5 9-17 * * mon-fri`.

    As with cron, a day matches where either of the two day fields does, if both are restricted.

    Where the clock is put forward, a time that is skipped comes as much later as the clock was moved (02:30 as 03:30);
    where it is put back, a time that occurs twice comes once, at its first occurrence. An expression for every hour
    follows the hours that really pass: it skips nothing and comes in both of the repeated hours.
    """

    expression: str
    zone: ZoneInfo
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Both day fields are restricted: one of them is enough."""

    @classmethod
    def parse(cls, expression: str, zone: ZoneInfo, field: str = "cron") -> Cron:
        """Raises InvalidInput (`field`), also for an expression that never comes."""
        parts = MACROS.get(expression.strip().lower(), expression).split()
        if len(parts) != len(_FIELDS):
            known = ", ".join(MACROS)
            raise InvalidInput(
                field,
                f"{quoted(expression)} is no cron expression: give minute, hour, day of month, month and day of week, "
                f"as in `*/5 * * * *`, or one of {known}",
            )
        values = [_values(part, *about, field) for part, about in zip(parts, _FIELDS, strict=True)]
        cron = cls(
            expression=expression,
            zone=zone,
            minutes=tuple(sorted(values[0])),
            hours=tuple(sorted(values[1])),
            days=frozenset(values[2]),
            months=frozenset(values[3]),
            weekdays=frozenset(day % 7 for day in values[4]),
            either_day=not parts[2].startswith("*") and not parts[4].startswith("*"),
        )
        if cron.after(datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise InvalidInput(field, f"{quoted(expression)} never comes: no month has such a day")
        return cron

    def after(self, moment: datetime) -> datetime | None:
        """The first time after `moment` (both UTC, whole minutes); None where there is none within nine years."""
        local = moment.astimezone(self.zone)
        # An hour earlier, since a skipped time comes later than it says.
        day, from_hour = local.date(), local.hour - 1
        for _ in range(SEARCH_DAYS):
            if self._has(day):
                for instant in self._of_day(day, from_hour):
                    if instant > moment:
                        return instant
            day, from_hour = day + timedelta(days=1), 0
        return None

    def before_or_at(self, moment: datetime, since: datetime) -> datetime:
        """The last time from `since`, which is one, to `moment`."""
        latest = since
        # Short spans first: most expressions come often.
        for span in (timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=367)):
            start = moment - span
            if start <= since:
                break
            found = self.after(start)
            if found is not None and found <= moment:
                latest = found
                break
        while (found := self.after(latest)) is not None and found <= moment:
            latest = found
        return latest

    def _has(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (of_month or of_week) if self.either_day else (of_month and of_week)

    def _of_day(self, day: date, from_hour: int) -> Iterator[datetime]:
        """The instants of a day in order, hour by hour: most days are asked for one of them."""
        every_hour = len(self.hours) == 24
        for hour in self.hours:
            if hour < from_hour:
                continue
            instants = set()
            for minute in self.minutes:
                local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=self.zone)
                first, second = local.astimezone(UTC), local.replace(fold=1).astimezone(UTC)
                skipped = first.astimezone(self.zone).replace(tzinfo=None) != local.replace(tzinfo=None)
                if every_hour and skipped:
                    continue
                instants.add(first)
                if every_hour and second > first:
                    instants.add(second)
            yield from sorted(instants)


def _values(text: str, name: str, lowest: int, highest: int, names: dict[str, int], field: str) -> set[int]:
    found: set[int] = set()
    for item in text.lower().split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match["first"] == "*" and match["last"]):
            raise InvalidInput(field, f"{quoted(item)} is no {name}")
        step = int(match["step"] or 1)
        if step == 0:
            raise InvalidInput(field, f"{quoted(item)} has a step of 0 in {name}")
        if match["first"] == "*":
            first, last = lowest, highest
        else:
            first = _number(match["first"], name, lowest, highest, names, field)
            # `5/10` goes on from 5 to the end, as with cron.
            last = highest if match["step"] else first
            if match["last"]:
                last = _number(match["last"], name, lowest, highest, names, field)
                if names is _DAYS and last == 0:
                    last = 7  # Sunday ends a week as well as it begins one
        if last < first:
            raise InvalidInput(field, f"{quoted(item)} goes backwards in {name}")
        found.update(range(first, last + 1, step))
    return found


def _number(text: str, name: str, lowest: int, highest: int, names: dict[str, int], field: str) -> int:
    number = names.get(text)
    if number is None and text.isascii() and text.isdecimal() and len(text) < 4:
        number = int(text)
    if number is None or not lowest <= number <= highest:
        raise InvalidInput(field, f"{quoted(text)} is no {name} from {lowest} to {highest}")
    return number
