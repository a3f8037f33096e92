"""The compose file is valid, starts in order, and has the same services as Kubernetes."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml

from runtime_core.host.service import GATEWAY, SERVICES
from runtime_core.settings import Settings
from tests.architecture.tree import ROOT
from tests.deploy.kubectl import K8S, build
from tests.deploy.manifests import containers, pod_templates

FOLDER = ROOT / "deploy" / "compose"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """Return the file with its anchors resolved and its variables unexpanded."""
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def test_it_is_a_compose_file(compose: dict[str, Any]) -> None:
    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validators.validator_for(schema)(schema).validate(compose)


def test_every_service_is_defined_behind_its_profile(compose: dict[str, Any]) -> None:
    chosen = {
        each["environment"]["SERVICE"]: each
        for each in compose["services"].values()
        if "SERVICE" in each.get("environment", {})
    }
    assert set(chosen) == {*SERVICES, GATEWAY}
    assert {name for name, each in chosen.items() if not each.get("profiles")} == {
        "agent-handler",
        "tool-handler",
        "state-manager",
        "trajectory-recorder",
    }
    assert {profile for each in compose["services"].values() for profile in each.get("profiles", ())} == {
        "http",
        "observability",
        "ray",
        "spark",
    }


def test_services_wait_for_what_they_need(compose: dict[str, Any]) -> None:
    for name, each in compose["services"].items():
        for needed, how in each.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy", f"{name} does not wait until {needed} is healthy"
            assert "healthcheck" in compose["services"][needed], needed
        if "SERVICE" in each.get("environment", {}):
            assert "redis" in each["depends_on"], name


def test_nothing_runs_with_more_rights_than_it_needs(compose: dict[str, Any]) -> None:
    for name, each in compose["services"].items():
        assert each["read_only"] is True, name
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert not each.get("privileged"), name
        for port in each.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} can be reached from other machines"


def test_the_settings_are_settings(compose: dict[str, Any]) -> None:
    for name, each in compose["services"].items():
        own = {key: value for key, value in each.get("environment", {}).items() if key.startswith("WEFT_")}
        if own:
            # Only if the caller's environment has it: else the image names the app.
            assert own.pop("WEFT_APP", None) is None, name
            # `${NAME:-default}` is what compose itself puts in.
            plain = {
                key: value.partition(":-")[2].removesuffix("}") if value.startswith("${") else value
                for key, value in own.items()
            }
            read = Settings.from_environment(plain)
            assert f"{read.shutdown_seconds + 10:g}s" == each["stop_grace_period"], name


def test_data_survives_in_volumes(compose: dict[str, Any]) -> None:
    kept = {
        volume.partition(":")[0]: name
        for name, each in compose["services"].items()
        for volume in each.get("volumes", ())
    }
    assert {name: kept[name] for name in ("redis", "trajectories", "prometheus", "grafana")} == {
        "redis": "redis",
        "trajectories": "trajectory-recorder",
        "prometheus": "prometheus",
        "grafana": "grafana",
    }
    assert set(compose["volumes"]) <= set(kept)


def test_files_that_are_mounted_exist(compose: dict[str, Any]) -> None:
    mounted = [volume.partition(":")[0] for each in compose["services"].values() for volume in each.get("volumes", ())]
    assert [path for path in mounted if path.startswith(".") and not (FOLDER / path).exists()] == []


def test_every_service_uses_its_own_user_if_there_is_a_password(compose: dict[str, Any]) -> None:
    found = {
        environment["SERVICE"]: environment["WEFT_REDIS_URL"]
        for each in compose["services"].values()
        if "SERVICE" in (environment := each.get("environment", {}))
    }
    assert found == {
        name: f"redis://{name}:${{{name.replace('-', '_').upper()}_PASSWORD:-}}@redis:6379"
        for name in (*SERVICES, GATEWAY)
    }


def test_the_broker_is_set_as_in_kubernetes() -> None:
    def settings(path: str) -> dict[str, str]:
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))

    here, there = settings("deploy/compose/redis.conf"), settings("deploy/k8s/base/broker/redis.conf")
    assert there.keys() == here.keys()
    assert {name for name, value in here.items() if there[name] != value} == {"aclfile", "maxmemory"}
    assert (here["appendonly"], here["maxmemory-policy"]) == ("yes", "noeviction")


def test_both_run_the_same_images(compose: dict[str, Any], kubectl_command: tuple[str, ...]) -> None:
    pods = pod_templates(build(kubectl_command, K8S / "overlays" / "engines"))
    there = {each["image"] for _, pod in pods for each in containers(pod)}
    here = {
        each["image"].partition(":-")[2].removesuffix("}") or each["image"] for each in compose["services"].values()
    }
    assert here == there
