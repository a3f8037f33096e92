"""Builds kustomizations with kubectl: this machine's own if it is new enough, or that of Debian 13."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.tree import ROOT
from tests.servers.debian import Program, command_of

K8S = ROOT / "deploy" / "k8s"
DEBIAN = Program("kubectl-1.32", "trixie", "usr/bin/kubectl", "kubectl", ("kubectl", "libc6"))
MINOR = 32
"""Older ones have another kustomize inside, which knows less."""

Manifest = dict[str, Any]
"""One object as Kubernetes reads it: as free in its shape as YAML is."""


def kubectl(servers: Path) -> tuple[str, ...]:
    """Return the command line of a kubectl. Raises Unavailable if there is none and none can be fetched."""
    own = shutil.which("kubectl")
    if own is not None:
        told = subprocess.run(
            [own, "version", "--client", "--output=json"], capture_output=True, text=True, check=False
        )
        version = json.loads(told.stdout)["clientVersion"] if told.returncode == 0 else {"major": "0", "minor": "0"}
        if version["major"] == "1" and int(version["minor"].rstrip("+")) >= MINOR:
            return (own,)
    return command_of(DEBIAN, servers)


@cache
def build(command: tuple[str, ...], folder: Path) -> tuple[Manifest, ...]:
    """Return every object of a kustomization, as `kubectl apply -k` would send it."""
    done = subprocess.run(
        [*command, "kustomize", str(folder)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    # With libyaml: in Python alone this takes longer than kubectl itself.
    return tuple(document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document)
