"""Real weights for tests: where they are, or a skip that says why there are none.

``MPOOL_TEST_WEIGHTS`` names a folder with some of ``minilm/`` (all-MiniLM-L6-v2), ``smollm2.gguf``
(SmolLM2-135M-Instruct Q4_1), ``qwen05.gguf`` and ``qwen15.gguf`` (Qwen2.5-Coder-Instruct Q4_K_M). With
``MPOOL_REQUIRE_REAL=1`` a test that misses its weights fails instead of being skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILES = {"minilm": "minilm", "smollm2": "smollm2.gguf", "qwen05": "qwen05.gguf", "qwen15": "qwen15.gguf"}


def find_real(name: str) -> Path | None:
    """Path of the weights called ``name``, or ``None`` if they are not on this machine."""
    folder = os.environ.get("MPOOL_TEST_WEIGHTS")
    path = Path(folder, FILES[name]) if folder else None
    return path if path is not None and path.exists() else None


def real_path(name: str) -> Path:
    """Path of the weights called ``name``; without them the test is skipped, or fails if they are required."""
    path = find_real(name)
    if path is None:
        folder = os.environ.get("MPOOL_TEST_WEIGHTS")
        reason = (f"{FILES[name]} is not in MPOOL_TEST_WEIGHTS ({folder})" if folder else
                  f"needs real weights ({FILES[name]}): MPOOL_TEST_WEIGHTS is not set")
        if os.environ.get("MPOOL_REQUIRE_REAL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
