"""Brings the tables of an older release up to date, in place; the same statements in SQLite and PostgreSQL."""

from __future__ import annotations

from runtime_core.errors import ConfigurationError
from runtime_core.trajectory.tables import FORMAT

_TO_FORMAT: dict[int, tuple[str, ...]] = {
    # Contents beside the steps, forks, tasks by session. What was recorded before stays as it is.
    2: (
        "ALTER TABLE weft_steps ADD COLUMN input_refs TEXT",
        "ALTER TABLE weft_steps ADD COLUMN output_refs TEXT",
        "CREATE INDEX IF NOT EXISTS weft_tasks_by_session ON weft_tasks (namespace, session, ended, task)",
    ),
    # What is known of a model call by the names of OpenTelemetry's conventions.
    3: ("ALTER TABLE weft_steps ADD COLUMN attributes TEXT",),
}
"""Format → what makes it from the one before; new tables are there already."""


def statements(stored: int) -> list[str]:
    """Return what makes this release's format from the stored one. ConfigurationError where the stored one is newer."""
    if stored > FORMAT:
        raise ConfigurationError(
            f"the trajectory store has format {stored}, this release knows up to {FORMAT}: upgrade it"
        )
    return [statement for number in range(stored + 1, FORMAT + 1) for statement in _TO_FORMAT[number]]
