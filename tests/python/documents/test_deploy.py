"""The container file and the Compose file: syntax, and options that `mpool serve` has. Docker itself does not run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpool.cli.parser import make_parser

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
    assert command[0] == "mpool"
    return make_parser().parse_args(command[1:])


def test_container_file() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    last = dict(found)
    arguments = served(json.loads(last["CMD"]))
    assert arguments.host == "0.0.0.0" and arguments.port == int(last["EXPOSE"])
    assert arguments.token_file.startswith(last["VOLUME"] + "/") and last["USER"] == "mpool"
    assert str(arguments.port) in last["HEALTHCHECK"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    copied = [rest.split() for name, rest in found if name == "COPY"]
    assert all(parts[-2] == "." or parts[0].startswith("--from=build") for parts in copied)


def test_compose_file() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    service = found["services"]["mpool"]
    arguments = served(service["command"])
    assert arguments.host == "0.0.0.0" and arguments.allow_host == [f"mpool:{arguments.port}"]
    assert service["ports"] == [f"{arguments.port}:{arguments.port}"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    volumes = {line.partition(":")[0]: line.partition(":")[2] for line in service["volumes"]}
    assert set(volumes) == set(found["volumes"]) and arguments.token_file.startswith(volumes["data"] + "/")
    container = served(json.loads(dict(instructions())["CMD"]))
    assert (arguments.token_file, arguments.model) == (container.token_file, container.model)
