"""The container file and the Kubernetes manifest: options that `mpool serve` has. They agree with each other. Neither
Docker nor Kubernetes runs here."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpool.cli.parser import make_parser
from mpool.server.option_table import OPTIONS

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
if not DEPLOY.exists():
    pytest.skip("needs the repository", allow_module_level=True)
#: Instructions of a Dockerfile, https://docs.docker.com/reference/dockerfile/.
INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container file with their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def served(command: list[str]) -> Any:
    """Return the parsed command, with the default port if it names none."""
    assert command[0] == "mpool"
    return make_parser().parse_args(command[1:], argparse.Namespace(port=int(OPTIONS["port"].default)))


def test_container_file() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    last = dict(found)
    arguments = served(json.loads(last["CMD"]))
    assert arguments.host == "0.0.0.0" and arguments.port == int(last["EXPOSE"])
    assert arguments.token_file.startswith(last["VOLUME"] + "/")
    assert last["USER"] == "10001" and "--uid 10001 mpool" in last["RUN"]
    assert str(arguments.port) in last["HEALTHCHECK"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    copied = [rest.split() for name, rest in found if name == "COPY"]
    assert all(parts[-2] == "." or parts[0].startswith("--from=build") for parts in copied)


def test_kubernetes_manifest() -> None:
    yaml = pytest.importorskip("yaml")
    found = {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))}
    assert set(found) == {"Deployment", "Service", "PersistentVolumeClaim"}
    pod = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == found["Service"]["spec"]["selector"] == labels
    (container,) = pod["spec"]["containers"]
    arguments = served(container["command"])
    (port,), (exposed,) = container["ports"], found["Service"]["spec"]["ports"]
    assert arguments.host == "0.0.0.0" and arguments.port == port["containerPort"] == exposed["port"]
    assert exposed["targetPort"] == port["name"]
    assert arguments.allow_host == [f"{found['Service']['metadata']['name']}:{exposed['port']}"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == set(mounts)
    assert arguments.token_file.startswith(mounts["data"] + "/")
    (data,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "data")
    assert data["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    user = dict(instructions())["USER"]
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == user
    assert container["securityContext"]["readOnlyRootFilesystem"]
