"""The scenarios that hold, and the dropped guards that each break one."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.delivery.guards import Guards
from tests.model.delivery.scenario import Scenario

THREE = (("m1", "m2"), ("m3",))
TAIL = ("tail", "crash", "leave")


def scenarios(depth: int) -> dict[str, Scenario]:
    """Return each scenario with at most `depth` faults."""
    return {
        "a local step and two tools, 2 messages": Scenario(faults=depth),
        "a local step and two tools, 3 messages": Scenario(THREE, depth),
        "two agents, 3 messages": Scenario(THREE, depth, fan=False, forwards=True),
        "a message that kills its process": Scenario(THREE, depth, fan=False, poison=("m3",)),
        "a call that kills its process": Scenario(faults=depth, poison=("t1",)),
        "a dead call is redriven": Scenario(faults=depth, failing=("t1",), redrives=2),
        "a dead message is redriven": Scenario(THREE, depth, fan=False, failing=("m1",), redrives=2),
        "the broker loses its tail, no other fault": Scenario(faults=1, kinds=("tail",)),
        "the broker loses its tail, 1 message": Scenario((("m1",),), depth, TAIL),
    }


class Dropped(NamedTuple):
    """A variant without some guards, and how it breaks; `broken` is empty where other guards cover for it."""

    guards: Guards
    broken: str
    scenario: Scenario = Scenario()


def without(*names: str) -> Guards:
    return Guards()._replace(**dict.fromkeys(names, False))


REDRIVE = Scenario(faults=0, failing=("t1",), redrives=2)

DROPPED = {
    "state fence": Dropped(without("state_fence"), "the result of t1 was applied twice"),
    "both fences, pauses only": Dropped(
        without("state_fence", "owner_fence"), "the result of t1 was applied twice", Scenario(kinds=("pause",))
    ),
    "state fence, pauses only": Dropped(without("state_fence"), "", Scenario(kinds=("pause",))),
    "owner fence": Dropped(without("owner_fence"), ""),
    "dedupe of submits": Dropped(without("dedupe_submit"), "an agent is stuck"),
    "release in the commit": Dropped(without("release_on_commit"), "an agent is stuck"),
    "release in the dead letter": Dropped(without("release_on_dead_letter"), "an agent is stuck", Scenario(faults=2)),
    "retry keeps the instance": Dropped(without("retry_keeps_instance"), "two events of one agent in flight"),
    "retry keeps the instance, order": Dropped(
        without("retry_keeps_instance"), "handled out of order", Scenario(fan=False, check_flight=False)
    ),
    "waiting keeps the instance": Dropped(without("wait_keeps_instance"), "two events of one agent in flight"),
    "waiting keeps the instance, order": Dropped(
        without("wait_keeps_instance"), "handled out of order", Scenario(check_flight=False)
    ),
    "resume in the commit": Dropped(without("resume_in_commit"), "two events of one agent in flight"),
    "resume in the commit, crash in between": Dropped(
        without("resume_in_commit"), "an agent is stuck", Scenario(kinds=("crash",), check_flight=False)
    ),
    "a dead call answers its step": Dropped(without("dead_call_answers"), "an agent is stuck", Scenario(faults=2)),
    "promote in one function": Dropped(
        without("promote_in_one"), "two events of one agent in flight", Scenario(faults=2)
    ),
    "own pending entries are reconciled": Dropped(without("reconcile"), "an entry stays pending"),
    "dead owners' entries are adopted": Dropped(without("adopt"), "an entry stays pending"),
    "deliveries are counted": Dropped(
        without("count_deliveries"), "work goes on for ever", Scenario(THREE, 0, fan=False, poison=("m3",))
    ),
    "a step is recorded if absent": Dropped(without("record_if_absent"), ""),
    "a step is recorded if absent, unchecked": Dropped(
        without("record_if_absent", "commit_checks_journal"), "the replay diverges"
    ),
    "journal read from the broker, graceful leave": Dropped(
        without("journal_from_broker"), "a finished step ran again", Scenario(kinds=("leave",))
    ),
    "journal read from the broker, group lost": Dropped(
        without("journal_from_broker"), "a finished step ran again", Scenario(kinds=("lost group",))
    ),
    "journal read from the broker, kills only": Dropped(
        without("journal_from_broker"), "", Scenario(kinds=("crash", "pause"), faults=2)
    ),
    "the commit checks its journal": Dropped(
        without("commit_checks_journal"), "the replay diverges", Scenario(kinds=("tail",))
    ),
    "redrive queues the run": Dropped(without("redrive_queues"), "two events of one agent in flight", REDRIVE),
    "redrive queues the run, state": Dropped(
        without("redrive_queues"), "lost update", REDRIVE._replace(check_flight=False)
    ),
    "redrive removes the letter": Dropped(without("redrive_removes_letter"), "an agent is stuck", REDRIVE),
}
