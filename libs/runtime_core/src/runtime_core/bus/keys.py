"""Every key of the broker, one function each."""

from __future__ import annotations

GROUPS = {
    "agent": "agent-handler",
    "tool": "tool-handler",
    "ray": "ray-gateway",
    "spark": "spark-gateway",
}
"""The one consumer group of each work stream."""

NAMESPACE_FORMAT = 1
"""What this release writes into a namespace. It reads its own format and the one before."""
STATE_MANAGER = "state-manager"
TRAJECTORY_RECORDER = "trajectory-recorder"


def group_of(stream: str) -> str:
    """The group of a work stream, named with or without its pool (`tool`, `tool:gpu`)."""
    return GROUPS[stream.partition(":")[0]]


class Keys:
    """The keys of one partition of a namespace. `{p}` makes them share a Cluster slot."""

    __slots__ = ("base", "namespace", "partition")

    def __init__(self, namespace: str, partition: int) -> None:
        self.namespace = namespace
        self.partition = partition
        self.base = f"{namespace}:{{{partition}}}:"

    def stream(self, name: str) -> str:
        """A work stream, as in `tool` or `tool:gpu`."""
        return self.base + name

    @property
    def record(self) -> str:
        return self.base + "record"

    @property
    def dead(self) -> str:
        return self.base + "dead"

    @property
    def timers(self) -> str:
        return self.base + "timers"

    @property
    def meta(self) -> str:
        """Limits, format version and clocks of the partition: a hash."""
        return self.base + "meta"

    @property
    def alive(self) -> str:
        """Owners by the value of the beat clock at their last heartbeat: a sorted set."""
        return self.base + "alive"

    @property
    def replies(self) -> str:
        """Answers on their way to a `replyto` outside the partition: a stream."""
        return self.base + "replies"

    @property
    def asks(self) -> str:
        """What instances in other partitions are asked, on its way to them: a stream."""
        return self.base + "asks"

    @property
    def requests(self) -> str:
        """Requests to other partitions that are open, by when to look at them next (ms): a sorted set."""
        return self.base + "requests"

    @property
    def index(self) -> str:
        """Task ids by creation time: a sorted set."""
        return self.base + "index"

    @property
    def open_tasks(self) -> str:
        """Tasks that have not ended, by when they were started: a sorted set, for metrics."""
        return self.base + "open"

    @property
    def mailboxes(self) -> str:
        """Instances by how many runs wait in their mailboxes: a sorted set, for metrics."""
        return self.base + "mailboxes"

    @property
    def queues(self) -> str:
        """How many new tasks wait for each work stream: a hash, with the state of their turns."""
        return self.base + "queues"

    @property
    def tenants(self) -> str:
        """Settings by tenant: a hash of weight, most open tasks and most tasks a second."""
        return self.base + "tenants"

    def turns(self, stream: str) -> str:
        """Tenants whose tasks wait for a work stream, by the virtual time of their next turn: a sorted set."""
        return f"{self.base}turns:{stream}"

    def queue(self, stream: str, tenant: str) -> str:
        """A tenant's tasks that wait for a work stream: a sorted set."""
        return f"{self.base}queue:{stream}|{tenant}"

    def open_tasks_of(self, tenant: str) -> str:
        """Open tasks of a named tenant, by when they were started: a sorted set."""
        return f"{self.base}open:{tenant}"

    @property
    def agents(self) -> str:
        """Known agents and their work streams: a hash."""
        return self.base + "agents"

    @property
    def tools(self) -> str:
        return self.base + "tools"

    @property
    def engines(self) -> str:
        """Work streams of engines that gateways serve, or that steps have waited on: a hash, each under itself."""
        return self.base + "engines"

    @property
    def gateways(self) -> str:
        """Streams of engines, and who serves them, by the beat clock when they last said so: a sorted set."""
        return self.base + "gateways"

    @property
    def engine_functions(self) -> str:
        """Known engine functions, with and without their versions, and their pools: a hash."""
        return self.base + "functions"

    @property
    def interleaved(self) -> str:
        """Agents whose instances handle events beside each other: a hash."""
        return self.base + "interleaved"

    @property
    def enders(self) -> str:
        """Agents whose apps have hooks at the end of a task, and the agents that run those: a hash."""
        return self.base + "enders"

    @property
    def topics(self) -> str:
        """Who has subscribed to what: a hash by topic, with prefixes under `^`."""
        return self.base + "topics"

    @property
    def unheard(self) -> str:
        """Messages on topics that nobody had subscribed to: a stream."""
        return self.base + "unheard"

    @property
    def manifests(self) -> str:
        """What each app and pool has declared: a hash of JSON."""
        return self.base + "manifests"

    @property
    def submits(self) -> str:
        """Submits of the dedupe window by source and id: a hash."""
        return self.base + "seen"

    @property
    def submits_in_order(self) -> str:
        """The same, oldest first: a list of creation time, source and id."""
        return self.base + "seenq"

    @property
    def schedules(self) -> str:
        """Schedules by id, as JSON: a hash, in the first partition."""
        return self.base + "schedules"

    @property
    def scheduled(self) -> str:
        """Their ids by the time when they are due: a sorted set."""
        return self.base + "scheduled"

    @property
    def publishers(self) -> str:
        """Publishers with ingress streams of their own, as JSON by name: a hash, in the first partition."""
        return self.base + "publishers"

    @property
    def places(self) -> str:
        """Partitions of tasks that live elsewhere than their id says: a hash."""
        return self.base + "places"

    @property
    def started(self) -> str:
        """Calls that may not be repeated and have begun: a hash of owners."""
        return self.base + "started"

    @property
    def stopped(self) -> str:
        """Tasks that ended early in the last minutes, by when: a sorted set."""
        return self.base + "stopped"

    @property
    def quarantine(self) -> str:
        return self.base + "quarantine"

    @property
    def states(self) -> str:
        """Changes of runs, nodes and groups, for those who wait for them: a stream."""
        return self.base + "states"

    def node(self, node: str) -> str:
        """A run node that user code has made: a hash."""
        return f"{self.base}node:{node}"

    def group(self, group: str) -> str:
        """A group of run nodes: a hash."""
        return f"{self.base}group:{group}"

    def nodes(self, index: str) -> str:
        """Ids of run nodes, as in `nodes:task/<id>`, by when they expire: a sorted set."""
        return f"{self.base}nodes:{index}"

    def task(self, task: str) -> str:
        return f"{self.base}task:{task}"

    def run(self, task: str, run: str) -> str:
        """The hash of a run; that of a task's first run is the task's own."""
        return self.task(task) if run == "r" else f"{self.base}run:{task}/{run}"

    def out(self, task: str) -> str:
        return f"{self.base}out:{task}"

    def letters(self, counts: str) -> str:
        """Counts of dead letters: `bytes` by share, `trimmed` by cause and share. Hashes; `letters.lua` has more."""
        return f"{self.base}letters:{counts}"

    def reply(self, client: str) -> str:
        return f"{self.base}reply:{client}"

    def instance(self, agent: str, key: str) -> str:
        return f"{self.base}inst:{agent}/{key}"

    def mailbox(self, agent: str, key: str) -> str:
        return f"{self.base}mail:{agent}/{key}"


def ingress(namespace: str, publisher: str = "") -> str:
    """The stream on which any language submits tasks: that of one publisher, or the one that trusted programs share."""
    return f"{namespace}:tasks:{publisher}" if publisher else f"{namespace}:tasks"


def namespace_settings(namespace: str) -> str:
    """What is fixed for the whole namespace (partitions, format): a hash."""
    return f"{namespace}:settings"
