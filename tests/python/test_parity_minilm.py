"""all-MiniLM-L6-v2 against sentence-transformers in float32, on real sentences in many languages; and every pooling."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpool

from realmodels import real_path

sys.path.insert(0, str(Path(__file__).parent.parent / "parity" / "text"))

from make_lines import SENTENCES  # noqa: E402

MODULES = ["argparse", "asyncio.events", "base64", "collections", "concurrent.futures._base", "configparser", "copy",
           "csv", "datetime", "decimal", "difflib", "email.message", "enum", "fractions", "functools", "gettext",
           "heapq", "http.client", "imaplib", "inspect", "ipaddress", "json", "locale", "logging", "mailbox", "numbers",
           "optparse", "os", "pathlib", "pickle", "platform", "random", "shutil", "smtplib", "socket", "statistics",
           "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "turtle", "typing", "unittest.case",
           "urllib.request", "uuid", "warnings", "weakref", "zipfile"]


def sentences() -> list[str]:
    """At least 500: many languages from the tokenizer's lines, English from the standard library's documentation."""
    found = [part.strip() for line in SENTENCES
             for part in re.split(r"(?<=[.!?。؟।])\s+", line) if len(part.strip()) > 10]
    for name in MODULES:
        module = importlib.import_module(name)
        documented = [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]
        for value in documented:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                text = getattr(value, "__doc__", None)
            if not isinstance(text, str):
                continue
            for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
                part = " ".join(part.split())
                if 5 <= len(part.split()) <= 60 and part[0].isupper() and part[-1] in ".!?" and ">>>" not in part:
                    found.append(part)
    return list(dict.fromkeys(found))[:900]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_path("minilm")


@pytest.fixture(scope="module")
def reference(folder: Path):
    library = pytest.importorskip("sentence_transformers")
    return library.SentenceTransformer(str(folder), device="cpu")


def _compare(mine: np.ndarray, theirs: np.ndarray, cosine: float, difference: float) -> None:
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    both = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert both.min() >= cosine, f"worst cosine {both.min():.9f}"
    assert np.abs(a - b).max() <= difference, f"largest difference {np.abs(a - b).max():.3g}"


def test_real_sentences(folder: Path, reference) -> None:
    texts = sentences()
    assert len(texts) >= 500
    with mpool.Pool() as pool:
        mine = pool.embed(texts, str(folder), compute="float32")
    _compare(mine, reference.encode(texts, batch_size=32), 0.99999, 1e-4)


def test_long_texts_are_truncated_alike(folder: Path, reference) -> None:
    texts = [" ".join(sentences()[i:i + 40]) for i in range(0, 200, 40)]
    with mpool.Pool() as pool:
        mine = pool.embed(texts, str(folder), compute="float32")
    _compare(mine, reference.encode(texts), 0.99999, 1e-4)


@pytest.mark.parametrize("compute, cosine", [("bfloat16", 0.9999), ("int8", 0.995)])
def test_accuracy_classes(folder: Path, compute: str, cosine: float) -> None:
    texts = sentences()
    assert len(texts) >= 600
    with mpool.Pool() as pool:
        exact = pool.embed(texts, str(folder), compute="float32")
        near = pool.embed(texts, str(folder), compute=compute)
    assert not np.array_equal(exact, near)
    worst = (exact * near).sum(1).min()
    assert worst >= cosine, f"worst cosine {worst:.6f}"


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_pooling(folder: Path, reference, mode: str, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling

    texts = sentences()[::20]
    theirs_mode = {"mean_sqrt_len": "mean_sqrt_len_tokens"}.get(mode, mode)
    modules = [reference[0], Pooling(384, pooling_mode=theirs_mode), *([Normalize()] if normalize else [])]
    theirs = SentenceTransformer(modules=modules, device="cpu").encode(texts)
    with mpool.Pool() as pool:
        pool.register("pooled", str(folder), pooling=mode, normalize=normalize)
        mine = pool.embed(texts, "pooled", compute="float32")
    _compare(mine, theirs, 0.99999, 1e-4 * max(1.0, float(np.abs(theirs).max())))
