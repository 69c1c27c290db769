"""all-MiniLM-L6-v2 compared with sentence-transformers in float32, on real sentences in many languages, with every
pooling."""

import functools
import importlib
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpool

from realmodels import real_path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "parity" / "text"))

from make_lines import SENTENCES  # noqa: E402

#: Modules of the standard library whose documentation has at least 2,000 sentences.
MODULES = ["argparse", "ast", "asyncio.base_events", "asyncio.events", "asyncio.streams", "asyncio.subprocess",
           "asyncio.tasks", "base64", "bdb", "bisect", "bz2", "calendar", "codecs", "collections",
           "concurrent.futures._base", "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime",
           "decimal", "difflib", "dis", "doctest", "email.header", "email.message", "email.policy", "enum", "filecmp",
           "fileinput", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "html.parser", "http.client",
           "http.cookiejar", "imaplib", "importlib.abc", "importlib.util", "inspect", "io", "ipaddress", "itertools",
           "json", "locale", "logging", "logging.handlers", "lzma", "mailbox", "math", "mimetypes",
           "multiprocessing.managers", "multiprocessing.pool", "numbers", "operator", "optparse", "os", "pathlib",
           "pdb", "pickle", "pickletools", "pkgutil", "platform", "poplib", "pprint", "profile", "pydoc", "queue",
           "random", "re", "reprlib", "sched", "selectors", "shelve", "shlex", "shutil", "signal", "smtplib", "socket",
           "socketserver", "sqlite3", "ssl", "stat", "statistics", "string", "struct", "subprocess", "symtable",
           "sysconfig", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "trace",
           "traceback", "tracemalloc", "types", "typing", "unittest.case", "unittest.mock", "urllib.parse",
           "urllib.request", "uuid", "warnings", "weakref", "webbrowser", "xml.dom.minidom", "xml.etree.ElementTree",
           "xml.sax.handler", "xmlrpc.client", "zipfile", "zipimport"]


@functools.cache
def sentences(most: int = 900) -> list[str]:
    """Return up to `most` sentences: first in many languages from the tokenizer tests, then English ones from the
    docstrings of the standard library's modules, classes, functions and methods."""
    found = [part.strip() for line in SENTENCES
             for part in re.split(r"(?<=[.!?。؟।])\s+", line) if len(part.strip()) > 10]
    for name in MODULES:
        module = importlib.import_module(name)
        documented = [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]
        documented += [value for kind in documented if isinstance(kind, type)
                       for _, value in sorted(vars(kind).items()) if callable(value)]
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
    return list(dict.fromkeys(found))[:most]


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


@pytest.mark.slow
def test_real_sentences(folder: Path, reference, exact: np.ndarray) -> None:
    texts = sentences()
    assert len(texts) >= 500 and texts == sentences(2000)[:len(texts)]
    _compare(exact[:len(texts)], reference.encode(texts, batch_size=32), 0.99999, 1e-4)


def test_long_texts_are_truncated_alike(folder: Path, reference) -> None:
    texts = [" ".join(sentences()[i:i + 40]) for i in range(0, 200, 40)]
    with mpool.Pool() as pool:
        mine = pool.embed(texts, str(folder), compute="float32")
    _compare(mine, reference.encode(texts), 0.99999, 1e-4)


@functools.cache
def _embedded(folder: Path, compute: str) -> np.ndarray:
    """Return the vectors of 2,000 sentences."""
    assert len(sentences(2000)) == 2000
    with mpool.Pool() as pool:
        return pool.embed(sentences(2000), str(folder), compute=compute)


@pytest.fixture(scope="module")
def exact(folder: Path) -> np.ndarray:
    return _embedded(folder, "float32")


def _near(folder: Path, compute: str, exact: np.ndarray) -> np.ndarray:
    near = _embedded(folder, compute)
    assert not np.array_equal(exact, near)
    return near


@pytest.mark.slow
@pytest.mark.parametrize("compute, cosine", [("bfloat16", 0.9999), ("int8", 0.995)])
def test_precisions_are_near_float32(folder: Path, exact: np.ndarray, compute: str, cosine: float) -> None:
    worst = (exact * _near(folder, compute, exact)).sum(1).min()
    assert worst >= cosine, f"worst cosine {worst:.6f}"


@pytest.mark.parametrize("compute", ["bfloat16", pytest.param("int8", marks=pytest.mark.xfail(
    reason="0.98 of them: weights and activations have 8 bits each (benchmarks/NOTES.md)", strict=True))])
def test_neighbours(folder: Path, exact: np.ndarray, compute: str) -> None:
    """At least 99 % of the ten nearest neighbours among 2,000 sentences stay the same, although many of these sentences
    are nearly equal."""
    ten, near = _nearest(exact, 10), _nearest(_near(folder, compute, exact), 10)
    kept = np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(ten, near)])
    assert kept >= 0.99, f"{kept:.4f} of the ten nearest neighbours in float32 are among those in {compute}"


def _nearest(vectors: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the nearest other rows of each row, [rows, count]."""
    near = vectors @ vectors.T
    np.fill_diagonal(near, -1)
    return np.argsort(-near, axis=1, kind="stable")[:, :count]


@pytest.mark.sample(4)
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
