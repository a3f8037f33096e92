"""The invariants of every state, and of every final state."""

from __future__ import annotations

from tests.model.delivery.scenario import Scenario
from tests.model.delivery.state import AGENT, CALLS, NONE, Broker, State


def broken(scenario: Scenario, state: State, quiet: bool) -> str:
    """Return the first invariant that the state breaks, or an empty string."""
    broker = state.broker
    return broker.wrong or _outcomes(broker) or _order(scenario, broker) or _instances(scenario, broker) or (
        _quiet(scenario, broker) if quiet else ""
    )  # fmt: skip


def _outcomes(broker: Broker) -> str:
    for run in broker.done:
        if run in broker.failed:
            return f"{run} is both done and failed"
    for outcome in (broker.letters, broker.failed):
        if len(set(outcome)) < len(outcome):
            return f"failed twice: {outcome}"
    if broker.fan.used and broker.fan.journaled != broker.fan.used:
        return f"a turn used {broker.fan.used} and the journal holds {broker.fan.journaled}: the replay diverges"
    return ""


def _order(scenario: Scenario, broker: Broker) -> str:
    for sender in scenario.senders:
        handled = [run for run in broker.done if run in sender and run not in broker.reopened]
        if handled != sorted(handled, key=sender.index):
            return f"a sender's messages were handled out of order: {broker.done}"
    forwarded = ["y" + run[1:] for run in broker.done if run[0] == "m"]
    arrived = [run for run in broker.done if run[0] == "y" and run not in broker.reopened]
    if scenario.forwards and arrived != [run for run in forwarded if run in arrived]:
        return f"an agent's sends were handled out of order: {broker.done}"
    return ""


def _instances(scenario: Scenario, broker: Broker) -> str:
    for agent, instance in enumerate(broker.instances):
        letter = "my"[agent]
        flying = [entry.event.run for entry in broker.streams[AGENT] if entry.event.run[0] == letter]
        flying += [timer.run for timer in broker.timers if timer.run[0] == letter]
        if len(flying) > 1 and scenario.check_flight:
            return f"two events of one agent in flight: {flying}"
        done = [run for run in broker.done if run[0] == letter]
        if sorted(instance.state) != sorted(done):
            return f"lost update: {done} are done, and the state has {list(instance.state)}"
    return ""


def _quiet(scenario: Scenario, broker: Broker) -> str:
    if any(broker.streams):
        return f"an entry stays pending: {broker.streams}"
    if broker.timers:
        return f"a timer never fires: {broker.timers}"
    for instance in broker.instances:
        if instance.busy or instance.mail:
            return f"an agent is stuck: {instance.busy} holds it, {list(instance.mail)} wait"
    for run, cur in zip(scenario.runs, broker.curs, strict=True):
        if cur != NONE:
            return f"{run} never ends: {cur}"
        expected = run[0] == "m" or "m" + run[1:] in broker.done
        if expected and (run in broker.done) + (run in broker.failed) != 1:
            return f"{run} is neither done nor failed"
    for run in broker.failed:
        if run not in broker.letters and not any(call in broker.letters for call in CALLS):
            return f"{run} failed without a dead letter"
    return ""
