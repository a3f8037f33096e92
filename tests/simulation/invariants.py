"""The invariants at the end of every history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.topics import task_of_message
from runtime_core.state_manager.relay import ANSWER_OVERHEAD
from runtime_core.wire.commands import SIGNAL
from runtime_core.wire.events import REJECTED, StreamEvent, TaskOutput
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.ids import task_of_message as message_of_step
from tests.simulation import faults, schedules
from tests.simulation.programs import EAGER, FRESH, LATE, NO_MESSAGE, SUBSCRIPTIONS, UNHEARD
from tests.simulation.services import MOST_ANSWER_BYTES
from tests.simulation.snapshot import ENDED, Snapshot, Violation
from tests.simulation.tasks import uses
from tests.simulation.transport import position

if TYPE_CHECKING:
    from tests.simulation.history import History


def look(history: History) -> list[Violation]:
    """Return everything that is wrong at the end of a history in which no work is left."""
    found: list[Violation] = []
    held = Snapshot(history)
    for base in history.scheduler.bases:
        found += _leftovers(base, held)
    found += _ends(history, held)
    found += _rows(history, held)
    found += _output(history, held)
    found += _keys(history, held)
    found += _messages(history, held)
    found += _inboxes(history, held)
    found += _parked(history)
    found += _jobs(history)
    found += schedules.look(history, held)
    if history.whole:
        found += _answers(history)
        found += _kept_answers(history)
    return found


def _recorded(history: History, held: Snapshot) -> dict[str, list[dict[str, Any]]]:
    """Return each task's rows from the recorder's store; without a recorder, from the record stream."""
    rows: dict[str, list[dict[str, Any]]] = {}
    if history.whole:
        for entry in history.store.entries.values():
            if entry.steps:
                rows.setdefault(entry.task, []).extend(msgspec.json.decode(entry.steps))
        return rows
    for name, entries in held.streams.items():
        if name.endswith(":record"):
            for _, fields in entries:
                if fields.get("d"):
                    rows.setdefault(fields["t"], []).extend(msgspec.json.decode(fields["d"]))
    return rows


def _answers(history: History) -> list[Violation]:
    """Each submit is answered with `accepted` or `rejected`, each accepted one with one final event, perhaps repeated.

    A signal that counted is never told that it did not.
    """
    found: list[Violation] = []
    if left := cast(int, history.server.execute("XLEN", "s:tasks")):
        found.append(Violation("left command", f"{left} commands that were handled are left in the ingress"))
    if history.lost_tail:
        return found
    told: dict[str, list[str]] = {}
    finals: dict[str, dict[str, None]] = {}
    for answer in history.clients.answers():
        kind = answer["type"].rpartition(".")[2]
        told.setdefault(answer.get("taskid", ""), []).append(kind)
        if kind in ENDED:
            finals.setdefault(answer["taskid"], {})[answer["id"]] = None
    for task in history.tasks:
        kinds = told.get(task.id, [])
        if not kinds:
            found.append(Violation("no answer", f"the submit of {task.id} was never answered"))
        elif "accepted" in kinds and not finals.get(task.id):
            found.append(Violation("no final answer", f"{task.id} was answered {kinds}"))
        elif len(finals.get(task.id, {})) > 1 and task.id not in history.clients.redriven:
            found.append(Violation("two ends", f"{task.id} was answered {kinds}, with ids {list(finals[task.id])}"))
    return found + _signals(history)


def _kept_answers(history: History) -> list[Violation]:
    """Answers stay until they are too many: the newest one always, and the others within the bound."""
    if history.lost_tail or not history.bounds_answers:
        return []
    written, kept = [answer[""] for answer in history.clients.answers()], history.clients.kept_answers()
    newest = max(written, key=lambda entry: position(entry.encode()), default="")
    found = []
    if newest and newest not in kept:
        found.append(Violation("answer trimmed", f"the newest answer {newest} is not among {list(kept)}"))
    size = sum(kept.values()) + len(kept) * ANSWER_OVERHEAD
    most = MOST_ANSWER_BYTES * len(history.scheduler.bases)
    if not any(fault not in faults.OF_USERS for _, fault in history.planned) and size > most and len(kept) > 1:
        found.append(
            Violation("answers left", f"{len(kept)} answers with {size} bytes are kept, at most {most} may be")
        )
    return found


def _signals(history: History) -> list[Violation]:
    """A person whose answer counts is not told that it came too late, however often the command was handled."""
    counted = {
        (task, f"{row['run']}:{row['step']}", row.get("output"))
        for task, rows in _recorded(history, Snapshot(history)).items()
        for row in rows
        if row["kind"] == "human" and row["status"] == "completed"
    }
    refused = {answer.get("causationid") for answer in history.clients.answers() if answer["type"] == REJECTED}
    found = []
    for _, _, args, reply in history.scheduler.log:
        if args[0] != "XADD" or not isinstance(reply, bytes) or SIGNAL not in (_text_of(arg) for arg in args):
            continue
        said = msgspec.json.decode(cast(bytes, args[-1]))
        place = said["request_id"].rpartition("-")[0]
        if (said["task_id"], place, said["value"]) in counted and reply.decode() in refused:
            found.append(Violation("signal refused", f"the answer {said} counted, and was told that it did not"))
    return found


def _output(history: History, held: Snapshot) -> list[Violation]:
    """A reader that follows the attempts sees the output of one life of the code that has come to its end."""
    found: list[Violation] = []
    if history.lost_tail:
        return found
    forks = {fork.id for fork in history.clients.forks}  # their output begins where their origin's ended
    for name, entries in held.streams.items():
        base, _, task = name.partition(":out:")
        if not task or task in forks or held.hashes.get(f"{base}:task:{task}", {}).get("status") != "completed":
            continue
        output = TaskOutput()
        for entry, fields in entries:
            data = msgspec.json.decode(fields["data"])
            if data.get("run_id") == ROOT_RUN:
                output.add(StreamEvent(entry, fields["type"], data))
        said = history.ledger.said.get((task, ROOT_RUN), {})
        if sorted(output.pieces) not in map(sorted, said.values()):
            found.append(Violation("output", f"a reader of {task} sees {output.pieces}, and its code said {said}"))
    return found


def _text_of(arg: object) -> str:
    return arg.decode("utf-8", "replace") if isinstance(arg, bytes) else str(arg)


def _leftovers(base: str, held: Snapshot) -> list[Violation]:
    found = []
    for name in (*held.hashes, *held.other):
        if not name.startswith(base):
            continue
        kind = name[len(base) :].partition(":")[0]
        if kind == "run" and _waits_for_redrive(base, name, held):
            continue
        if kind == "task" and held.hashes.get(name, {}).get("status") in ENDED and not _is_pinned(held.hashes[name]):
            messages = [field for field in held.hashes[name] if field[:2] in ("i:", "v:", "ib")]
            found += [Violation("left", f"{field} of {name} is left") for field in messages]
        if kind in ("run", "mail", "nest", "queue", "turns", "open"):
            found.append(Violation("left", f"{name} is left: {held.hashes.get(name)}"))
        elif kind in ("slots", "waits", "waiting", "held", "limited"):
            found.append(Violation("left slot", f"{name} is left: {held.hashes.get(name)}"))
        elif kind in ("quarantine", "started"):
            found.append(Violation(f"left {kind}", f"{kind}: {held.hashes.get(name)}"))
        elif kind == "meta" and "queued" in held.hashes.get(name, {}):
            found.append(Violation("left queued", f"{held.hashes[name]['queued']} tasks wait for turns by {name}"))
        elif kind == "inst" and "busy" in held.hashes.get(name, {}):
            found.append(Violation("left busy", f"{name} is busy with {held.hashes[name]['busy']!r}"))
    return found


def _is_pinned(fields: dict[str, str]) -> bool:
    """Whether a dead letter can reopen an ended task."""
    return int(fields.get("lt", 0)) > 0


def _waits_for_redrive(base: str, name: str, held: Snapshot) -> bool:
    """Whether a run belongs to an ended task that a dead letter can reopen."""
    task, _, run = name[len(f"{base}run:") :].partition("/")
    fields = held.hashes.get(f"{base}task:{task}", {})
    return fields.get("status") in ENDED and f"c:{run}" in fields and _is_pinned(fields)


def _ends(history: History, held: Snapshot) -> list[Violation]:
    found = []
    known = {}
    for name, fields in held.hashes.items():
        if ":task:" in name:
            known[name.partition(":task:")[2]] = fields
    for task in history.clients.accepted:
        if task not in known:
            if task not in history.uncertain:
                found.append(Violation("lost task", f"{task} was accepted and is not known any more"))
        elif known[task].get("status") not in ENDED:
            found.append(Violation("not ended", f"{task}: {known[task]}"))
    # A task that was sent belongs to nobody: it ends by its own, however its sender ends.
    detached = dict.fromkeys(task for _, task in history.ledger.sends.values() if task in known)
    found += [
        Violation("child ended", f"{task} was sent, and nobody has cancelled it: {known[task]}")
        for task in detached
        if known[task].get("status") not in ("completed", "failed") and not _is_replaced(known[task])
    ]
    return found


def _is_replaced(task: dict[str, str]) -> bool:
    """Whether a newer task with the same limit has ended this one."""
    error = msgspec.json.decode(task.get("out", "{}")).get("error") or {}
    return error.get("type") == "Superseded" and task["h"].split("\n")[1] in (FRESH, EAGER)


def _rows(history: History, held: Snapshot) -> list[Violation]:
    """The record has a row for each finished step, each once, and as many as the final event says.

    The store of a recorder keeps rows of the time that a broker has lost.
    """
    rows = _recorded(history, held)
    more = history.whole and history.lost_tail
    found: list[Violation] = []
    for name, fields in held.hashes.items():
        if ":task:" not in name or "out" not in fields:
            continue
        task = name.partition(":task:")[2]
        final = msgspec.json.decode(fields["out"])
        recorded = rows.get(task, [])
        distinct = {(row["run"], row.get("step", ""), row.get("attempt", 1), row["kind"]) for row in recorded}
        enough = len(distinct) >= final["steps"] if more else len(recorded) == final["steps"]
        if task not in history.clients.redriven and not enough:
            found.append(
                Violation(
                    "rows count", f"{task} ({final['status']}) says {final['steps']} steps, has {len(recorded)} rows"
                )
            )
        if len(distinct) != len(recorded) and task not in history.clients.redriven and not more:
            found.append(Violation("rows twice", f"{task} has {len(recorded)} rows, {len(distinct)} distinct ones"))
        # What a task in another partition has used is in that task's rows.
        counted = task not in history.clients.redriven and len(history.scheduler.bases) == 1
        used = final.get("usage", {}).get("tokens", 0)
        told = {(row["run"], row.get("step", "")): row.get("usage", {}).get("tokens", 0) for row in recorded}
        if counted and used != sum(told.values()) and not (more and used < sum(told.values())):
            found.append(
                Violation("usage", f"{task} ({final['status']}) has used {used} tokens, its rows {sum(told.values())}")
            )
        have = {(row["run"], row.get("step", "")) for row in recorded}
        found += [
            Violation("rows missing", f"{task} ({final['status']}): step {place[1]} of {place[0]} has no row")
            for place in history.ledger.stored.get(task, ())
            if place not in have and not (place[0] == "r" and place[1] in history.clients.carried.get(task, ()))
        ]
    return found


def _keys(history: History, held: Snapshot) -> list[Violation]:
    """Each instance's state has each of its completed runs once; one client's submits to it are in order."""
    found: list[Violation] = []
    completed: dict[str, dict[str, str]] = {}
    for task, rows in _recorded(history, held).items():
        for row in rows:
            if row["kind"] == "agent" and row["status"] == "completed" and row.get("key") and not row.get("step"):
                completed.setdefault(task, {})[row["run"]] = f"{row['name']}/{row['key']}"
    expected: dict[str, list[str]] = {}
    chains, redriven = _chains(history), history.clients.redriven
    for task, runs in completed.items():
        # A reopened caller begins with the instance's state of that moment.
        failed_caller = any(
            other in redriven or run not in completed.get(other, {}) for other, run in chains.get(task, ())
        )
        for run, instance in runs.items():
            if failed_caller or _undone_with(task, run, instance, runs, history, held):
                continue
            expected.setdefault(instance, []).append(f"{task}/{run}")
    if history.lost_tail:
        # The recorder's store has rows of runs whose ends the broker has lost.
        expected.clear()
    for name, fields in held.hashes.items():
        if ":inst:" not in name:
            continue
        instance = name.partition(":inst:")[2]
        log = msgspec.json.decode(fields.get("state") or "{}").get("log", [])
        wanted = expected.pop(instance, [])
        if len(set(log)) != len(log):
            found.append(Violation("state twice", f"{instance} has counted a run twice: {log}"))
        if missing := [run for run in wanted if run not in log]:
            found.append(Violation("lost update", f"{instance} lacks {missing}, its state has {log}"))
        found += _order(history, instance, log)
    for instance, wanted in expected.items():
        found.append(Violation("lost update", f"{instance} has no state and lacks {wanted}"))
    return found


def _messages(history: History, held: Snapshot) -> list[Violation]:
    """Each message that was sent or published has started its tasks, in one partition each, and in order."""
    if history.lost_tail and (history.whole or len(history.scheduler.bases) > 1):
        return []
    places: dict[str, list[str]] = {}
    for name in held.hashes:
        base, found, task = name.partition("task:")
        if found and base in history.scheduler.bases:
            places.setdefault(task, []).append(base)
    violations = [Violation("task twice", f"{task} is in {bases}") for task, bases in places.items() if len(bases) > 1]
    # What clients have published may be lost with a server's last writes, but not what completed runs have.
    wanted = [
        (task, f"{id} on {topic}")
        for id, topic, source in ([] if history.lost_tail else history.clients.published)
        for task in _heard(history, id, topic, source, "")
    ]
    for task, rows in _recorded(history, held).items():
        for row in rows:
            place = task, row["run"], row.get("step", "")
            if row["status"] == "completed" and place in history.ledger.sends:
                wanted.append((history.ledger.sends[place][1], f"{row['kind']} {place}"))
            elif row["status"] == "completed" and place in history.ledger.publishes:
                if history.lost_tail and history.ledger.publishes[place][0] == UNHEARD:
                    continue
                wanted += [
                    (other, f"{row['kind']} {place}")
                    for other in _heard(history, message_of_step(*place), *history.ledger.publishes[place])
                ]
    return violations + [
        Violation("lost message", f"{what} has not started {task}") for task, what in wanted if task not in places
    ]


def _inboxes(history: History, held: Snapshot) -> list[Violation]:
    """Each message to a running task is received once, in the order of its sender, if a run waits for it."""
    found: list[Violation] = []
    sent = {message.value: message for message in history.clients.messages}
    received: dict[str, list[str]] = {}
    for task, rows in _recorded(history, held).items():
        values = [
            row["output"]
            for row in rows
            if row["kind"] == "receive" and row["status"] == "completed" and row["output"] in sent
        ]
        mine = [value for value in values if sent[value].task == task]  # a fork has its origin's results
        received[task] = mine
        if len(set(mine)) != len(mine) and not (history.whole and history.lost_tail):
            found.append(Violation("message twice", f"{task} has received {mine}"))
        found += [
            Violation("message order", f"{task} has received {mine}: {later} was sent before {first}")
            for at, first in enumerate(map(sent.__getitem__, mine))
            for later in map(sent.__getitem__, mine[at + 1 :])
            if later.name == first.name and later.accepted and later.accepted_at < first.sent_at
        ]
    if history.whole and history.lost_tail:
        return found
    if history.clock_stepped:
        return found
    late = _ends_without_message(history, held)
    for message in sent.values():
        if message.accepted and not message.uncertain and message.value not in received.get(message.task, ()):
            found += [
                Violation("message lost", f"{message} was not received, and {step} of {message.task} waited in vain")
                for step, name, ended_ms in late.get(message.task, ())
                if name == message.name and ended_ms > message.accepted_ms
            ]
    return found


def _ends_without_message(history: History, held: Snapshot) -> dict[str, list[tuple[str, str, float]]]:
    """Return the steps that waited for a message until their limit, by task: step, name, and when that was."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    for task, rows in _recorded(history, held).items():
        found[task] = [
            (f"{row['run']}/{row['step']}", row["name"], row["ended"])
            for row in rows
            if row["kind"] == "receive" and row.get("output") == NO_MESSAGE
        ]
    return found


def _parked(history: History) -> list[Violation]:
    """No run requests a step that differs from its journal."""
    return [
        Violation("diverged", f"a run is parked: {[_text_of(arg)[:200] for arg in args]}")
        for _, _, args, _ in history.scheduler.log
        if args[0] == b"FCALL" and _text_of(args[1]).endswith("_dead_letter") and "diverged" in map(_text_of, args)
    ]


def _jobs(history: History) -> list[Violation]:
    """No job runs on for a task that has ended, unless something that failed kept the cluster from hearing of it."""
    if any(fault not in faults.OF_USERS for _, fault in history.planned):
        return []
    return [
        Violation("job left", f"the job {job.work.key} still runs on {name}, and nothing is left to do")
        for name, cluster in history.clusters.items()
        for job in cluster.jobs
        if job.runs
    ]


def _heard(history: History, id: str, topic: str, source: str, sender: str) -> Iterator[str]:
    """Return the tasks that a published message starts."""
    agents = [
        each.agent for each in SUBSCRIPTIONS if (topic.startswith(each.topic) if each.prefix else topic == each.topic)
    ]
    if topic == UNHEARD and history.clients.heard:
        agents.append(LATE)
    for agent in agents:
        if f"{agent}/{source}" != sender:
            yield task_of_message(id, agent, source)


def _chains(history: History) -> dict[str, list[tuple[str, str]]]:
    """For tasks that answer a step in another partition: the runs that wait for them, as (task, run).

    Such a task may be a reentrant call into an instance that one of those runs holds: its change goes with that run.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for _, _, args, _ in history.scheduler.log:
        if args[0] != b"FCALL" or not _text_of(args[1]).endswith("_submit"):
            continue
        context = _text_of(args[12])
        if '"~chain"' in context:
            chain = msgspec.json.decode(context)["~chain"]
            links = [link.partition(":")[2].rpartition("|") for link in chain.split()]
            found[_text_of(args[4])] = [(task, run) for task, _, run in links]
    return found


def _undone_with(task: str, run: str, instance: str, runs: dict[str, str], history: History, held: Snapshot) -> bool:
    """Whether a run was nested in a run of its instance that did not complete, which undid its change."""
    if "/" in run and task in history.clients.redriven:
        return True  # a reopened run begins with the instance's state of that moment
    parent = run
    while "/" in parent:
        parent = parent.rpartition("/")[0]
        if parent not in runs and _instance_of(history, task, parent) in (instance, None):
            return True
    return False


def _instance_of(history: History, task: str, run: str) -> str | None:
    """Return what an incomplete run was, if that can be determined."""
    if run == "r":
        for known in (*history.tasks, *history.clients.forks):
            if known.id == task:
                return f"{known.agent}/{known.key}" if known.key else ""
    return None


def _order(history: History, instance: str, log: list[str]) -> list[Violation]:
    found, redriven = [], history.clients.redriven
    for client in range(2):
        mine = [
            f"{task.id}/r"
            for task in history.tasks
            if task.client == client
            and f"{task.agent}/{task.key}" == instance
            and task.id not in redriven
            and not uses(task.program, "released")  # others may go before it
        ]
        seen = [run for run in log if run in mine]
        if seen != [run for run in mine if run in seen]:
            found.append(Violation("order", f"{instance} handled {seen}, client {client} sent {mine}"))
    return found
