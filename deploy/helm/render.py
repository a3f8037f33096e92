"""Write the Helm chart and the PrometheusRule from the manifests that kustomize builds: `python -m deploy.helm.render`.

The chart holds the same objects as `kubectl apply -k deploy/k8s`. tests/deploy/test_helm.py renders it and compares.
Only the image, the settings, the namespace, replicas and the sizes of volumes are values.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = Path(__file__).resolve().parent / "weft"
RULES = ROOT / "deploy" / "observability" / "rules"
PROMETHEUS_RULE = ROOT / "deploy" / "k8s" / "components" / "pod-monitor" / "rules.yaml"
GENERATED = "# Written by `python -m deploy.helm.render`: do not edit.\n"
LINKS = {
    "observability": ROOT / "deploy" / "observability",
    "secrets": ROOT / "deploy" / "k8s" / "base" / "secrets",
    "broker": ROOT / "deploy" / "k8s" / "base" / "broker",
}
"""The chart's links to folders. Helm reads their files when it renders, so a changed file needs no new chart."""
OBSERVABILITY = ("prometheus", "grafana")
"""Beginnings of the names of objects that `observability: false` leaves out."""

HASH = re.compile(r"-[a-z0-9]{10}$")

Manifest = dict[str, Any]  # Any: YAML


def main() -> None:
    """Write all files and links."""
    CHART.mkdir(parents=True, exist_ok=True)
    for name, folder in LINKS.items():
        (CHART / name).unlink(missing_ok=True)
        (CHART / name).symlink_to(Path(os.path.relpath(folder, CHART)))
    for path, text in files(manifests()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def manifests(kubectl: str = "") -> list[Manifest]:
    """Return the objects of the default, as kustomize builds them."""
    command = [kubectl or shutil.which("kubectl") or "kubectl", "kustomize", str(ROOT / "deploy" / "k8s")]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - kustomize
    return [each for each in yaml.safe_load_all(built) if each]


def files(objects: list[Manifest]) -> dict[Path, str]:
    """Return every generated file and its text."""
    [settings] = [each for each in objects if is_settings(each)]
    linked = {name_of(each): linked_files(each) for each in objects if each["kind"] == "ConfigMap"}
    parts: dict[str, list[str]] = {"base": [], "observability": []}
    for each in objects:
        if each["kind"] != "Namespace":  # Helm creates it: --create-namespace
            parts["observability" if of_observability(each) else "base"].append(template(each, linked))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    observability = "---\n".join(parts["observability"])
    return {
        CHART / "Chart.yaml": GENERATED + dumped(chart(version)),
        CHART / "values.yaml": GENERATED + values(version, settings["data"]),
        CHART / "templates" / "base.yaml": GENERATED + "---\n".join(parts["base"]),
        CHART / "templates" / "observability.yaml": (
            GENERATED + "{{- if .Values.observability }}\n---\n" + observability + "{{- end }}\n"
        ),
        PROMETHEUS_RULE: GENERATED + dumped(prometheus_rule()),
    }


def chart(version: str) -> Manifest:
    """Return the chart's description."""
    return {
        "apiVersion": "v2",
        "name": "weft",
        "description": "A durable runtime for agents over Redis Streams",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.32.0-0",
    }


def values(version: str, settings: dict[str, str]) -> str:
    """Return the values with their defaults, which give what kustomize builds."""
    lines = "".join(f'  {name}: "{value}"\n' for name, value in sorted(settings.items()))
    return f"""\
# The image of your app. Its own WEFT_APP names the app.
image:
  repository: weft
  tag: "{version}"
# Handlers of each kind; the autoscaler keeps between these numbers.
replicas:
  min: 2
  max: 10
# The volumes of the broker and of the trajectory-recorder.
storage:
  broker: 8Gi
  trajectories: 8Gi
# Prometheus and Grafana.
observability: true
# Settings of all services: docs/operations.md.
settings:
{lines}"""


def template(manifest: Manifest, linked: dict[str, dict[str, str]]) -> str:
    """Return an object as a template of Helm. `linked` has the files of each ConfigMap."""
    paths = linked_files(manifest) if manifest["kind"] == "ConfigMap" else {}
    if paths or is_settings(manifest):
        manifest = {key: value for key, value in manifest.items() if key != "data"}
    text = dumped(manifest).replace("{{", '{{ "{{" }}')
    if paths:
        text += "data:\n"
        text += "".join(f'  {name}: |\n{{{{ .Files.Get "{path}" | indent 4 }}}}\n' for name, path in paths.items())
    checksums = {}
    for name, files in linked.items():
        if manifest["kind"] != "ConfigMap" and name in text and files:
            got = " ".join(f'(.Files.Get "{path}")' for path in files.values())
            checksums[f"checksum/{plain(name)}"] = f"{{{{ cat {got} | sha256sum }}}}"
        # Not a hash of the content in the name: the checksums restart the pods.
        text = text.replace(name, plain(name))
    text = re.sub(r"image: weft:\S+", 'image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"', text)
    text = text.replace("namespace: weft\n", "namespace: {{ .Release.Namespace }}\n")
    text = text.replace("redis.weft.svc", "redis.{{ .Release.Namespace }}.svc")
    text = text.replace("managed-by: kustomize", "managed-by: {{ .Release.Service }}")
    if is_settings(manifest):
        text += (
            "data:\n{{- range $name, $value := .Values.settings }}\n  {{ $name }}: {{ $value | quote }}\n{{- end }}\n"
        )
    if manifest["kind"] == "HorizontalPodAutoscaler":
        text = text.replace("minReplicas: 2", "minReplicas: {{ .Values.replicas.min }}")
        text = text.replace("maxReplicas: 10", "maxReplicas: {{ .Values.replicas.max }}")
    for name, value in (("redis", "broker"), ("trajectory-recorder", "trajectories")):
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == name:
            text = text.replace("storage: 8Gi", f"storage: {{{{ .Values.storage.{value} }}}}")
    if "configMapRef" in text:
        checksums["checksum/settings"] = "{{ .Values.settings | toJson | sha256sum }}"
    if checksums:
        lines = "".join(f"        {name}: {action}\n" for name, action in checksums.items())
        text = text.replace(
            "  template:\n    metadata:\n", f"  template:\n    metadata:\n      annotations:\n{lines}", 1
        )
    return text


def name_of(manifest: Manifest) -> str:
    """Return the object's name."""
    return str(manifest["metadata"]["name"])


def plain(name: str) -> str:
    """Return the name of a generated ConfigMap without the hash of its content."""
    return HASH.sub("", name)


def linked_files(manifest: Manifest) -> dict[str, str]:
    """Return key → path within the chart of a ConfigMap's files; empty for the settings."""
    if is_settings(manifest):
        return {}
    found = {name: of_file(text) for name, text in manifest.get("data", {}).items()}
    assert all(found.values()), f"{name_of(manifest)}: link the folder of its files"
    return found


def of_file(text: str) -> str:
    """Return the path within the chart of a file with this text; empty if there is none."""
    return next((path for path, known in chart_files().items() if known == text), "")


@cache
def chart_files() -> dict[str, str]:
    """Return the text of each file that the chart has by its links."""
    return {
        f"{link}/{path.relative_to(folder)}": path.read_text(encoding="utf-8")
        for link, folder in LINKS.items()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".json", ".yaml", ".yml", ".conf", ".py")
    }


def is_settings(manifest: Manifest) -> bool:
    """Return whether this is the ConfigMap of the services' settings."""
    return manifest["kind"] == "ConfigMap" and str(manifest["metadata"]["name"]).startswith("settings-")


def of_observability(manifest: Manifest) -> bool:
    """Return whether an object belongs to Prometheus or Grafana."""
    name = str(manifest["metadata"]["name"])
    return name.startswith(OBSERVABILITY) or name == "services-is-reached-by-prometheus"


def prometheus_rule() -> Manifest:
    """Return the alert rules as an object of Prometheus' operator."""
    groups = [
        group
        for path in sorted(RULES.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "weft", "labels": {"app.kubernetes.io/name": "weft"}},
        "spec": {"groups": groups},
    }


def dumped(document: object) -> str:
    """Return YAML without folded lines, so that a template's action stays on one line."""
    text: str = yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True)
    return text


if __name__ == "__main__":
    main()
