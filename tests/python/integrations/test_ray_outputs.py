"""Every output of text encoders, and adapters, on a local Ray cluster: the routes of ``mpool ray serve``, and a column
of Parquet files. They take minutes; tests without a cluster are in other files of this folder."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

import mpool  # noqa: E402

from adapterfiles import two_adapters  # noqa: E402
from outputcalls import OUTPUTS, Output, texts_of  # noqa: E402
from raydata import record, rows_of, write_source  # noqa: E402
from rayservers import WAIT, RayServer  # noqa: E402

pytestmark = pytest.mark.slow
TEXTS = ["w1 The fox jumps.", "w2 w3, over two dogs", "x"]
ROUTED = {name: output for name, output in OUTPUTS.items() if output.path}


# ---- routes --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def adapters(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_adapters(bert, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, bert: Path, adapters: dict[str, Path]) -> Iterator[RayServer]:
    """Two replicas with a model for each output, and a model with two adapters."""
    folders = {output.model: request.getfixturevalue(output.model) for output in ROUTED.values()} | {"bert": bert}
    arguments = [part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")]
    for name, path in adapters.items():
        arguments += ["--adapter", f"bert:{name}={path}"]
    server = RayServer(*arguments, "--only", "--replicas", "2")
    yield server
    assert server.stop() == 0


def post(server: RayServer, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=WAIT)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", ROUTED)
def test_routes_have_the_values_of_the_library(served: RayServer, pool: mpool.Pool, name: str,
                                               request: pytest.FixtureRequest) -> None:
    output: Output = ROUTED[name]
    wanted = output.call(pool, TEXTS, request.getfixturevalue(output.model))
    found = post(served, output.path, output.payload(TEXTS, output.model))
    assert output.of_route(found) == [output.of_text(one) for one in texts_of(wanted)]


def vectors_of(found: Any) -> np.ndarray:
    """Return the vectors of a response of /v1/embeddings, /pooling, /api/embed or /embed."""
    rows = found if isinstance(found, list) else found.get("data", found.get("embeddings"))
    lists = [row.get("embedding", row.get("data")) if isinstance(row, dict) else row for row in rows]
    return np.array(lists, np.float32)


def test_routes_select_adapters(served: RayServer, bert: Path, adapters: dict[str, Path]) -> None:
    with mpool.Pool() as pool:
        pool.load(bert, adapters=adapters)
        vectors = {name: pool.embed(TEXTS, bert, adapter=name) for name in (None, *adapters)}
        tokens = {name: [rows.tolist() for rows in pool.embed_tokens(TEXTS, bert, adapter=name)] for name in vectors}
    assert len({rows.tobytes() for rows in vectors.values()}) == 3
    for name, wanted in vectors.items():
        model = "bert" if name is None else f"bert:{name}"
        for path, body in (("/v1/embeddings", {"input": TEXTS}), ("/api/embed", {"input": TEXTS}),
                           ("/embed", {"inputs": TEXTS}), ("/pooling", {"input": TEXTS, "task": "embed"})):
            assert np.array_equal(vectors_of(post(served, path, {"model": model, **body})), wanted), (path, model)
        assert post(served, "/embed_all", {"model": model, "inputs": TEXTS}) == tokens[name], model


def test_the_list_of_models_has_adapters(served: RayServer) -> None:
    names = {row["id"] for row in httpx.get(f"{served.url}/v1/models", timeout=WAIT).json()["data"]}
    assert {"bert", "bert:one", "bert:two"} <= names
    response = httpx.post(f"{served.url}/embed", json={"model": "bert:three", "inputs": TEXTS}, timeout=WAIT)
    assert response.status_code == 404 and "bert:one, bert:two" in response.text, response.text


# ---- Parquet files -------------------------------------------------------------------------------------------------

@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Folder with two Parquet files of texts."""
    return write_source(tmp_path / "in")


def test_the_command_with_an_adapter(source: Path, tmp_path: Path, bert: Path, adapters: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "mpool", "ray", "embed", str(source), str(tmp_path / "out"), "--model", str(bert),
               "--compute", "float32", "--quiet", "--adapter", f"law={adapters['two']}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "embedded 48 rows of 2 files\n"
    found = rows_of(tmp_path / "out")
    with mpool.Pool() as pool:
        pool.load(bert, compute="float32", adapters={"law": adapters["two"]})
        wanted = pool.embed(found["text"].to_pylist(), bert, compute="float32", adapter="law")
    assert np.array_equal(np.float32(found["embedding"].to_pylist()), wanted)
    assert record(tmp_path / "out")["options"]["adapter"] == "law"
