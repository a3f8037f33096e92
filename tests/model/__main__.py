"""Search all models and print their size: `python -m tests.model --depth 2`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.model import lock_order, tail_loss, waking
from tests.model.delivery.model import Delivery
from tests.model.delivery.scenarios import DROPPED, scenarios
from tests.model.lock_order import LockOrder
from tests.model.search import Model, TooManyStates, search
from tests.model.tail_loss import TailLoss
from tests.model.waking import Waking


def holding(depth: int) -> dict[str, Model[Any]]:
    found: dict[str, Model[Any]] = {name: Delivery(one) for name, one in scenarios(depth).items()}
    found["a question between partitions, tail lost"] = TailLoss(depth + 1)
    found[f"{depth + 2} agents that ask each other in a ring"] = LockOrder(depth + 2)
    found["a run that waits for a tool and an answer"] = Waking()
    return found


def breaking() -> dict[str, Model[Any]]:
    found: dict[str, Model[Any]] = {
        name: Delivery(one.scenario._replace(guards=one.guards)) for name, one in DROPPED.items() if one.broken
    }
    for guard in ("repeat", "known_answers", "answer_if_missing", "dedupe"):
        found[f"question: {guard}"] = TailLoss(2, tail_loss.Guards()._replace(**{guard: False}))
    for guard in ("detect", "detect_in_commit"):
        found[f"ring: {guard}"] = LockOrder(3, lock_order.Guards()._replace(**{guard: False}))
    for guard in waking.Guards._fields:
        found[f"waking: {guard}"] = Waking(waking.Guards()._replace(**{guard: False}))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--depth", type=int, default=2, help="faults in one history (2)")
    parser.add_argument("--limit", type=int, default=3_000_000, help="states of one search (3000000)")
    options = parser.parse_args()
    wrong = 0
    print(f"With all guards, up to {options.depth} faults:")
    for name, model in holding(options.depth).items():
        try:
            result = search(model, options.limit)
        except TooManyStates as error:
            print(f"{name:<46} {error}", flush=True)
            wrong += 1
            continue
        print(f"{name:<46} {result}", flush=True)
        wrong += bool(result.broken)
    print("Without one guard:")
    for name, model in breaking().items():
        result = search(model, options.limit)
        print(f"{name:<46} {result}", flush=True)
        wrong += not result.broken
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
