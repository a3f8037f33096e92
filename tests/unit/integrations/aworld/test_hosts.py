from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from runtime_core.engines.protocol import Error
from runtime_core.integrations.aworld.engines import packing
from runtime_core.integrations.aworld.engines.packing import DEATHS_MAX, Hosts, HostsEnded, HostsSpec, PackedApp

SPEC = HostsSpec(PackedApp("desk", "", "", [], b""), {}, 0, 100, False)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FIRST_PAUSE_SECONDS", 0.0)


class Kept:
    """Hosts that die as often as `deaths` says, in the order of its places, and then live on."""

    def __init__(self, early_seconds: float, *deaths: int, starts: bool = True, at_once: int = 1) -> None:
        self.left = list(deaths)
        self.starts = starts
        self.told: list[int] = []
        spec = msgspec.structs.replace(SPEC, at_once=at_once)
        self.hosts = Hosts(msgspec.msgpack.encode(spec), self.report, early_seconds)
        self.living = asyncio.Event()

    def report(self, progress: bytes) -> None:
        self.told.append(msgspec.json.decode(progress)["hosts"])

    async def host(self, place: int, start: Callable[[], None]) -> str:
        if self.starts:
            start()
        if not self.left[place]:
            self.living.set()
            await asyncio.Event().wait()
        self.left[place] -= 1
        return f"killed at {place}"

    async def until_living(self) -> None:
        keeping = asyncio.ensure_future(self.hosts.keep(len(self.left), self.host))
        living = asyncio.ensure_future(self.living.wait())
        await asyncio.wait([keeping, living], timeout=5, return_when=asyncio.FIRST_COMPLETED)
        living.cancel()
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        assert self.living.is_set()


async def test_a_dead_host_is_replaced() -> None:
    kept = Kept(60.0, DEATHS_MAX - 1)
    await kept.until_living()
    assert kept.told == [1, 0] * (DEATHS_MAX - 1) + [1]


@pytest.mark.parametrize("starts", [True, False])
async def test_hosts_that_die_early_again_and_again_end_all(starts: bool) -> None:
    kept = Kept(60.0, 0, DEATHS_MAX, starts=starts)
    with pytest.raises(HostsEnded) as caught:
        async with asyncio.timeout(5):
            await kept.hosts.keep(2, kept.host)
    message = f"{DEATHS_MAX} hosts in a row died before they were ready; the last one: killed at 1"
    assert caught.value.error == Error("invalid", "ConfigurationError", message, retryable=False)


async def test_a_host_that_has_worked_for_long_may_die_any_number_of_times() -> None:
    kept = Kept(-1.0, 3 * DEATHS_MAX)
    await kept.until_living()


@pytest.mark.parametrize(("at_once", "number", "limit"), [(100, 3, 34), (4, 3, packing.LEAST_IN_FLIGHT)])
async def test_hosts_share_the_turns(at_once: int, number: int, limit: int) -> None:
    kept = Kept(60.0, *[0] * number, at_once=at_once)
    await kept.until_living()
    assert kept.hosts.in_flight == limit
