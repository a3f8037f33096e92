"""What a driver of Ray reads from its environment."""

from __future__ import annotations

import sys

import pytest

from runtime_core.engines.protocol import Away
from runtime_core.engines.ray.cluster import Cluster, RaySettings, _shut_down


def test_without_settings_a_local_ray_starts() -> None:
    settings = RaySettings.from_environment({})
    assert (settings.address, settings.namespace, settings.dashboard, settings.jobs_url) == ("", "weft", False, "")
    assert settings.local_cpus > 0


def test_all_settings_are_read() -> None:
    settings = RaySettings.from_environment(
        {
            "WEFT_RAY_ADDRESS": "ray-head:6379",
            "WEFT_NAMESPACE": "shop",
            "WEFT_RAY_LOCAL_CPUS": "3",
            "WEFT_RAY_LOCAL_STORE_BYTES": "100000000",
            "WEFT_RAY_DASHBOARD": "1",
            "WEFT_RAY_JOBS_URL": "http://ray-head:8265",
        }
    )
    assert (settings.address, settings.namespace, settings.local_cpus) == ("ray-head:6379", "shop", 3)
    assert (settings.local_store_bytes, settings.dashboard) == (100_000_000, True)
    assert settings.jobs_url == "http://ray-head:8265"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WEFT_RAY_ADDRESS", "ray://head:10001", "Ray Client is not supported"),
        ("WEFT_RAY_ADDRESS", "head", "not host:port"),
        ("WEFT_RAY_ADDRESS", "head:0", "not host:port"),
        ("WEFT_RAY_LOCAL_CPUS", "none", "must be a whole number from 1"),
        ("WEFT_RAY_LOCAL_STORE_BYTES", "5", "must be a whole number from 83886080"),
        ("WEFT_RESULT_INLINE_BYTES", "-1", "must be a whole number"),
    ],
)
def test_an_unusable_value_is_named_in_one_line(variable: str, value: str, message: str) -> None:
    with pytest.raises(Away) as error:
        RaySettings.from_environment({variable: value})
    assert str(error.value).startswith(f"{variable}=")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


async def test_a_missing_head_is_reported_in_one_line_before_ray_starts() -> None:
    settings = RaySettings.from_environment({"WEFT_RAY_ADDRESS": "127.0.0.1:1"})
    with pytest.raises(Away, match=r"no Ray at WEFT_RAY_ADDRESS=127.0.0.1:1: .*is its head up") as error:
        await Cluster(settings).open()
    assert "\n" not in str(error.value)


def test_a_ray_that_was_never_loaded_is_left_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt to connect without the package would log one."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "path", [])
    _shut_down(None)
    assert caplog.text == ""
