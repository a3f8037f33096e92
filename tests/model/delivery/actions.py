"""The actions of clients, consumers, timers and people without faults."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.delivery.functions import Functions
from tests.model.delivery.scenario import Scenario
from tests.model.delivery.state import AGENT, CALLS, FAN, LEFT, Consumer, State, Work
from tests.model.delivery.steps import NAMES, functions, moved, with_consumer
from tests.model.search import Move

DELIVERIES = 3
"""Deliveries of one entry, before it becomes a dead letter."""


def actions(scenario: Scenario, state: State) -> Iterator[Move]:
    yield from _clients(scenario, state)
    for timer in state.broker.timers:
        call = functions(scenario, state)
        call.timers.remove(timer)
        call.promote(timer)
        yield Move(f"{timer.run} is due", state._replace(broker=call.freeze()))
    for number, consumer in enumerate(state.consumers):
        if consumer.paused:
            yield Move(f"{NAMES[number]} resumes", with_consumer(state, number, consumer._replace(paused=False)))
        elif consumer.work is None:
            yield from _reads(scenario, state, number)
            yield from _takes(scenario, state, number)
        else:
            yield _works(scenario, state, number, consumer.work)


def _clients(scenario: Scenario, state: State) -> Iterator[Move]:
    for place, sender in enumerate(scenario.senders):
        sent = state.broker.sent[place]
        if sent < len(sender):
            call = functions(scenario, state)
            call.sent[place] += 1
            call.deliver(sender[sent])
            yield Move(f"submit {sender[sent]}", state._replace(broker=call.freeze()))
    if state.redrives:
        for letter in state.broker.letters:
            run = FAN if letter in CALLS else letter
            if run in state.broker.failed or not scenario.guards.redrive_removes_letter:
                call = functions(scenario, state)
                call.redrive(letter)
                to = state._replace(broker=call.freeze(), redrives=state.redrives - 1)
                yield Move(f"redrive {letter}", to, optional=True)


def _reads(scenario: Scenario, state: State, number: int) -> Iterator[Move]:
    name = NAMES[number]
    for stream, entries in enumerate(state.broker.streams):
        place = next((place for place, entry in enumerate(entries) if not entry.owner), -1)
        if place < 0:
            continue
        run = entries[place].event.run
        call = functions(scenario, state)
        call.give(stream, place, name, 1)
        yield Move(f"{name} reads {run}", moved(state, call, number, _begin(scenario, call, stream, place)))
        if state.faults and "lost read" in scenario.kinds:
            lost = state._replace(broker=call.freeze(), faults=state.faults - 1)
            yield Move(f"{name} reads {run}, reply lost", lost, optional=True)


def _takes(scenario: Scenario, state: State, number: int) -> Iterator[Move]:
    """Read the consumer's own forgotten entries, and adopt those of dead and silent consumers."""
    name, other = NAMES[number], NAMES[1 - number]
    for stream, entries in enumerate(state.broker.streams):
        for place, entry in enumerate(entries):
            own, silent = entry.owner == name, entry.owner == other and state.consumers[1 - number].paused
            if not ((own and scenario.guards.reconcile) or (scenario.guards.adopt and (entry.owner == LEFT or silent))):
                continue
            call, then = functions(scenario, state), state
            if silent:
                call.disown(other)
                then = _declared_dead(state, 1 - number)
            counted = 1 if scenario.guards.count_deliveries else 0
            if entry.deliveries + counted > DELIVERIES:
                call.dead_letter(Work(stream, entry.event, entry.deliveries, "ready"))
                name_of = f"{name} dead-letters {entry.event.run} after {entry.deliveries} deliveries"
                yield Move(name_of, then._replace(broker=call.freeze()))
                continue
            call.give(stream, place, name, entry.deliveries + counted)
            verb = "finds its own" if own else "adopts"
            to = moved(then, call, number, _begin(scenario, call, stream, place))
            yield Move(f"{name} {verb} {entry.event.run}", to)


def _declared_dead(state: State, number: int) -> State:
    consumer = state.consumers[number]
    if consumer.work is None:
        return state
    return with_consumer(state, number, consumer._replace(work=consumer.work._replace(alive=False)))


def _begin(scenario: Scenario, call: Functions, stream: int, place: int) -> Consumer:
    """A consumer takes a delivery and reads what its turn needs."""
    event, _, deliveries = call.streams[stream][place]
    work = Work(stream, event, deliveries, "ready")
    if stream == AGENT:
        work = work._replace(seen=call.instances[call.agent_of(event.run)].state)
    if scenario.is_fan(stream, event.run):
        looks_new = event.turn == 0 and event.attempt == 0 and deliveries == 1
        loads = scenario.guards.journal_from_broker or not looks_new
        journaled = call.fan.journaled
        known = journaled if loads else ""
        work = work._replace(answer=known, stored=journaled != "", phase="ready" if known else "step")
    return Consumer(False, work)


def _works(scenario: Scenario, state: State, number: int, work: Work) -> Move:
    name, run = NAMES[number], work.event.run
    call = functions(scenario, state)
    if run in scenario.poison:
        call.disown(name)
        return Move(f"{name} dies of {run}", moved(state, call, number, Consumer()))
    if work.phase == "step":
        if work.stored:
            call.wrong = "a finished step ran again"
        done = work._replace(phase="computed", answer=f"{name}{work.deliveries}.{state.faults}", stored=False)
        return Move(f"{name} runs the local step", moved(state, call, number, Consumer(False, done)))
    if call.fenced(work):
        return Move(f"{name} is fenced", with_consumer(state, number, Consumer()))
    if work.phase == "computed":
        if not call.counts(work):
            return Move(f"{name} cannot record: the entry is over", with_consumer(state, number, Consumer()))
        if not (scenario.guards.record_if_absent and call.fan.journaled):
            call.fan = call.fan._replace(journaled=work.answer)
        recorded = work._replace(phase="ready", answer=call.fan.journaled)
        return Move(f"{name} records the step", moved(state, call, number, Consumer(False, recorded)))
    if scenario.fails(state, run):
        call.retry(work)
        return Move(f"{name} fails {run}", moved(state, call, number, Consumer()))
    if not scenario.guards.resume_in_commit and run in call.fan.missing and work.phase != "resume":
        call.commit(work)
        return Move(f"{name} commits {run}", moved(state, call, number, Consumer(False, work._replace(phase="resume"))))
    if work.phase == "resume":
        call.resume_if_ready()
        return Move(f"{name} looks whether all steps are there", moved(state, call, number, Consumer()))
    call.commit(work)
    return Move(f"{name} commits {run}", moved(state, call, number, Consumer()))
