"""Faults: each costs one of the scenario's budget, and may happen at any point."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.delivery.scenario import Scenario
from tests.model.delivery.state import Broker, Consumer, State
from tests.model.delivery.steps import NAMES, functions, moved, with_consumer
from tests.model.search import Move


def faults(scenario: Scenario, state: State) -> Iterator[Move]:
    if "tail" in scenario.kinds and state.faults and state.synced is None:
        yield Move("the broker's disk falls behind", state._replace(synced=state.broker), optional=True)
    if not state.faults:
        return
    spent = state._replace(faults=state.faults - 1)
    if state.synced is not None:
        lost = state.synced._replace(life=state.broker.life + 1)
        yield Move("the broker loses its tail", spent._replace(broker=lost, synced=None), optional=True)
    if "lost group" in scenario.kinds and any(entry.owner for stream in state.broker.streams for entry in stream):
        yield Move("the groups are lost and made again", spent._replace(broker=_unread(state.broker)), optional=True)
    if "second submit" in scenario.kinds and not scenario.guards.dedupe_submit:
        for sender, sent in zip(scenario.senders, state.broker.sent, strict=True):
            if sent:
                call = functions(scenario, state)
                call.deliver(sender[sent - 1])
                yield Move(
                    f"{sender[sent - 1]} is submitted again", spent._replace(broker=call.freeze()), optional=True
                )
    if "second promoter" in scenario.kinds and not scenario.guards.promote_in_one:
        for timer in state.broker.timers:
            call = functions(scenario, state)
            call.promote(timer)
            name = f"a promoter appends {timer.run} and has yet to remove its timer"
            yield Move(name, spent._replace(broker=call.freeze()), optional=True)
    for number, consumer in enumerate(state.consumers):
        if not consumer.paused:
            yield from _of_a_consumer(scenario, spent, number, consumer)


def _of_a_consumer(scenario: Scenario, spent: State, number: int, consumer: Consumer) -> Iterator[Move]:
    name, work = NAMES[number], consumer.work
    holds = any(entry.owner == name for stream in spent.broker.streams for entry in stream)
    if work is None and not holds:
        return
    if "crash" in scenario.kinds and work is not None:
        call = functions(scenario, spent)
        call.disown(name)
        yield Move(f"{name} is killed", moved(spent, call, number, Consumer()), optional=True)
    if "leave" in scenario.kinds:
        call = functions(scenario, spent)
        call.disown(name, uncounted=1)
        yield Move(f"{name} hands back its work and stops", moved(spent, call, number, Consumer()), optional=True)
    if "pause" in scenario.kinds and work is not None:
        yield Move(f"{name} is paused", with_consumer(spent, number, Consumer(True, work)), optional=True)
    if work is None or work.phase != "ready" or work.event.run in scenario.poison:
        return
    if "lost commit" in scenario.kinds and not scenario.fails(spent, work.event.run):
        call = functions(scenario, spent)
        if not call.fenced(work):
            call.commit(work)
            yield Move(
                f"{name} commits {work.event.run}, reply lost", spent._replace(broker=call.freeze()), optional=True
            )
    if "failure" in scenario.kinds:
        call = functions(scenario, spent)
        if not call.fenced(work):
            call.retry(work)
            yield Move(f"{name} fails {work.event.run}", moved(spent, call, number, Consumer()), optional=True)


def _unread(broker: Broker) -> Broker:
    agent, tool = (tuple(entry._replace(owner="", deliveries=0) for entry in stream) for stream in broker.streams)
    return broker._replace(streams=(agent, tool))
