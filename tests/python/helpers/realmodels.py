"""Real weights for tests: where they are, or a skip that says why there are none.

``MPOOL_TEST_WEIGHTS`` names a folder with some of ``minilm/`` (all-MiniLM-L6-v2), ``smollm2.gguf``
(SmolLM2-135M-Instruct Q4_1), ``qwen05.gguf`` and ``qwen15.gguf`` (Qwen2.5-Coder-Instruct Q4_K_M). What is not there
comes from mpool's own catalogue, hashes checked: from its cache, or fetched, the two large ones only when slow tests
are asked for, and nothing when ``MPOOL_OFFLINE`` is set. With ``MPOOL_REQUIRE_REAL=1`` a test that misses its weights
fails instead of being skipped.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

from mpool.models import resolve
from mpool.errors import MpoolError

FILES = {"minilm": "minilm", "smollm2": "smollm2.gguf", "qwen05": "qwen05.gguf", "qwen15": "qwen15.gguf"}
KEYS = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct", "qwen05": "Qwen2.5-Coder-0.5B-Instruct",
        "qwen15": "Qwen2.5-Coder-1.5B-Instruct"}
LARGE = ("qwen05", "qwen15")


def _on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false", "off")


def _wanted(name: str) -> bool:
    """Whether weights may be fetched, and are required if anything is."""
    return name not in LARGE or _on("MPOOL_SLOW") or "--slow" in sys.argv


@functools.lru_cache(maxsize=None)
def _look(name: str) -> tuple[Path | None, str]:
    """Where the weights are, or why they are nowhere."""
    folder = os.environ.get("MPOOL_TEST_WEIGHTS")
    if folder and Path(folder, FILES[name]).exists():
        return Path(folder, FILES[name]), ""
    try:
        return Path(resolve(KEYS[name], offline=None if _wanted(name) else True, progress=False).path), ""
    except MpoolError as error:
        return None, f"needs real weights: {error}"


def find_real(name: str) -> Path | None:
    """Path of the weights called ``name``, fetched if need be, or ``None`` if they cannot be had."""
    return _look(name)[0]


def real_path(name: str) -> Path:
    """Path of the weights called ``name``; without them the test is skipped, or fails if they are required."""
    path, reason = _look(name)
    if path is None:
        if _on("MPOOL_REQUIRE_REAL") and _wanted(name):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def catalogued_path(name: str) -> Path:
    """As :func:`real_path`, but where the catalogue has it: for what is called without naming a model."""
    try:
        return Path(resolve(KEYS[name], progress=False).path)
    except MpoolError as error:
        if _on("MPOOL_REQUIRE_REAL"):
            pytest.fail(f"needs real weights: {error}")
        pytest.skip(f"needs real weights: {error}")
