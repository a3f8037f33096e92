"""The broker's verbs for one partition: publish, read, commit, record, retry, dead-letter, adopt.

The bus knows no agents and no tools: it moves entries, and every change is one function on the broker (see
`functions/`), so that it happens whole or not at all. The same functions run on a server and in `memory://`.
"""

from __future__ import annotations

from runtime_core.bus.verbs.commits import CommitVerbs
from runtime_core.bus.verbs.engines import EngineVerbs
from runtime_core.bus.verbs.failures import FailureVerbs
from runtime_core.bus.verbs.owners import OwnerVerbs
from runtime_core.bus.verbs.record import RecordVerbs
from runtime_core.bus.verbs.survey import SurveyVerbs
from runtime_core.bus.verbs.taking import TakingVerbs
from runtime_core.bus.verbs.tasks import TaskVerbs
from runtime_core.bus.verbs.timers import TimerVerbs
from runtime_core.bus.verbs.topics import TopicVerbs


class EventBus(
    TaskVerbs,
    TopicVerbs,
    TakingVerbs,
    CommitVerbs,
    FailureVerbs,
    EngineVerbs,
    OwnerVerbs,
    TimerVerbs,
    RecordVerbs,
    SurveyVerbs,
):
    """One partition of a namespace, seen by one owner (`verbs/partition.py` says what an owner is)."""
