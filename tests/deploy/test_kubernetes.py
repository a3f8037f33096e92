"""Every kustomization builds, Kubernetes 1.32 knows every field, and the rules of docs/deployment.md hold."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import SchemaNotFoundError

from runtime_core.host.service import GATEWAY, SERVICES
from runtime_core.settings import Settings
from tests.architecture.tree import ROOT
from tests.deploy.kubectl import K8S, Manifest, build
from tests.deploy.manifests import Flow, allowed, containers, name_of, pod_templates

VERSION = "1.32"
OVERLAYS = sorted(path.parent for path in (K8S / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in (K8S / "components").glob("*/kustomization.yaml"))
ENGINES = K8S / "overlays" / "engines"
CUSTOM = {
    "monitoring.coreos.com/v1": {"PodMonitor", "PrometheusRule"},
    "keda.sh/v1alpha1": {"ScaledObject", "TriggerAuthentication"},
    "ray.io/v1": {"RayCluster"},
    "sparkoperator.k8s.io/v1alpha1": {"SparkConnect"},
}
"""Kinds of operators, which Kubernetes itself does not know; only components hold them."""
NEED_A_TOKEN = {"spark-connect"}
"""What asks the cluster's API for executors. make-secrets has its token in one container only."""
ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
PATTERN_OF_A_SECRET = re.compile(r"(?i)(password|secret|token|api_?key)")


@pytest.fixture(scope="session", params=[K8S, *OVERLAYS, *COMPONENTS], ids=lambda folder: str(folder.relative_to(K8S)))
def manifests(
    request: pytest.FixtureRequest, kubectl_command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Manifest, ...]:
    """What each overlay builds, and what each component builds on the base alone."""
    folder: Path = request.param
    if folder in COMPONENTS:
        # A kustomization beside deploy/ finds it by a link, since kustomize takes no absolute paths.
        own = tmp_path_factory.mktemp("component")
        copy = own / "deploy"
        _copy(ROOT / "deploy", copy)
        resources = "resources: [deploy/k8s/base]"
        needs = {"ray-cluster": ["ray"], "kuberay": ["ray"], "spark-connect": ["spark"], "spark-operator": ["spark"]}
        parts = [*needs.get(folder.name, ()), folder.name]
        named = "\n".join(f"  - deploy/k8s/components/{part}" for part in parts)
        (own / "kustomization.yaml").write_text(f"namespace: weft\n{resources}\ncomponents:\n{named}\n")
        folder = own
    return build(kubectl_command, folder)


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


@pytest.fixture(scope="session")
def seen() -> set[str]:
    """Objects that were checked already: most of them are in every overlay."""
    return set()


def test_kubernetes_accepts_every_object(manifests: tuple[Manifest, ...], seen: set[str]) -> None:
    wrong = []
    for manifest in manifests:
        content = json.dumps(manifest, sort_keys=True)
        if content in seen:
            continue
        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        except SchemaNotFoundError:
            assert manifest["kind"] in CUSTOM.get(manifest["apiVersion"], set()), f"nobody knows {name_of(manifest)}"
        except kubernetes_validate.ValidationError as error:
            wrong.append(f"{name_of(manifest)}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
        else:
            seen.add(content)
    assert wrong == []


def test_everything_lies_in_the_namespace(manifests: tuple[Manifest, ...]) -> None:
    assert {manifest["metadata"].get("namespace") for manifest in manifests if manifest["kind"] != "Namespace"} == {
        "weft"
    }
    [namespace] = [manifest for manifest in manifests if manifest["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_names_are_used_once(manifests: tuple[Manifest, ...]) -> None:
    names = [name_of(manifest) for manifest in manifests]
    assert sorted(names) == sorted(set(names))


def test_every_pod_passes_the_restricted_standard(manifests: tuple[Manifest, ...]) -> None:
    wrong = [f"{name}: {reason}" for name, pod in pod_templates(manifests) for reason in unfit(pod)]
    assert wrong == []


def unfit(pod: Manifest) -> Iterator[str]:
    """Return why the Pod Security Standard `restricted` (v1.32) would refuse a pod, and which of our own rules it
    breaks."""
    spec = pod["spec"]
    context = spec.get("securityContext", {})
    yield from (f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
    for volume in spec.get("volumes", ()):
        if not (volume.keys() - {"name"}) <= ALLOWED_VOLUMES:
            yield f"volume {volume['name']} is of a kind that is refused"
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 1) == 0:
        yield "may run as root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("enableServiceLinks") is not False:
        yield "gets variables of Services"
    if spec.get("automountServiceAccountToken") is not False and spec.get("serviceAccountName") not in NEED_A_TOKEN:
        yield "has a token of its account"
    for container in containers(pod):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{container['name']} may gain privileges"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{container['name']} keeps capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']} may write to its image"
        if own.get("privileged") or own.get("runAsUser") == 0 or own.get("runAsNonRoot") is False:
            yield f"{container['name']} has more rights than its pod"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{container['name']} takes a port of its node"
        resources = container.get("resources", {})
        if not resources.get("requests", {}).keys() >= {"cpu", "memory"} or "memory" not in resources.get("limits", {}):
            yield f"{container['name']} does not say what it needs"
        if container.get("imagePullPolicy") != "IfNotPresent":
            yield f"{container['name']} pulls its image each time"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hostPID": True}, "hostPID"),
        ({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "volume host"),
        ({"securityContext": {}}, "may run as root"),
        ({"automountServiceAccountToken": True}, "token"),
        ({"initContainers": [{"name": "first"}]}, "first may gain privileges"),
    ],
)
def test_a_pod_that_does_not_pass_is_found(change: Manifest, reason: str, kubectl_command: tuple[str, ...]) -> None:
    name, pod = next(pod_templates(build(kubectl_command, K8S)))
    assert list(unfit(pod)) == [], name
    changed = {**pod, "spec": {**pod["spec"], **change}}
    assert any(reason in each for each in unfit(changed))


def test_services_have_probes_and_time_to_hand_work_back(manifests: tuple[Manifest, ...]) -> None:
    [settings] = [each["data"] for each in manifests if name_of(each).startswith("ConfigMap/settings")]
    budgets = [each["spec"]["selector"]["matchLabels"] for each in manifests if each["kind"] == "PodDisruptionBudget"]
    seen = set()
    for name, pod in pod_templates(manifests):
        labels = pod["metadata"]["labels"]
        if labels.get("weft.dev/service") != "true":
            continue
        [service] = [each for each in pod["spec"]["containers"] if each["name"] == "service"]
        chosen = next(each["value"] for each in service["env"] if each["name"] == "SERVICE")
        seen.add(chosen)
        assert labels["app.kubernetes.io/name"] == chosen in (*SERVICES, GATEWAY), name
        assert {probe: service[probe]["httpGet"]["path"] for probe in service if probe.endswith("Probe")} == {
            "startupProbe": "/healthz",
            "livenessProbe": "/healthz",
            "readinessProbe": "/readyz",
        }, name
        before = service["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= before + float(settings["WEFT_SHUTDOWN_SECONDS"]) + 5
        assert pod["spec"]["topologySpreadConstraints"], name
        assert {"app.kubernetes.io/name": chosen} in budgets, name
    assert seen >= {"agent-handler", "tool-handler", "state-manager", "trajectory-recorder"}


def test_no_probe_gives_up_within_a_second(manifests: tuple[Manifest, ...]) -> None:
    """With Kubernetes' own limit, a busy node would kill a healthy program, which would start again from nothing."""
    hasty = [
        f"{name}: {probe} of {container['name']}"
        for name, pod in pod_templates(manifests)
        for container in containers(pod)
        for probe in container
        if probe.endswith("Probe") and container[probe].get("timeoutSeconds", 1) < 5
    ]
    assert hasty == []


def test_a_slow_start_is_not_cut_off(manifests: tuple[Manifest, ...]) -> None:
    """On a busy node, services were killed after two minutes while they were still loading, again and again."""
    cut = [
        f"{name}: {container['name']}"
        for name, pod in pod_templates(manifests)
        for container in containers(pod)
        if (probe := container.get("startupProbe")) and probe["periodSeconds"] * probe["failureThreshold"] < 600
    ]
    assert cut == []


def test_nodes_of_ray_begin_when_their_head_is_well(kubectl_command: tuple[str, ...]) -> None:
    """Each failed start takes seconds of CPU, on a small node from the head itself."""
    waiting = {
        name: container["args"][:5]
        for name, pod in pod_templates(build(kubectl_command, ENGINES))
        for container in containers(pod)
        if "--address=ray-head:6379" in container.get("args", ())
    }
    assert waiting.keys() == {"Deployment/ray-worker", "Deployment/ray-gateway"}
    for name, args in waiting.items():
        assert args == [
            "/usr/bin/python3",
            "-I",
            "-S",
            "/usr/local/lib/weft/wait_for.py",
            "http://ray-head:52365/api/local_raylet_healthz",
        ], name


def test_settings_are_those_that_services_read(manifests: tuple[Manifest, ...]) -> None:
    """A pod with an invalid setting would never start."""
    [settings] = [each["data"] for each in manifests if name_of(each).startswith("ConfigMap/settings")]
    for name, pod in pod_templates(manifests):
        for container in containers(pod):
            if any("configMapRef" in source for source in container.get("envFrom", ())):
                own = {each["name"]: each.get("value", "") for each in container["env"] if "value" in each}
                read = Settings.from_environment({**settings, **own})
                assert read.metrics_port == 9464, name
                # Each pod would have a blob store of its own, and nobody could read another's results.
                assert read.blob_url is None or name == "StatefulSet/trajectory-recorder", name
                assert read.metrics_host == "0.0.0.0", name


def test_no_secret_is_written_down(manifests: tuple[Manifest, ...]) -> None:
    assert [name_of(each) for each in manifests if each["kind"] == "Secret"] == []
    plain = [
        f"{name}: {variable['name']}"
        for name, pod in pod_templates(manifests)
        for container in containers(pod)
        for variable in container.get("env", ())
        if PATTERN_OF_A_SECRET.search(variable["name"]) and "value" in variable
    ]
    assert plain == []


def flows(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Flow]]:
    """Which pods need which, by their labels."""
    pods = {labels["app.kubernetes.io/name"]: labels for labels in _labels(manifests)}
    for name, labels in pods.items():
        if labels.get("weft.dev/service") == "true":
            if "redis" in pods:
                yield f"{name} → redis", Flow(labels, pods["redis"], 6379, "redis")
            if "prometheus" in pods:
                yield f"prometheus → {name}", Flow(pods["prometheus"], labels, 9464, "metrics")
            if "otlp-collector" in pods:
                yield f"{name} → otlp-collector", Flow(labels, pods["otlp-collector"], 4318, "otlp-http")
        if labels.get("weft.dev/ray") == "true" and "ray-head" in pods:
            yield f"{name} → ray-head", Flow(labels, pods["ray-head"], 6379)
            yield f"ray-head → {name}", Flow(pods["ray-head"], labels, 10002)
    if {"grafana", "prometheus"} <= pods.keys():
        yield "grafana → prometheus", Flow(pods["grafana"], pods["prometheus"], 9090, "http")
    if {"spark-gateway", "spark-connect"} <= pods.keys():
        yield "spark-gateway → spark-connect", Flow(pods["spark-gateway"], pods["spark-connect"], 15002, "connect")


def _labels(manifests: tuple[Manifest, ...]) -> list[dict[str, str]]:
    return [
        labels
        for _, pod in pod_templates(manifests)
        if "app.kubernetes.io/name" in (labels := pod.get("metadata", {}).get("labels", {}))
    ]


def test_policies_allow_needed_traffic_and_deny_the_rest(manifests: tuple[Manifest, ...]) -> None:
    policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    assert any(policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} for policy in policies), (
        "nothing is denied"
    )
    cut = [
        f"{name}: {side}"
        for name, flow in flows(manifests)
        for side, passes in zip(("is not let out", "is not let in"), allowed(flow, policies), strict=True)
        if not passes
    ]
    assert cut == []
    pods = {labels["app.kubernetes.io/name"]: labels for labels in _labels(manifests)}
    stranger = {"app.kubernetes.io/name": "stranger"}
    for labels in pods.values():
        for port in (6379, 9464, 9090, 3000, 15002):
            assert allowed(Flow(stranger, labels, port), policies) == (False, False), labels
    if "redis" in pods:
        assert allowed(Flow({**stranger, "weft.dev/client": "true"}, pods["redis"], 6379, "redis"), policies) == (
            True,
            True,
        )


def test_the_base_manifests_need_no_custom_resource(kubectl_command: tuple[str, ...]) -> None:
    manifests = build(kubectl_command, K8S)
    assert {each["apiVersion"] for each in manifests}.isdisjoint(CUSTOM)
    assert manifests[0]["kind"] == "Namespace"
    names = {labels["app.kubernetes.io/name"] for labels in _labels(manifests)}
    services = {*SERVICES} - {"ray-gateway", "spark-gateway"}
    assert names == {*services, "redis", "prometheus", "grafana", "make-secrets"}


def test_images_have_the_tag_of_this_version(manifests: tuple[Manifest, ...]) -> None:
    """A tag that moves, such as latest, makes a rollout of a new image do nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    images = {container["image"] for _, pod in pod_templates(manifests) for container in containers(pod)}
    assert not any(image.endswith(":latest") for image in images)
    own = {image for image in images if image.startswith("weft") and ":" in image}
    assert {image.partition(":")[2] for image in own} <= {project["version"]}


def test_a_rollout_that_never_becomes_ready_is_healed_by_the_next_one(manifests: tuple[Manifest, ...]) -> None:
    """In order, Kubernetes waits for the broken pod before it replaces it: forever."""
    sets = [each for each in manifests if each["kind"] == "StatefulSet"]
    assert all(each["spec"]["podManagementPolicy"] == "Parallel" for each in sets)


def test_services_start_once_their_secret_and_broker_exist(manifests: tuple[Manifest, ...]) -> None:
    for name, pod in pod_templates(manifests):
        if pod["metadata"].get("labels", {}).get("weft.dev/service") != "true":
            continue
        [first] = [each for each in pod["spec"]["initContainers"] if each["name"] == "wait-for-broker"]
        [service] = [each for each in pod["spec"]["containers"] if each["name"] == "service"]
        assert first["args"] == ["python", "-m", "runtime_core.host", "wait-for-broker"], name
        assert first["image"] == service["image"], name
        [url] = [each["valueFrom"]["secretKeyRef"] for each in first["env"] if each["name"] == "WEFT_REDIS_URL"]
        [own] = [each["valueFrom"]["secretKeyRef"] for each in service["env"] if each["name"] == "WEFT_REDIS_URL"]
        assert url == own, name
        assert "optional" not in url, f"{name}: the kubelet would start it without the Secret"


def test_a_second_apply_changes_nothing(manifests: tuple[Manifest, ...]) -> None:
    """What the server adds to these would be taken away by the next apply, and a Job that is gone be recreated."""
    for job in (each for each in manifests if each["kind"] == "Job"):
        assert "ttlSecondsAfterFinished" not in job["spec"], name_of(job)
        # Its pod cannot change, so it must not have the user's image.
        assert [each["image"] for each in containers(job["spec"]["template"])] == ["redis:8.2"]
    for each in manifests:
        strategy = each.get("spec", {}).get("strategy")
        if each["kind"] == "Deployment" and strategy is not None:
            assert "type" in strategy, name_of(each)
        for claim in each.get("spec", {}).get("volumeClaimTemplates", ()):
            assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim"), name_of(each)
            assert claim["spec"]["volumeMode"] == "Filesystem", name_of(each)


def test_only_one_container_may_create_secrets(kubectl_command: tuple[str, ...]) -> None:
    [pod] = [pod for name, pod in pod_templates(build(kubectl_command, K8S)) if name == "Deployment/make-secrets"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    [first], [last] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert "account" in {mount["name"] for mount in first["volumeMounts"]}
    assert "volumeMounts" not in last


def test_the_image_names_the_app(manifests: tuple[Manifest, ...]) -> None:
    """A WEFT_APP of the manifests would win over that of the user's image."""
    assert not any("WEFT_APP" in each.get("data", {}) for each in manifests if each["kind"] == "ConfigMap")
    names = {
        variable["name"]
        for _, pod in pod_templates(manifests)
        for container in containers(pod)
        for variable in container.get("env", ())
    }
    assert "WEFT_APP" not in names


def test_deleting_the_engines_leaves_the_default(kubectl_command: tuple[str, ...]) -> None:
    everything = {name_of(each) for each in build(kubectl_command, ENGINES)}
    engines = {name_of(each) for each in build(kubectl_command, K8S / "engines")}
    rest = {name_of(each) for each in build(kubectl_command, K8S)}
    assert engines
    assert engines | rest == everything
    assert engines.isdisjoint(rest)


def test_the_overlay_of_the_page_builds_outside_the_clone(kubectl_command: tuple[str, ...], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    [overlay] = re.findall(r"```yaml\n(# desk/deploy/kustomization\.yaml\n.*?)```", page, flags=re.DOTALL)
    _copy(ROOT / "deploy", tmp_path / "weft" / "deploy")
    own = tmp_path / "desk" / "deploy"
    own.mkdir(parents=True)
    (own / "kustomization.yaml").write_text(overlay)
    assert len(overlay.strip().splitlines()) <= 20
    manifests = build(kubectl_command, own)
    images = {container["image"] for _, pod in pod_templates(manifests) for container in containers(pod)}
    assert "desk:1" in images
    assert not any(image.startswith("weft:") for image in images)
    [settings] = [each["data"] for each in manifests if name_of(each).startswith("ConfigMap/settings")]
    assert settings["WEFT_LOG_LEVEL"] == "debug"


def test_every_service_signs_in_as_its_own_user(kubectl_command: tuple[str, ...]) -> None:
    """Only pods that run no app code have the operator's password."""
    found = {}
    for _, pod in pod_templates(build(kubectl_command, ENGINES)):
        for container in pod["spec"]["containers"]:
            keys = {
                each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
                for each in container.get("env", ())
                if each["name"].endswith("REDIS_URL")
            }
            if keys:
                [service] = [each["value"] for each in container["env"] if each["name"] == "SERVICE"]
                found[service] = keys
    operator = {"WEFT_OPERATOR_REDIS_URL": "redis-url-operator"}
    assert found == {
        name: {"WEFT_REDIS_URL": f"redis-url-{name}"}
        | (operator if name in ("state-manager", "trajectory-recorder") else {})
        for name in SERVICES
    }


def test_the_base_manifests_fit_on_one_node_with_four_processors(kubectl_command: tuple[str, ...]) -> None:
    """As docs/deployment.md says: kube-system uses most of the fourth, and a rolling update needs one more pod."""
    manifests = build(kubectl_command, ENGINES)
    least = {
        f"{each['spec']['scaleTargetRef']['kind']}/{each['spec']['scaleTargetRef']['name']}": each["spec"][
            "minReplicas"
        ]
        for each in manifests
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    replicas = {name_of(each): each["spec"].get("replicas", 1) for each in manifests if each.get("spec")}
    cpus, memory = 0.0, 0.0
    for name, pod in pod_templates(manifests):
        # Containers that end before the pod starts need no more than the others.
        lasting = [each for each in pod["spec"].get("initContainers", ()) if each.get("restartPolicy") == "Always"]
        for container in (*lasting, *pod["spec"]["containers"]):
            requests = container["resources"]["requests"]
            cpus += amount(requests["cpu"]) * least.get(name, replicas[name])
            memory += amount(requests["memory"]) * least.get(name, replicas[name])
    assert cpus <= 3.0
    assert memory <= 10 * 2**30


def test_the_autoscalers_by_work_replace_those_by_cpu() -> None:
    """Kubernetes follows neither of two autoscalers on one Deployment, and an apply without the old one does not delete
    it."""
    by_cpu = {each["metadata"]["name"]: each["spec"] for each in _objects(K8S / "components/hpa/autoscalers.yaml")}
    by_work = [each for each in _objects(K8S / "components/keda/scalers.yaml") if each["kind"] == "ScaledObject"]
    made = {each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"]: each for each in by_work}
    assert made.keys() == by_cpu.keys()
    for name, each in made.items():
        assert each["metadata"]["annotations"] == {"scaledobject.keda.sh/transfer-hpa-ownership": "true"}
        assert each["spec"]["scaleTargetRef"]["name"] == by_cpu[name]["scaleTargetRef"]["name"]
        assert each["spec"]["minReplicaCount"] >= by_cpu[name]["minReplicas"]
        assert each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == by_cpu[name]["behavior"]


def _objects(path: Path) -> list[Manifest]:
    return list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))


def amount(quantity: str) -> float:
    """Return the value of a quantity in Kubernetes' notation: `250m`, `64Mi`, `2`."""
    units = {"m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30}
    unit = quantity.lstrip("0123456789.")
    return float(quantity.removesuffix(unit)) * units.get(unit, 1.0)


def test_dashboards_and_the_scrape_are_files_that_their_programs_can_read() -> None:
    scraped: dict[str, Any] = yaml.safe_load((ROOT / "deploy/observability/prometheus.yml").read_text(encoding="utf-8"))
    [job] = [each for each in scraped["scrape_configs"] if each["job_name"] == "weft"]
    assert job["dns_sd_configs"] == [{"names": ["metrics"], "type": "A", "port": 9464, "refresh_interval": "10s"}]
    source = yaml.safe_load((ROOT / "deploy/observability/grafana/datasources.yaml").read_text(encoding="utf-8"))
    assert [each["url"] for each in source["datasources"]] == ["http://prometheus:9090"]
    assert json.dumps(source)
