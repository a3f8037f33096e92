"""What clients submit: the tasks of a history."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tests.simulation.choice_source import ChoiceSource, pick, weighted
from tests.simulation.objects import draw_object_program, envelope_of
from tests.simulation.programs import EAGER, FRESH, KEYED, KEYS, NARROW, OBJECT, Mix, Program, draw_program


@dataclass
class Task:
    """A client's submit."""

    id: str
    agent: str
    key: str
    program: Program
    timeout_seconds: float | None
    copies: int
    client: int
    tenant: str = ""

    @property
    def input(self) -> object:
        """As JSON."""
        return envelope_of(self.program) if self.agent == OBJECT else self.program

    def __str__(self) -> str:
        place = f"{self.agent}/{self.key}" if self.key else self.agent
        limit = f", timeout {self.timeout_seconds} s" if self.timeout_seconds else ""
        return (
            f"{self.id}: {place} {msgspec.json.encode(self.program).decode()}{limit}, client {self.client}"
            + (f", submitted {self.copies} times" if self.copies > 1 else "")
            + (f", tenant {self.tenant}" if self.tenant else "")
        )


def draw_tasks(choice_source: ChoiceSource, mix: Mix, *, objects: bool) -> list[Task]:
    """Return the tasks of a history. With `objects`, most are for objects."""
    tasks = []
    clients = 1 + choice_source.choose(2)
    for number in range(1 + weighted(choice_source, [(3, 0), (4, 1), (3, 2), (1, 3)])):
        agent = (
            OBJECT
            if objects and choice_source.choose(4)
            else pick(choice_source, (*KEYED, "free", "free", NARROW, FRESH, EAGER))
        )
        key = pick(choice_source, KEYS) if agent in (*KEYED, OBJECT, NARROW) else ""
        timeout = 2.0 if choice_source.choose(12) == 11 else None
        copies = 2 if choice_source.choose(8) == 7 else 1
        program = (
            draw_object_program(choice_source, key)
            if agent == OBJECT
            else draw_program(choice_source, mix, agent=agent, depth=2 if agent in (NARROW, FRESH, EAGER) else 0)
        )
        client = choice_source.choose(clients)
        # One client's submits to an instance stay in order within a tenant.
        tenant = ("", "a")[client] if key else ("", "a", "b")[number % 3]
        tasks.append(Task(f"t{number}", agent, key, program, timeout, copies, client, tenant))
    return tasks


def uses(program: Program, *names: str) -> bool:
    """Return whether a program has one of these operations."""
    for op in program:
        if op[0] in names:
            return True
        match op:
            case ["ask" | "send", _, _, inner] if uses(inner, *names):
                return True
            case ["within", _, inner] if uses(inner, *names):
                return True
            case ["patched", _, before, after] if uses([before, after], *names):
                return True
            case ["released", inner] if uses(inner, *names):
                return True
            case ["gather", branches] if any(uses(branch, *names) for branch in branches):
                return True
    return False
