"""The state-manager: admission in order, answers kept, and the relay between partitions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

ADMITTER = "services/state_manager/admitter.py"
RELAY = "services/state_manager/relay.py"

MUTANTS: tuple[Mutant, ...] = (
    python(
        ADMITTER,
        "left_behind",
        '        cursor = "0-0"\n        waiting',
        '        cursor = ">"\n        waiting',
        "a new admitter admits what the last one had read",
        "integration:admission_order",
    ),
    python(
        ADMITTER,
        "rejects",
        "            if command.error is not None:\n",
        "            if False:\n",
        "a bad command is answered and kept",
        "integration:bad_input",
    ),
    python(
        ADMITTER,
        "epoch",
        "reply=wanted.replyto, epoch=epoch)",
        'reply=wanted.replyto, epoch="")',
        "an admitter that has lost the lead admits nothing",
        "integration:admission_order",
    ),
    python(
        ADMITTER,
        "not_yet_waits",
        "except (NotYet, NotDurable):\n                    return False\n                except InvalidInput",
        "except InvalidInput",
        "a command that cannot be admitted yet is admitted later",
        "integration:admission_order",
        "integration:services",
    ),
    python(
        RELAY,
        "deletes_after",
        "            if place not in looking.passed and await self._carried(",
        '            await call("XDEL", stream, entry)\n'
        "            if place not in looking.passed and await self._carried(",
        "an answer that could not be carried is carried later",
        "contracts:open_requests",
        "integration:partitions",
    ),
    python(
        RELAY,
        "known_answers",
        "if back and not submitted.started and submitted.status in ENDED:",
        "if False:",
        "a known question is answered from its result",
        "contracts:open_requests",
    ),
    python(
        RELAY,
        "repeats",
        'group.create_task(self._watch_requests(), name="requests")',
        "pass",
        "open questions are repeated on a schedule",
        "integration:partitions",
    ),
    python(
        RELAY,
        "follows_running",
        "if status is not None and status.decode() not in ENDED:",
        "if False:",
        "a question whose task runs is not repeated",
        "contracts:open_requests",
    ),
    python(
        RELAY,
        "cancel_again",
        'if answer != "cancelled":',
        "if True:",
        "a cancel is repeated until the task is known to have ended",
        "contracts:open_requests",
    ),
    python(
        RELAY,
        "overloaded_waits",
        "if error.retry_after_seconds is None:",
        "if True:",
        "a question to a full partition waits",
        "integration:partitions",
    ),
    python(
        RELAY,
        "refusal_answers",
        "        if back:\n            task, run, step",
        "        if False:\n            task, run, step",
        "a question that is refused is answered with an error",
        "integration:partitions",
    ),
    python(
        RELAY,
        "same_id",
        "event_id=there,",
        "event_id=there + str(time.time_ns()),",
        "a question that is carried twice starts one task",
        "integration:partitions",
        "contracts:asked_elsewhere",
    ),
)
