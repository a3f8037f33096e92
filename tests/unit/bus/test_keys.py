"""The keys of a partition: one slot of a Cluster, and no two things under one name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from runtime_core.bus.keys import GROUPS, Keys, group_of, ingress, namespace_settings
from runtime_core.wire.ids import ROOT_RUN

KEYS = Keys("weft", 3)


def all_keys() -> dict[str, str]:
    """Return each key by the name of its function, with `a`, `b` for what the function takes."""
    found: dict[str, str] = {}
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in Keys.__slots__:
            continue
        if isinstance(member, property):
            found[name] = getattr(KEYS, name)
        else:
            make: Callable[..., str] = getattr(KEYS, name)
            found[name] = make(*"ab"[: len(inspect.signature(make).parameters)])
    return found


def test_all_keys_of_a_partition_share_a_slot() -> None:
    found = all_keys()
    assert len(found) > 50
    assert {name for name, key in found.items() if not key.startswith("weft:{3}:")} == set()


def test_no_two_things_have_one_key() -> None:
    found = all_keys()
    assert len(set(found.values())) == len(found), sorted(found.items(), key=lambda each: each[1])


def test_the_first_run_of_a_task_shares_its_hash() -> None:
    assert KEYS.run("t", ROOT_RUN) == KEYS.task("t") == "weft:{3}:task:t"
    assert KEYS.run("t", f"{ROOT_RUN}/2") == "weft:{3}:run:t/r/2"


def test_a_pool_has_the_group_of_its_kind() -> None:
    assert {kind: group_of(kind) for kind in GROUPS} == {kind: group_of(f"{kind}:gpu") for kind in GROUPS} == GROUPS


def test_keys_of_the_namespace_name_no_partition() -> None:
    assert (ingress("weft"), ingress("weft", "shop")) == ("weft:tasks", "weft:tasks:shop")
    assert namespace_settings("weft") == "weft:settings"
