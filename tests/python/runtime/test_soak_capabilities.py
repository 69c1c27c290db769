"""Soak of all five capabilities at once under a small memory limit: helpers/soak.py describes the requests. Once with
chaos (``PoolConfig.chaos``), where workers fail, stall and die.

Slow: half a minute for each memory limit, or any time: ``MPOOL_SOAK=900 pytest --slow test_soak_capabilities.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import adapterfiles
import outputcalls
import soak
import tinymodels

SCRIPT = Path(soak.__file__)
SECONDS = float(os.environ.get("MPOOL_SOAK") or 30)
#: Seconds that a request may take to end after its deadline or cancellation, in addition to delays of the machine.
GRACE = 2.0
CAPABILITIES = {"text_embedding", "text_to_text", "image_embedding", "vision", "text_to_image"}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")]


@pytest.mark.parametrize("memory, chaos", [
    ("some", ""), ("one", ""), ("some", "seed=7,fail=0.005,stall=0.0003,die=0.0003,slow=0.01,memory=0.005")])
def test_all_capabilities(tmp_path: Path, request: pytest.FixtureRequest, memory: str, chaos: str) -> None:
    """Every request has one outcome, within its deadline and GRACE, with the result it has alone; nothing stays."""
    for name in ("bert", "isolated"):
        tinymodels.bert(tmp_path / name, normalize=name == "bert")
    tinymodels.llama(tmp_path / "llama")
    tinymodels.qwen2(tmp_path / "qwen2", context=1024)
    for seed, name in enumerate(("one", "two")):
        matrices = adapterfiles.matrices(tmp_path / "llama", 4, seed)
        adapterfiles.save_peft(tmp_path / "llama-adapters" / name, matrices, 9.0)
    adapterfiles.two_adapters(tmp_path / "bert", tmp_path / "adapters")  # the networks of both models are the same
    for name in {outputcalls.OUTPUTS[row].model for row in soak.OUTPUTS}:
        (tmp_path / name).symlink_to(request.getfixturevalue(name))
    run = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), str(SECONDS), memory, chaos],
                         capture_output=True, text=True, timeout=SECONDS + 300, cwd=tmp_path)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    found = json.loads(run.stdout.splitlines()[-1])
    print(found)
    assert found["wrong"] == [] and found["hung"] == 0 and found["still"] == 0, found
    assert set(found["started"]) == set(found["answered"]) == CAPABILITIES, found
    assert found["started"] == found["ended"] and found["total"] == found["sum"], found
    assert found["illegal"] == 0 and found["threads"] == 0, found
    assert found["evictions"] >= SECONDS / 4 and found["how"]["Cancelled"] > 0 and found["how"]["Timeout"] > 0, found
    if chaos:
        assert found["chaos"] > 20 and found["how"]["completed"] > sum(found["started"].values()) / 20, found
        return
    assert found["dead"] == 0 and found["late"][0][0] <= GRACE + 2 * found["machine"], found
    assert found["swaps"].get("completed", 0) >= (SECONDS / 9 if memory == "some" else 0), found
    assert found["resident"][3] <= found["resident"][1] * 1.1 + (8 << 20), found
    assert found["left"] < 1 << 16, found
