"""Who has cancelled the handling of a delivery: Weft, or the delivery's own code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.consumer.in_flight import Handling, cancelled_by_code
from runtime_core.telemetry.logs import HANDLED


def as_weft(handling: Handling) -> None:
    handling.cancel()


def from_another_delivery(handling: Handling) -> None:
    HANDLED.set(Delivery(0, "agent", b"1-1"))
    handling.withdraw(None)


def as_code(handling: Handling) -> None:
    HANDLED.set(Delivery(0, "agent", b"1-1"))
    handling.cancel()


@pytest.mark.parametrize(("cancel", "by_code"), [(as_weft, False), (from_another_delivery, False), (as_code, True)])
async def test_a_cancellation_by_weft_is_distinguished_from_one_by_code(
    cancel: Callable[[Handling], None], by_code: bool
) -> None:
    found: list[bool] = []

    async def handle() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            found.append(cancelled_by_code())

    async def run() -> None:
        cancel(handling)

    handling = Handling(handle(), loop=asyncio.get_running_loop())
    await asyncio.sleep(0)
    await asyncio.create_task(run())
    await handling
    assert found == [by_code]
