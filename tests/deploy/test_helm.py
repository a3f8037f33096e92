"""The Helm chart is what its program writes, and renders to the objects that kustomize builds."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.render import CHART, GENERATED, chart_files, files, linked_files, manifests, plain
from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, user_line
from runtime_core.bus.acl.users import USERS
from tests.deploy.kubectl import Manifest
from tests.deploy.manifests import name_of

ACTION = re.compile(r"\{\{(-?) (.*?) (-?)\}\}")


@pytest.fixture(scope="module")
def objects(kubectl_command: tuple[str, ...]) -> list[Manifest]:
    return manifests(kubectl_command[-1])


def test_the_chart_is_what_the_program_writes(objects: list[Manifest]) -> None:
    written = files(objects)
    stale = [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `python -m deploy.helm.render`"
    found = {path for path in CHART.rglob("*.yaml") if path.read_text(encoding="utf-8").startswith(GENERATED)}
    assert found == {path for path in written if path.is_relative_to(CHART)}


def test_the_chart_renders_to_what_kustomize_builds(objects: list[Manifest]) -> None:
    expected = {name_of(each): each for each in objects if each["kind"] != "Namespace"}
    rendered = {name_of(each): each for each in render(namespace="weft")}
    assert as_chart(expected) == rendered


def test_values_reach_the_objects() -> None:
    changed = {
        "image": {"repository": "registry.example/desk", "tag": "7"},
        "replicas": {"min": 3, "max": 5},
        "storage": {"broker": "20Gi", "trajectories": "9Gi"},
        "observability": False,
        "settings": {"WEFT_LOG_LEVEL": "debug"},
    }
    rendered = {name_of(each): each for each in render(namespace="agents", changed=changed)}
    assert rendered["ConfigMap/settings"]["data"] == {"WEFT_LOG_LEVEL": "debug"}
    assert not any("grafana" in name or "prometheus" in name for name in rendered)
    assert {each["metadata"]["namespace"] for each in rendered.values()} == {"agents"}
    assert rendered["HorizontalPodAutoscaler/agent-handler"]["spec"]["minReplicas"] == 3
    pod = rendered["Deployment/agent-handler"]["spec"]["template"]
    assert {each["image"] for each in (*pod["spec"]["containers"], *pod["spec"]["initContainers"])} == {
        "registry.example/desk:7"
    }
    before = {name_of(each): each for each in render(namespace="agents")}["Deployment/agent-handler"]
    assert before["spec"]["template"]["metadata"]["annotations"] != pod["metadata"]["annotations"], "nothing restarts"
    [claim] = rendered["StatefulSet/redis"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"


def test_the_charts_users_are_those_that_weft_acl_prints(tmp_path: Path) -> None:
    """The Job's program and rules are taken from the rendered chart, and run as the Job runs them."""
    [job] = [each for each in render(namespace="weft") if name_of(each) == "ConfigMap/make-secrets"]
    for name, text in job["data"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    show = "import make_secrets as made; print(made.users_file({name: name for name in made.RULES}), end='')"
    done = subprocess.run(
        [sys.executable, "-c", show],
        cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    target = Target("weft", partitions=10)
    printed = [user_line(user, target, [digest(user.name)]) for user in USERS.values()]
    assert done.stdout.splitlines() == [DEFAULT_OFF, *printed]


def test_helm_itself_renders_the_same() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("NOT TESTED: there is no helm on this machine")
    done = subprocess.run(
        [helm, "template", "weft", str(CHART), "--namespace", "weft", "--kube-version", "1.32.0"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    by_helm = {name_of(each): each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each}
    assert by_helm == {name_of(each): each for each in render(namespace="weft")}


def as_chart(expected: dict[str, Manifest]) -> dict[str, Manifest]:
    """Return kustomize's objects with what a chart says in another way."""
    text = json.dumps(expected).replace('"kustomize"', '"Helm"')
    maps = [each for each in expected.values() if each["kind"] == "ConfigMap"]
    sums = {}
    for each in maps:
        name = each["metadata"]["name"]
        text = text.replace(name, plain(name))
        sums[plain(name)] = digest(" ".join(chart_files()[path] for path in linked_files(each).values()))
    sums["settings"] = digest(as_json(values()["settings"]))
    objects: dict[str, Manifest] = json.loads(text)
    for each in objects.values():
        pod = each.get("spec", {}).get("template", {})
        mentioned = {
            f"checksum/{name}": sums[name]
            for name in re.findall(
                r'"name": "([^"]+)"',
                json.dumps(re.findall(r'"configMap(?:Ref)?": \{.*?\}', json.dumps(pod))).replace('\\"', '"'),
            )
            if name in sums
        }
        if mentioned:
            pod["metadata"]["annotations"] = mentioned
    return objects


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def as_json(settings: dict[str, str]) -> str:
    return json.dumps(settings, separators=(",", ":"), sort_keys=True)


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def render(*, namespace: str, changed: dict[str, Any] | None = None) -> list[Manifest]:
    """Render the chart with the few actions that it uses. Any other action fails."""
    given = {**values(), **(changed or {})}
    found: list[Manifest] = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(
            r"\n?\{\{- if \.Values\.observability \}\}(.*)\{\{- end \}\}\n\Z",
            lambda whole: whole[1] if given["observability"] else "",
            text,
            flags=re.DOTALL,
        )
        pairs = "".join(f"\n  {name}: {json.dumps(value)}" for name, value in sorted(given["settings"].items()))
        loop = (
            r"\n\{\{- range \$name, \$value := \.Values\.settings \}\}\n  \{\{ \$name \}\}: \{\{ \$value \| quote \}\}"
        )
        text = "".join(part + pairs for part in re.split(loop + r"\n\{\{- end \}\}", text)).removesuffix(pairs)
        text = ACTION.sub(lambda action: evaluated(action[2], given, namespace), text)
        found += [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    return found


def evaluated(action: str, given: dict[str, Any], namespace: str) -> str:
    """Return the value of one action."""
    if action == '"{{"':
        return "{{"
    if action == ".Release.Namespace":
        return namespace
    if action == ".Release.Service":
        return "Helm"
    if action == ".Values.settings | toJson | sha256sum":
        return digest(as_json(given["settings"]))
    if re.fullmatch(r'cat (\(\.Files\.Get "[^"]+"\) ?)+ \| sha256sum', action):
        return digest(" ".join(chart_files()[path] for path in re.findall(r'"([^"]+)"', action)))
    if file := re.fullmatch(r'\.Files\.Get "([^"]+)" \| indent 4', action):
        return "\n".join("    " + line for line in chart_files()[file[1]].split("\n"))
    assert action.startswith(".Values."), f"the tests do not know {action}"
    value: Any = given
    for name in action.removeprefix(".Values.").split("."):
        value = value[name]
    return str(value)
