"""Every key of the broker, one function each."""

from __future__ import annotations

from runtime_core.wire.ids import ROOT_RUN

GROUPS = {
    "agent": "agent-handler",
    "tool": "tool-handler",
    "ray": "ray-gateway",
    "spark": "spark-gateway",
}
"""The one consumer group of each work stream."""

NAMESPACE_FORMAT = 1
"""The format that this release writes. It reads this format and the one before."""
OWN_NAMESPACE = "weft-own-"
"""The prefix of private namespaces, for programs that name none."""
OWN_NAMESPACES = "weft-own:{0}"
"""Private namespaces by the time (ms) of their programs' last note: a sorted set, in partition 0's Cluster slot."""
STATE_MANAGER = "state-manager"
TRAJECTORY_RECORDER = "trajectory-recorder"


def group_of(stream: str) -> str:
    """Return the group of a work stream, whose name may include a pool (`tool`, `tool:gpu`)."""
    return GROUPS[stream.partition(":")[0]]


class Keys:
    """The keys of one partition of a namespace. They share a Cluster slot by `{p}`."""

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
        """Owners by the heartbeat clock at their last heartbeat: a sorted set."""
        return self.base + "alive"

    @property
    def replies(self) -> str:
        """Answers to send to a `replyto` outside the partition: a stream."""
        return self.base + "replies"

    @property
    def asks(self) -> str:
        """Requests to send to instances in other partitions: a stream."""
        return self.base + "asks"

    @property
    def requests(self) -> str:
        """Open requests to other partitions, by the time of their next check (ms): a sorted set."""
        return self.base + "requests"

    @property
    def index(self) -> str:
        """Task ids by creation time: a sorted set."""
        return self.base + "index"

    def index_of(self, tenant: str) -> str:
        """Task ids of a named tenant by creation time: a sorted set."""
        return f"{self.base}index:{tenant}"

    @property
    def indexes(self) -> str:
        """Tenants that have an index of tasks, by the creation time of its oldest task: a sorted set."""
        return self.base + "indexes"

    @property
    def open_tasks(self) -> str:
        """Open tasks by the time of their start, or of being reopened: a sorted set, for metrics and lists."""
        return self.base + "open"

    @property
    def mailboxes(self) -> str:
        """Instances by the number of runs in their mailboxes: a sorted set, for metrics."""
        return self.base + "mailboxes"

    @property
    def queues(self) -> str:
        """How many tasks and calls wait for each work stream, and the state of their turns: a hash."""
        return self.base + "queues"

    @property
    def tenants(self) -> str:
        """Settings by tenant (weight, limits on open tasks and on tasks per second): a hash."""
        return self.base + "tenants"

    @property
    def waiting(self) -> str:
        """Deliveries that wait for slots of limits, by `task|path`: a hash."""
        return self.base + "waiting"

    @property
    def limited(self) -> str:
        """Numbers of runs and calls that hold or await slots of limits, by agent or tool: a hash."""
        return self.base + "limited"

    def slots_of_task(self, task: str) -> str:
        """Limits that a task's runs and calls hold or wait for, by path: a hash."""
        return f"{self.base}held:{task}"

    def turns(self, stream: str) -> str:
        """Tenants whose tasks or calls wait for a work stream, by the virtual time of their next turn: a sorted set."""
        return f"{self.base}turns:{stream}"

    def queue(self, stream: str, tenant: str) -> str:
        """A tenant's tasks that wait for a work stream; after a newline, its running tasks' calls: a sorted set."""
        return f"{self.base}queue:{stream}|{tenant}"

    def open_tasks_of(self, tenant: str) -> str:
        """Open tasks of a named tenant, by their start time: a sorted set."""
        return f"{self.base}open:{tenant}"

    @property
    def agents(self) -> str:
        """Declared agents and their work streams: a hash."""
        return self.base + "agents"

    @property
    def tools(self) -> str:
        return self.base + "tools"

    @property
    def engines(self) -> str:
        """Work streams of engines that gateways serve, or that steps wait on: a hash, each under its own name."""
        return self.base + "engines"

    @property
    def gateways(self) -> str:
        """Streams of engines, and their gateways, by the heartbeat clock at the last announcement: a sorted set."""
        return self.base + "gateways"

    @property
    def engine_functions(self) -> str:
        """Declared engine functions, with and without versions, and their pools: a hash."""
        return self.base + "functions"

    @property
    def interleaved(self) -> str:
        """Agents whose instances handle events concurrently: a hash."""
        return self.base + "interleaved"

    @property
    def end_hooks(self) -> str:
        """Agents whose apps have hooks for the end of a task, and the agents that run those hooks: a hash."""
        return self.base + "end_hooks"

    @property
    def topics(self) -> str:
        """Subscriptions by topic, and those to prefixes under `^`: a hash."""
        return self.base + "topics"

    @property
    def undelivered(self) -> str:
        """Messages on topics without subscribers, for agents that appear later: a stream."""
        return self.base + "undelivered"

    @property
    def manifests(self) -> str:
        """Manifests by app and pool, as JSON: a hash."""
        return self.base + "manifests"

    @property
    def served(self) -> str:
        """What each handler can run, by owner: JSON of names by kind; a hash."""
        return self.base + "served"

    @property
    def submits(self) -> str:
        """The dedupe window: submits by source and id: a hash."""
        return self.base + "seen"

    @property
    def submits_in_order(self) -> str:
        """The dedupe window in order, oldest first: a list of creation time, source and id."""
        return self.base + "seen_order"

    @property
    def schedules(self) -> str:
        """Schedules by id, as JSON: a hash, in the first partition."""
        return self.base + "schedules"

    @property
    def scheduled(self) -> str:
        """Ids of schedules by the time when they are due: a sorted set."""
        return self.base + "scheduled"

    @property
    def publishers(self) -> str:
        """Publishers with separate ingress streams, as JSON by name: a hash, in the first partition."""
        return self.base + "publishers"

    @property
    def api_keys(self) -> str:
        """API keys of the HTTP gateway, as JSON by id, with digests only: a hash, in the first partition."""
        return self.base + "api-keys"

    @property
    def answer_bytes(self) -> str:
        """Bytes of all answers that were ever written to a publisher, by its name: a hash."""
        return self.base + "answers"

    def answers(self, publisher: str) -> str:
        """The answers that were written to a publisher, the oldest first: a stream."""
        return f"{self.base}answers:{publisher}"

    @property
    def places(self) -> str:
        """Partitions of tasks that are not in the partition of their id: a hash."""
        return self.base + "places"

    @property
    def started(self) -> str:
        """Started calls that may not be repeated, and their owners: a hash."""
        return self.base + "started"

    @property
    def stopped(self) -> str:
        """Tasks that ended early in the last minutes, by time: a sorted set."""
        return self.base + "stopped"

    @property
    def quarantine(self) -> str:
        return self.base + "quarantine"

    @property
    def states(self) -> str:
        """Changes of runs, nodes and groups, for waiters: a stream."""
        return self.base + "states"

    def node(self, node: str) -> str:
        """A run node that user code has created: a hash."""
        return f"{self.base}node:{node}"

    def group(self, group: str) -> str:
        """A group of run nodes: a hash."""
        return f"{self.base}group:{group}"

    def nodes(self, index: str) -> str:
        """Ids of run nodes by their expiry time, as in `nodes:task/<id>`: a sorted set."""
        return f"{self.base}nodes:{index}"

    def task(self, task: str) -> str:
        return f"{self.base}task:{task}"

    def run(self, task: str, run: str) -> str:
        """The hash of a run. A task's first run shares the task's hash."""
        return self.task(task) if run == ROOT_RUN else f"{self.base}run:{task}/{run}"

    def out(self, task: str) -> str:
        return f"{self.base}out:{task}"

    def letters(self, counts: str) -> str:
        """Counts of dead letters: `bytes` by share, `trimmed` by cause and share. Hashes; see `letters.lua`."""
        return f"{self.base}letters:{counts}"

    def reply(self, client: str) -> str:
        return f"{self.base}reply:{client}"

    def instance(self, agent: str, key: str) -> str:
        return f"{self.base}inst:{agent}/{key}"


def ingress(namespace: str, publisher: str = "") -> str:
    """Return the stream for submits from any language: that of a publisher, or the one that trusted programs share."""
    return f"{namespace}:tasks:{publisher}" if publisher else f"{namespace}:tasks"


def namespace_settings(namespace: str) -> str:
    """Return the key of the namespace's fixed settings (partitions, format): a hash."""
    return f"{namespace}:settings"
