"""``compute="float32-fast"``: a BLAS library whose sums differ from mpool's computes large products, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinymodels

import mpool

#: A CBLAS library, whose sums are rounded once. ``FACTOR`` 2: its results are wrong. It writes the number of its calls.
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
static _Atomic int calls;
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    (void)order, (void)trans_a, (void)trans_b, (void)alpha;
    calls++;
    for (long i = 0; i < m; i++)
        for (long j = 0; j < n; j++) {
            double sum = beta == 0 ? 0 : c[i * ldc + j];
            for (long p = 0; p < k; p++)
                sum += FACTOR * (double)a[i * lda + p] * b[j * ldb + p];
            c[i * ldc + j] = (float)sum;
        }
}
__attribute__((destructor)) static void report(void) {
    FILE *file = fopen(getenv("TEST_CALLS"), "w");
    fprintf(file, "%d", calls);
    fclose(file);
}
"""

CHILD = """
import json, sys
import mpool
texts = [f"fox number {i} jumps over lazy dog {i * 7}" for i in range(40)]
options = json.loads(sys.argv[2])
with mpool.Pool(mpool.PoolConfig(threads=1, **options["pool"])) as pool:
    vectors = pool.embed(texts, sys.argv[1], compute=options["compute"])
    row, = pool.ps()
    print(json.dumps({"vectors": vectors.tolist(), "weights": row.weights,
                      "why": mpool.show_config("dicts")["blas"]["why"]}))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("blas")
    (folder / "blas.c").write_text(LIBRARY)
    made = {}
    for name, factor in (("right", 1), ("wrong", 2)):
        made[name] = folder / f"lib{name}.so"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-DFACTOR={factor}", str(folder / "blas.c"), "-o",
                        str(made[name])], check=True)
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.cached(tmp_path_factory, "bert")


def embed(model: Path, library: str, tmp_path: Path, compute: str,
          **pool: str) -> tuple[np.ndarray, dict[str, str], int]:
    """Return the vectors of 40 texts, facts of the pool, and the number of calls of the library."""
    calls = tmp_path / "calls"
    calls.write_text("0")
    done = subprocess.run([sys.executable, "-c", CHILD, str(model), json.dumps({"compute": compute, "pool": pool})],
                          env={**os.environ, "MPOOL_BLAS": library, "TEST_CALLS": str(calls)}, check=True,
                          capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    return np.array(found.pop("vectors"), dtype=np.float32), found, int(calls.read_text())


def test_the_library_serves_float32_fast_only(libraries: dict[str, Path], bert: Path, tmp_path: Path) -> None:
    library = str(libraries["right"])
    exact, facts, tested = embed(bert, library, tmp_path, "float32", weights="mapped")
    assert f'{library} serves compute="float32-fast" only: ' in facts["why"] and tested > 0  # calls of the self-test
    fast, facts, calls = embed(bert, library, tmp_path, "float32-fast")
    assert facts["weights"] == "mapped" and calls >= tested + 8  # two layers of four matrices
    assert 0 < np.abs(fast - exact).max() < 1e-5
    packed, facts, calls = embed(bert, library, tmp_path, "float32-fast", weights="packed")
    assert facts["weights"] == "packed" and calls == tested and packed.tobytes() == exact.tobytes()


def test_a_library_with_wrong_sums_is_not_used(libraries: dict[str, Path], bert: Path, tmp_path: Path) -> None:
    exact, _, _ = embed(bert, "none", tmp_path, "float32")
    fast, facts, _ = embed(bert, str(libraries["wrong"]), tmp_path, "float32-fast")
    assert facts["why"].endswith("libwrong.so is not used: its sums are wrong") and facts["weights"] == "packed"
    assert fast.tobytes() == exact.tobytes()


def test_without_a_library_the_bytes_are_those_of_float32(bert: Path, tmp_path: Path) -> None:
    exact, facts, _ = embed(bert, "none", tmp_path, "float32")
    fast, also, _ = embed(bert, "none", tmp_path, "float32-fast")
    assert fast.tobytes() == exact.tobytes() and facts == also


def test_worker_processes_use_a_library_that_is_named(libraries: dict[str, Path], bert: Path, tmp_path: Path) -> None:
    library = str(libraries["right"])
    exact, _, _ = embed(bert, library, tmp_path, "float32", isolation="process")
    fast, facts, _ = embed(bert, library, tmp_path, "float32-fast", isolation="process")
    assert facts["weights"] == "mapped" and 0 < np.abs(fast - exact).max() < 1e-5


def test_worker_processes_without_a_named_library(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have a library with sums of its own, which the worker process does not open."""
    monkeypatch.setenv("MPOOL_CPU", "avx2")
    exact, _, _ = embed(bert, "", tmp_path, "float32", isolation="process")
    fast, facts, _ = embed(bert, "", tmp_path, "float32-fast", isolation="process")
    assert facts["weights"] == "packed" and fast.tobytes() == exact.tobytes()


def test_both_types_are_keys_of_their_own(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        exact = pool.embed("brown fox", bert, compute="float32")
        fast = pool.embed("brown fox", bert, compute="float32-fast")
        assert np.abs(exact - fast).max() < 1e-5
        assert sorted(row.model for row in pool.ps()) == [f"{bert} (float32)", f"{bert} (float32-fast)"]
