"""Reads built kustomizations: pods, their containers, and who may connect to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.kubectl import Manifest


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def pod_templates(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Return every pod that a manifest of Kubernetes or of an operator creates, by the manifest's name."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "CronJob":
            yield name_of(manifest), spec["jobTemplate"]["spec"]["template"]
        elif manifest["kind"] == "RayCluster":
            yield f"{name_of(manifest)} head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield f"{name_of(manifest)} {group['groupName']}", group["template"]
        elif manifest["kind"] == "SparkConnect":
            for role in ("server", "executor"):
                yield f"{name_of(manifest)} {role}", spec[role]["template"]
        elif isinstance(template := spec.get("template"), dict):
            yield name_of(manifest), template


def containers(pod: Manifest) -> list[Manifest]:
    """Return all containers of a pod, including those that run before it."""
    spec = pod["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


@dataclass(frozen=True, slots=True)
class Flow:
    """A connection that must be possible. `source` and `target` are the labels of pods."""

    source: Mapping[str, str]
    target: Mapping[str, str]
    port: int
    port_name: str = ""


def allowed(flow: Flow, policies: list[Manifest]) -> tuple[bool, bool]:
    """Whether the source may send, and whether the target may receive, within the namespace."""
    sends = any(
        _peer_fits(peer, flow.target)
        for policy in policies
        if "Egress" in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], flow.source)
        for rule in policy["spec"].get("egress", ())
        if _port_fits(rule, flow)
        for peer in rule.get("to", ({},))
    )
    receives = any(
        _peer_fits(peer, flow.source)
        for policy in policies
        if "Ingress" in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], flow.target)
        for rule in policy["spec"].get("ingress", ())
        if _port_fits(rule, flow)
        for peer in rule.get("from", ({},))
    )
    return sends, receives


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "the tests know matchLabels only"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _peer_fits(peer: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a peer of a rule is a pod of the same namespace with these labels."""
    if not peer:
        return True
    return "podSelector" in peer and peer.get("namespaceSelector", {}) == {} and _selects(peer["podSelector"], labels)


def _port_fits(rule: Mapping[str, Any], flow: Flow) -> bool:
    ports = rule.get("ports")
    return not ports or any(port.get("port") in (flow.port, flow.port_name or flow.port) for port in ports)
