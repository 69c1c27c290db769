"""Every output of text encoders, and adapters, as columns that Ray Data computes on a local cluster. They take minutes;
tests without a cluster are in test_ray_parquet.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clientpackages import package

package("ray.data", "ray")

import mpool  # noqa: E402

from outputcalls import bytes_of  # noqa: E402
from raydata import ROWS, RayData, record, rows_of, write_source  # noqa: E402

pytestmark = pytest.mark.slow
WHOLE = f"Embedded(files=2, rows={2 * ROWS}, skipped=0)"

#: Kind of vectors -> fixture with a model that has it, function of the library, and its options.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("m3", "embed", {}), "sparse": ("m3", "embed_sparse", {}), "tokens": ("m3", "embed_tokens", {}),
    "all": ("m3", "embed_all", {}), "labels": ("sentiment", "classify", {"top_k": 2}),
    "spans": ("tagger", "classify_tokens", {"aggregation": "simple"})}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayData]:
    found = RayData(tmp_path_factory.mktemp("ray") / "log")
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two Parquet files of texts."""
    return write_source(tmp_path_factory.mktemp("source") / "in")


def stored(kind: str, row: Any) -> bytes:
    """Return the bytes of a row of a column, as :func:`outputcalls.bytes_of` has those of the library's results."""
    if kind == "all":
        return b"".join(stored(name, row[name]) for name in ("dense", "sparse", "tokens"))
    if kind == "sparse":
        return np.int32(row["indices"]).tobytes() + np.float32(row["values"]).tobytes()
    if kind == "labels":
        return json.dumps([(one["label"], one["score"]) for one in row]).encode()
    if kind == "spans":
        return json.dumps([list(one.values()) for one in row]).encode()
    return np.float32(row).tobytes()


def wanted(kind: str, texts: list[str], model: Path, pool: mpool.Pool) -> list[bytes]:
    """Return the bytes of each text in the result of the library."""
    _, function, options = KINDS[kind]
    found = getattr(pool, function)(texts, model, **options)
    if kind == "labels":
        return [stored(kind, [{"label": one.label, "score": float(np.float32(one.score))} for one in text])
                for text in found]
    if kind == "spans":
        return [json.dumps([[one.label, float(np.float32(one.score)), one.start, one.end, one.word]
                            for one in text]).encode() for text in found]
    return bytes_of(found)


def check_columns(kinds: dict[str, str], folder: Path, texts: list[str], pool: mpool.Pool,
                  request: pytest.FixtureRequest) -> None:
    """Compare columns with the library. ``kinds``: name of a column -> its kind of vectors."""
    found = rows_of(folder)
    assert found["text"].to_pylist() == texts and len(texts) == 2 * ROWS
    for column, kind in kinds.items():
        rows = [stored(kind, row) for row in found[column].to_pylist()]
        assert rows == wanted(kind, texts, request.getfixturevalue(KINDS[kind][0]), pool), kind
        assert len(set(rows)) > ROWS, kind


def test_pipelines_have_the_values_of_the_library(cluster: RayData, source: Path, tmp_path: Path, pool: mpool.Pool,
                                                  request: pytest.FixtureRequest) -> None:
    """A pipeline with an actor for each output."""
    stages = [{"model": str(request.getfixturevalue(model)), "vectors": kind, "output": kind, **options}
              for kind, (model, _, options) in KINDS.items()]
    assert cluster.pipeline(source, tmp_path / "out", stages) == ""
    check_columns({kind: kind for kind in KINDS}, tmp_path / "out", rows_of(source)["text"].to_pylist(), pool, request)


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_values_of_the_library(cluster: RayData, source: Path, tmp_path: Path, pool: mpool.Pool,
                                              kind: str, request: pytest.FixtureRequest) -> None:
    """Files of several batches each. A second call finds all of them done."""
    model, _, options = KINDS[kind]
    given = {"model": str(request.getfixturevalue(model)), "vectors": kind, "rows": 10, **options}
    assert cluster.embed(source, tmp_path / "out", **given) == WHOLE
    check_columns({"embedding": kind}, tmp_path / "out", rows_of(source)["text"].to_pylist(), pool, request)
    assert record(tmp_path / "out")["vectors"] == kind
    assert cluster.embed(source, tmp_path / "out", **given) == "Embedded(files=0, rows=0, skipped=2)"
