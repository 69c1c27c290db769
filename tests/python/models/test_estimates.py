"""The catalogue's ``est_memory_allocation_mb`` of the default models, compared with measured memory."""

import subprocess
import sys

import pytest

import mpool.models
from realmodels import real_path

PROGRAM = """
import gc, os, sys
import numpy, tokenizers, jinja2
import mpool, mpool._core, mpool.tasks.text_embedding, mpool.tasks.text_to_text

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
if sys.argv[1] == "text_embedding":
    mpool.embed([f"Sentence {number} of some ten words, to be embedded here." for number in range(256)], sys.argv[2])
else:
    mpool.generate("A long prompt. " * 100, sys.argv[2], max_tokens=32)
gc.collect()
print((resident() - before) / 1e6)
"""


@pytest.mark.sample(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("capability, weights", [("text_embedding", "minilm"), ("text_to_text", "smollm2")])
def test_estimate_is_close_to_the_measured_memory(capability: str, weights: str) -> None:
    stated = mpool.models.load_catalogue().default(capability).est_memory_allocation_mb
    run = subprocess.run([sys.executable, "-c", PROGRAM, capability, str(real_path(weights))], capture_output=True,
                         text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    measured = float(run.stdout)
    assert 0.6 * stated <= measured <= 1.2 * stated, f"stated {stated} MB, measured {measured:.1f} MB"
