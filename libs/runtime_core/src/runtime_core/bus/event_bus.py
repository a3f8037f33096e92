"""The broker's verbs for one partition: publish, read, commit, record, retry, dead-letter, adopt.

The bus runs no agents and no tools: it moves entries. One function on the broker makes each change (see `functions/`),
so that it happens completely or not at all.
"""

from __future__ import annotations

from runtime_core.bus.admin import BacklogVerbs, EngineVerbs, RecordVerbs, TimerVerbs
from runtime_core.bus.commits import CommitVerbs, FailureVerbs
from runtime_core.bus.deliveries import OwnerVerbs, TakingVerbs
from runtime_core.bus.tasks import TaskVerbs
from runtime_core.bus.topics import TopicVerbs


class EventBus(
    TopicVerbs,
    TaskVerbs,
    TakingVerbs,
    CommitVerbs,
    FailureVerbs,
    EngineVerbs,
    OwnerVerbs,
    TimerVerbs,
    RecordVerbs,
    BacklogVerbs,
):
    """One partition of a namespace, seen by one owner (`bus/partition.py` says what an owner is)."""
