"""The broker's functions, on a mutable copy of its state. Each is atomic, as on the server."""

from __future__ import annotations

from tests.model.delivery.guards import Guards
from tests.model.delivery.state import (
    AGENT,
    CALLS,
    FAN,
    HELD,
    LEFT,
    MAIL,
    NONE,
    RETRY,
    TOOL,
    Broker,
    Cur,
    Entry,
    Event,
    Work,
)

RETRIES = 1
"""Retries after the first attempt."""


class Functions:
    """One call's view of the broker; `freeze` gives the state after it."""

    def __init__(self, broker: Broker, runs: tuple[str, ...], guards: Guards, *, fan: bool) -> None:
        self.guards = guards
        self.fans_out = fan
        self.streams = [list(stream) for stream in broker.streams]
        self.curs: dict[str, Cur] = dict(zip(runs, broker.curs, strict=True))
        self.instances = list(broker.instances)
        self.fan = broker.fan
        self.timers = list(broker.timers)
        self.letters = list(broker.letters)
        self.done = list(broker.done)
        self.failed = list(broker.failed)
        self.reopened = list(broker.reopened)
        self.sent = list(broker.sent)
        self.life = broker.life
        self.wrong = broker.wrong

    def freeze(self) -> Broker:
        return Broker(
            (tuple(self.streams[AGENT]), tuple(self.streams[TOOL])),
            tuple(self.curs.values()),
            tuple(self.instances),
            self.fan,
            tuple(sorted(self.timers)),
            tuple(sorted(self.letters)),
            tuple(self.done),
            tuple(sorted(self.failed)),
            tuple(self.reopened),
            tuple(self.sent),
            self.life,
            self.wrong,
        )

    # Entries

    def append(self, stream: int, run: str, attempt: int = 0) -> Event:
        event = Event(run, self.fan.turns if run == FAN else 0, attempt, self.life)
        self.streams[stream].append(Entry(event))
        return event

    def place(self, stream: int, event: Event) -> int:
        for place, entry in enumerate(self.streams[stream]):
            if entry.event == event:
                return place
        return -1

    def settle(self, stream: int, event: Event) -> None:
        """Acknowledge and delete, as `settle` of the Lua library does, for any caller."""
        place = self.place(stream, event)
        if place >= 0:
            del self.streams[stream][place]

    def give(self, stream: int, place: int, owner: str, deliveries: int) -> None:
        self.streams[stream][place] = self.streams[stream][place]._replace(owner=owner, deliveries=deliveries)

    def disown(self, owner: str, uncounted: int = 0) -> None:
        """Free all entries of an owner for adoption."""
        for stream in self.streams:
            for place, entry in enumerate(stream):
                if entry.owner == owner:
                    stream[place] = entry._replace(owner=LEFT, deliveries=entry.deliveries - uncounted)

    # Mailboxes

    def agent_of(self, run: str) -> int:
        return 1 if run[0] == "y" else 0

    def deliver(self, run: str) -> None:
        agent = self.agent_of(run)
        instance = self.instances[agent]
        if not instance.busy:
            self.instances[agent] = instance._replace(busy=run)
            self.curs[run] = self.append(AGENT, run)
        else:
            self.instances[agent] = instance._replace(mail=(*instance.mail, run))
            self.curs[run] = MAIL

    def release(self, run: str) -> None:
        agent = self.agent_of(run)
        instance = self.instances[agent]
        if instance.busy != run:
            return
        if not instance.mail:
            self.instances[agent] = instance._replace(busy="")
            return
        self.instances[agent] = instance._replace(busy=instance.mail[0], mail=instance.mail[1:])
        self.curs[instance.mail[0]] = self.append(AGENT, instance.mail[0])

    # Fences

    def counts(self, work: Work) -> bool:
        """The state fence."""
        if not self.guards.state_fence:
            return True
        if work.stream == TOOL:
            return work.event.run in self.fan.missing
        return self.curs[work.event.run] == work.event

    def fenced(self, work: Work) -> bool:
        """The owner fence."""
        return self.guards.owner_fence and not work.alive

    # Ends of deliveries

    def commit(self, work: Work) -> None:
        run = work.event.run
        self.settle(work.stream, work.event)
        if not self.counts(work):
            return
        fan_out = self.fans_out and run == FAN
        if work.stream == TOOL:
            self.result(run, ok=True)
        elif fan_out and self.guards.commit_checks_journal and self.fan.journaled != work.answer:
            self.fan = self.fan._replace(turns=self.fan.turns + 1)
            self.curs[run] = self.append(AGENT, run)
        elif fan_out and len(self.fan.results) < len(CALLS):
            self.suspend(work)
        elif fan_out and not all(ok for _, ok in self.fan.results):
            self.end(run, failed=True)
        else:
            agent = self.agent_of(run)
            self.instances[agent] = self.instances[agent]._replace(state=(*work.seen, run))
            if run in self.done:
                self.wrong = f"effects of {run} happened twice"
            self.done.append(run)
            forwarded = "y" + run[1:]
            if forwarded in self.curs and agent == 0:
                self.deliver(forwarded)
            self.end(run, failed=False)

    def suspend(self, work: Work) -> None:
        """Commit a turn that calls its tools and waits for them; answered ones are not called again."""
        answered = {step for step, _ in self.fan.results}
        asked = tuple(step for step in CALLS if step not in answered)
        self.fan = self.fan._replace(missing=asked, turns=self.fan.turns + 1, used=work.answer)
        for step in asked:
            self.append(TOOL, step)
        self.curs[FAN] = HELD
        if not self.guards.wait_keeps_instance:
            self.release(FAN)

    def end(self, run: str, *, failed: bool) -> None:
        self.curs[run] = NONE
        if failed:
            self.failed.append(run)
        if self.guards.release_on_commit:
            self.release(run)

    def result(self, step: str, *, ok: bool) -> None:
        fan = self.fan
        if any(step == known for known, _ in fan.results):
            self.wrong = f"the result of {step} was applied twice"
        results = tuple(sorted((*fan.results, (step, ok))))
        missing = tuple(one for one in fan.missing if one != step)
        self.fan = fan._replace(missing=missing, results=results)
        if self.guards.resume_in_commit:
            self.resume_if_ready()

    def resume_if_ready(self) -> None:
        if not self.fan.missing:
            self.curs[FAN] = self.append(AGENT, FAN)

    def retry(self, work: Work) -> None:
        run, attempt = work.event.run, work.event.attempt
        if attempt >= RETRIES:
            self.dead_letter(work)
            return
        self.settle(work.stream, work.event)
        if not self.counts(work):
            return
        self.timers.append(work.event._replace(attempt=attempt + 1))
        if work.stream == AGENT:
            self.curs[run] = RETRY
            if not self.guards.retry_keeps_instance:
                self.release(run)

    def promote(self, timer: Event) -> None:
        if timer.run in CALLS:
            self.streams[TOOL].append(Entry(timer._replace(life=self.life)))
            return
        agent = self.agent_of(timer.run)
        if not self.guards.retry_keeps_instance and self.instances[agent].busy:
            self.instances[agent] = self.instances[agent]._replace(mail=(*self.instances[agent].mail, timer.run))
            self.curs[timer.run] = MAIL
            return
        self.instances[agent] = self.instances[agent]._replace(busy=timer.run)
        self.curs[timer.run] = self.append(AGENT, timer.run, timer.attempt)

    def dead_letter(self, work: Work) -> None:
        run = work.event.run
        self.settle(work.stream, work.event)
        if not self.counts(work):
            return
        self.letters.append(run)
        if work.stream == TOOL:
            if self.guards.dead_call_answers:
                self.result(run, ok=False)
            return
        self.curs[run] = NONE
        self.failed.append(run)
        if self.guards.release_on_dead_letter:
            self.release(run)

    def redrive(self, letter: str) -> None:
        """Reopen the ended task of a dead letter and give its delivery another chance."""
        run = FAN if letter in CALLS else letter
        if self.guards.redrive_removes_letter:
            self.letters.remove(letter)
        if run in self.failed:
            self.failed.remove(run)
        self.reopened = sorted({*self.reopened, letter, run})
        self.life += 1
        if letter in CALLS:
            results = tuple(one for one in self.fan.results if one[0] != letter)
            self.fan = self.fan._replace(results=results)
        if self.guards.redrive_queues:
            self.deliver(run)
        elif letter in CALLS:
            self.fan = self.fan._replace(missing=(letter,))
            self.append(TOOL, letter)
            self.curs[run] = HELD
        else:
            self.curs[run] = self.append(AGENT, run)
