"""The guards of a delivery. The model drops one to see what breaks."""

from __future__ import annotations

from typing import NamedTuple


class Guards(NamedTuple):
    owner_fence: bool = True
    """Writes of an owner that was declared dead are refused."""
    state_fence: bool = True
    """A write counts only while the run's `cur` is this entry, or the call's step is missing."""
    dedupe_submit: bool = True
    release_on_commit: bool = True
    release_on_dead_letter: bool = True
    retry_keeps_instance: bool = True
    wait_keeps_instance: bool = True
    resume_in_commit: bool = True
    """The commit of the last result resumes the run. Otherwise a second call does."""
    dead_call_answers: bool = True
    """The dead letter of a call gives its step an error."""
    promote_in_one: bool = True
    """A due timer leaves `timers` in the function that appends its entry."""
    reconcile: bool = True
    """A consumer takes up its own pending entries that it does not hold."""
    adopt: bool = True
    """Living consumers take what dead ones held."""
    count_deliveries: bool = True
    record_if_absent: bool = True
    """A step's result in mid-turn is stored only if none is; the stored one is used."""
    journal_from_broker: bool = True
    """A turn asks the broker whether the run has a journal. Otherwise it guesses from the delivery count."""
    commit_checks_journal: bool = True
    """A commit counts only if the journal still holds what the turn used. Otherwise the run starts over."""
    redrive_queues: bool = True
    """A redriven run passes through the mailbox. Otherwise its call is appended, and the run is held at once."""
    redrive_removes_letter: bool = True
    """The function that redrives removes the letter, so a second redrive finds nothing."""
