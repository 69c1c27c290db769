"""Everything that the README shows is run, and its tables are what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realmodels import catalogued_path

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "README.md").exists() or not (ROOT / "csrc").is_dir():
    pytest.skip("the sources are not here", allow_module_level=True)

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SETUP = ("pip install . && mpool demo", 'pip install ".[test]" && pytest')
#: Runs blocks of Python in one namespace; between their outputs stands a line that nothing else prints.
RUNNER = """import json, sys
namespace = {}
for block in json.load(sys.stdin):
    exec(compile(block, "README.md", "exec"), namespace)
    print("\\n----8<----", flush=True)
"""


def test_every_block_is_known() -> None:
    """A block of another language would not be run."""
    assert {language for language, _ in BLOCKS} == {"bash", "python"}
    assert README.count("```") == 2 * len(BLOCKS)


def test_setup_is_what_is_checked_before_a_change() -> None:
    """The two commands, to the letter, are those of .ci/run."""
    commands = [block.strip() for language, block in BLOCKS if language == "bash"]
    assert commands[:2] == list(SETUP)
    script = (ROOT / ".ci" / "run").read_text()
    for command in SETUP:
        assert command in script


def test_python_blocks(tmp_path: Path) -> None:
    """In order, in one process; what is printed is what the comments say."""
    import json

    for name in ("minilm", "smollm2"):
        catalogued_path(name)
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert len(blocks) >= 5
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(blocks), cwd=tmp_path, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("\n----8<----\n")
    compared = 0
    for block, output in zip(blocks, outputs, strict=False):
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
        if expected:
            assert output.rstrip("\n").split("\n") == expected
            compared += len(expected)
    assert compared >= 8 and outputs[1].strip()


def test_commands(tmp_path: Path) -> None:
    """Line by line, in one folder."""
    for name in ("minilm", "smollm2"):
        catalogued_path(name)
    (tmp_path / "bin").mkdir()
    for name in ("mpool", "llm"):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
        shim.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
           "LLM_USER_PATH": str(tmp_path / "llm")}
    lines = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()
             if line.strip() and line not in SETUP]
    assert len(lines) >= 7
    for line in lines:
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, env=env, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout or "--output" in line, line
    import numpy as np

    assert np.load(tmp_path / "vectors.npy").shape == (2, 384)


def row(head: str) -> str:
    """A row of the table of what runs."""
    found = re.search(rf"^\| {re.escape(head)} \| (.*) \|$", README, re.MULTILINE)
    assert found is not None, head
    return found[1]


def test_options_are_those_of_the_core() -> None:
    """Row by row; a failure prints the table as it must be."""
    from mpool import _core

    expected = "\n".join(["| variable | default | meaning |", "|---|---|---|"] + [
        f"| `{name}` | {f'`{default}`' if default else 'empty'} | {meaning} |"
        for name, _, default, meaning in _core.options()])
    found = re.search(r"^<!-- made from mpool\._core\.options.*?-->\n(.*?)\n<!-- end -->$", README,
                      re.MULTILINE | re.DOTALL)
    assert found is not None and found[1] == expected, "\n" + expected


def test_what_runs_is_what_the_core_has() -> None:
    """Capabilities, and types of weights; architectures: test_verified.py."""
    from mpool import _core

    architectures = _core.architectures()
    assert set(re.findall(r"`(\w+)`", row("capabilities"))) == {capability for _, capability in architectures}
    rows = re.findall(r"^MP_DTYPE\((\w+), *-?\d+,", (ROOT / "csrc/tensor/dtype.def").read_text(), re.MULTILINE)
    weights = {name for name in rows if not re.fullmatch(r"I\d+|F64", name)}
    assert set(row("types in files").split(", ")) == weights


def test_links_lead_somewhere() -> None:
    """Files that are linked to exist."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) >= 4
    for link in links:
        assert (ROOT / link).exists(), link
