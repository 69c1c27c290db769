"""The program aider edits a file with completions of mpool's server, by both protocols that its documentation names.

aider pins its dependencies, so it has an environment of its own. MPOOL_AIDER is the path of its command.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest

from servers import serving

AIDER = os.environ.get("MPOOL_AIDER") or shutil.which("aider")
if AIDER is None:
    pytest.skip("needs aider: pip install aider-chat in an environment of its own, and MPOOL_AIDER=the path of its "
                "command", allow_module_level=True)

BEFORE = "def add(a, b):\n    return a - b\n"
AFTER = "def add(a, b):\n    return a + b\n"
# the reply of a model, per edit format of aider
REPLIES = {"whole": f"calc.py\n```\n{AFTER}```\n",
           "diff": "calc.py\n```python\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n"
                   "```\n"}
# The task stands in the last message. The model replies to it, and to nothing else.
TASK = "Add the numbers."
TEMPLATE = "{{ messages[-1].content }}{{ '<|message|>' if '" + TASK + "' in messages[-1].content else '<|start|>' }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = [f"{name}=" + str(chainmodels.save(
        tmp_path_factory.mktemp(name), TEMPLATE,
        [("<|message|>", reply), (reply, "<|return|>"), ("<|start|>", "<|return|>")], [reply]))
        for name, reply in REPLIES.items()]
    with serving(models) as made:
        yield made


def run(server: Any, folder: Path, model: str, *options: str) -> str:
    """Let aider do :data:`TASK` with `calc.py` in a folder. Returns what it prints."""
    assert AIDER is not None
    (folder / "calc.py").write_text(BEFORE)
    done = subprocess.run(
        [AIDER, "--model", model, "--message", TASK, "--no-git", "--yes-always", "--no-analytics", "--no-pretty",
         "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", *options, "calc.py"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "OPENAI_API_BASE": server.url + "/v1",
             "OPENAI_API_KEY": "unused", "OLLAMA_API_BASE": server.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("route", ["openai", "ollama_chat"])
@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["streamed", "whole response"])
@pytest.mark.parametrize("format", list(REPLIES))
def test_aider_edits_a_file(server: Any, tmp_path: Path, route: str, format: str, options: tuple[str, ...]) -> None:
    said = run(server, tmp_path, f"{route}/{format}", "--edit-format", format, *options)
    assert (tmp_path / "calc.py").read_text() == AFTER, said
    assert "Applied edit to calc.py" in said, said
    if options:  # aider asks for the usage of whole responses only: the reply is one token of the model
        assert re.search(r"Tokens: [\d.k]+ sent, 1 received", said), said


def test_aider_shows_the_error_of_an_unknown_model(server: Any, tmp_path: Path) -> None:
    said = run(server, tmp_path, "openai/nobody")
    assert "nobody" in said and "NotFoundError" in said, said
    assert (tmp_path / "calc.py").read_text() == BEFORE
