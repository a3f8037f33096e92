"""Valid settings of tenants, and what each partition stores of them."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.publishers import Tenant, remove_tenant, set_tenant, tenants


@pytest.mark.parametrize(
    ("tenant", "field"),
    [
        (Tenant("a\nb"), "tenant"),
        (Tenant("x" * 257), "tenant"),
        (Tenant("", max_open=1), "tenant"),
        (Tenant("", rate=1.0), "tenant"),
        (Tenant("acme", weight=0), "weight"),
        (Tenant("acme", weight=1001), "weight"),
        (Tenant("acme", max_open=-1), "max_open"),
        (Tenant("acme", rate=0.0001), "rate"),
        (Tenant("acme", rate=float("inf")), "rate"),
        (Tenant("acme", rate=float("nan")), "rate"),
    ],
)
def test_settings_that_cannot_be_stored_are_named(tenant: Tenant, field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        tenant.check()
    assert error.value.field == field


def test_each_partition_has_its_part_of_the_limits() -> None:
    assert Tenant("acme", 2, 10, 100.0).stored(4) == "2 3 25.000000 10 100.000000"
    assert Tenant("acme", 2).stored(4) == "2 0 0.000000 0 0.000000"
    assert Tenant("acme", rate=0.001).stored(16384).split(" ")[2] != "0.000000", "0 would be no limit"


async def test_settings_are_the_same_in_every_partition(namespace: str) -> None:
    transport = await connect("memory://")
    buses = [EventBus(transport, Keys(namespace, number)) for number in range(2)]
    acme, others = Tenant("acme", 2, 10, 2.5), Tenant("*", max_open=5)
    for tenant in (acme, others, Tenant("", weight=3)):
        await set_tenant(buses, tenant)
    for bus in buses:
        assert await tenants(bus) == [Tenant("", weight=3), others, acme]
    assert await remove_tenant(buses, "acme")
    assert not await remove_tenant(buses, "acme")
    for bus in buses:
        assert await tenants(bus) == [Tenant("", weight=3), others]
    await transport.close()
