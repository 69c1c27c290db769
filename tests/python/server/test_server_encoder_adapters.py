"""Adapters of encoders over HTTP: the model name ``MODEL:ADAPTER`` on every route for vectors, rankings and labels,
compared with the library; and errors that name no path."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfiles import matrices, save_peft
from outputcalls import OUTPUTS, bytes_of, texts_of
from rerankers import make_reranker
from servers import ask, serving

import mpool

TEXTS = ["a cat", "The quick brown fox jumps over the lazy dog.", "x"]
NAMES = {"m": None, "m:one": "one", "m:two": "two"}


@pytest.fixture(scope="module")
def adapters(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_peft(folder / name, matrices(bert, 4, seed, ("query", "value", "dense")), 16.0)
            for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def server(bert: Path, m3: Path, tagger: Path, adapters: dict[str, Path],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models")
    given = [f"m:{name}={path}" for name, path in adapters.items()]
    refs = [f"m={bert}"]
    for name, labels in (("r", 1), ("c", 3)):
        made = make_reranker(folder / name, "bert", labels)
        found = {key: pair for key, pair in matrices(made, 4, 1, ("query", "value")).items() if ".layer." in key}
        given.append(f"{name}:one={save_peft(folder / f'{name}-one', found, 16.0, task_type='SEQ_CLS')}")
        refs.append(f"{name}={made}")
    for name, made in (("s", m3), ("t", tagger)):
        found = matrices(made, 4, 1, ("query", "value"))
        given.append(f"{name}:one={save_peft(folder / f'{name}-one', found, 16.0)}")
        refs.append(f"{name}={made}")
    with serving(refs, mpool.PoolConfig(shutdown_grace=1.0, offline=True, threads=2), adapters=given) as made_:
        yield made_


def vectors_of(route: str, found: Any) -> Any:
    if route == "/v1/embeddings":
        return [row["embedding"] for row in found["data"]]
    if route == "/pooling":
        return [row["data"] for row in found["data"]]
    return found["embeddings"] if route == "/api/embed" else found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("route", "field"), [("/v1/embeddings", "input"), ("/api/embed", "input"),
                                              ("/embed", "inputs"), ("/pooling", "input")])
def test_vectors(server: Any, route: str, field: str, name: str) -> None:
    wanted = server.state.pool.embed(TEXTS, "m", adapter=NAMES[name])
    plain = server.state.pool.embed(TEXTS, "m")
    assert (NAMES[name] is None) == np.array_equal(wanted, plain)
    more = {"task": "embed"} if route == "/pooling" else {}
    status, found = ask(server, route, {"model": name, field: TEXTS, **more})
    assert status == 200, found
    assert np.array_equal(np.array(vectors_of(route, found), dtype=np.float32), wanted)


@pytest.mark.parametrize(("name", "adapter"), [("r", None), ("r:one", "one")])
def test_rankings(server: Any, name: str, adapter: str | None) -> None:
    wanted = server.state.pool.rerank("a cat", TEXTS, "r", adapter=adapter)
    plain = server.state.pool.rerank("a cat", TEXTS, "r")
    assert (adapter is None) == (wanted.scores == plain.scores)
    order = [one.index for one in wanted.results]
    found = ask(server, "/v1/rerank", {"model": name, "query": "a cat", "documents": TEXTS})[1]["results"]
    assert [one["index"] for one in found] == order
    assert [one["relevance_score"] for one in found] == pytest.approx([one.score for one in wanted.results])
    found = ask(server, "/rerank", {"model": name, "query": "a cat", "texts": TEXTS})[1]
    assert [one["index"] for one in found] == order
    found = ask(server, "/v1/score", {"model": name, "text_1": "a cat", "text_2": TEXTS})[1]["data"]
    assert [one["score"] for one in found] == pytest.approx(wanted.scores)


@pytest.mark.parametrize(("name", "adapter"), [("c", None), ("c:one", "one")])
def test_labels(server: Any, name: str, adapter: str | None) -> None:
    wanted = server.state.pool.classify(TEXTS, "c", adapter=adapter).scores
    assert (adapter is None) == np.array_equal(wanted, server.state.pool.classify(TEXTS, "c").scores)
    found = ask(server, "/classify", {"model": name, "input": TEXTS})[1]["data"]
    assert np.allclose([one["probs"] for one in found], wanted)
    found = ask(server, "/predict", {"model": name, "inputs": [[text] for text in TEXTS]})[1]
    assert np.allclose([max(label["score"] for label in one) for one in found], wanted.max(axis=1))


@pytest.mark.parametrize("adapter", [None, "one"])
@pytest.mark.parametrize(("output", "model"), [("sparse", "s"), ("tokens", "s"), ("spans", "t")])
def test_sparse_vectors_token_vectors_and_spans(server: Any, output: str, model: str, adapter: str | None) -> None:
    texts = ["w1 w2, w3. w4 w9", "w7", "Ada met Bob in Paris, and w5 w6!"]
    row = OUTPUTS[output]
    wanted, plain = (row.call(server.state.pool, texts, model, adapter=one) for one in (adapter, None))
    assert (adapter is None) == (bytes_of(wanted) == bytes_of(plain))
    name = model if adapter is None else f"{model}:{adapter}"
    status, found = ask(server, row.path, row.payload(texts, name))
    assert status == 200 and row.of_route(found) == [row.of_text(one) for one in texts_of(wanted)]


def test_errors_of_changed_adapters_name_no_path(bert: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """The files of an adapter change while its model is not in memory, and a later request reads them again."""
    good = adapters["one"]
    found = matrices(bert, 4, 1, ("query",))
    for number, config in enumerate(({"use_dora": True}, {"r": 2000}, {"alpha_pattern": {"(a+)+": 1}}, {"peft_type": 7},
                                     {"alpha_pattern": {f"x{at}": 1 for at in range(5000)}})):
        folder = Path(shutil.copytree(good, tmp_path / f"secret{number}"))
        with serving([f"m={bert}"], mpool.PoolConfig(shutdown_grace=1.0), adapters=[f"one={folder}"]) as server:
            assert ask(server, "/v1/embeddings", {"model": "m:one", "input": "x"})[0] == 200
            server.state.pool.unload("m")
            save_peft(folder, found, 4.0, **config)
            for name in ("m:one", "m"):
                status, answer = ask(server, "/v1/embeddings", {"model": name, "input": "x"})
                assert status == 503 and "secret" not in str(answer), (config, answer)


# ---- adapters in a model's files -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of jina-embeddings-v3 and v5, each with one adapter per task."""
    from taskmodels import adapters_v3, adapters_v5, make_v3, make_v5, write_v3, write_v5

    folder = tmp_path_factory.mktemp("tasks")
    three, five = make_v3(), make_v5("nano")
    refs = [f"v3={write_v3(folder / 'v3', three, adapters_v3(three))}",
            f"v5={write_v5(folder / 'v5', five, adapters_v5(five))}"]
    with serving(refs, mpool.PoolConfig(shutdown_grace=1.0, offline=True, threads=2)) as made:
        yield made


@pytest.mark.parametrize(("model", "task", "options"), [
    ("v3", None, {}), ("v3", "retrieval.query", {"adapter": "retrieval.query"}),
    ("v3", "retrieval.passage", {"task": "document"}), ("v3", "text-matching", {"adapter": "text-matching"}),
    ("v3", "separation", {"prompt_name": "separation"}), ("v3", "query", {"adapter": "retrieval.query"}),
    ("v5", None, {"adapter": "retrieval"}), ("v5", "query", {"adapter": "retrieval", "prompt_name": "query"}),
    ("v5", "retrieval.query", {"task": "query"}), ("v5", "clustering", {"adapter": "clustering"}),
    ("v5", "text-matching", {"adapter": "text-matching", "prompt_name": "document"})])
def test_tasks_of_models(tasks: Any, model: str, task: str | None, options: dict[str, Any]) -> None:
    texts = ["w20 w21 w22", "w40"]
    wanted = tasks.state.pool.embed(texts, model, **options)
    status, found = ask(tasks, "/v1/embeddings", {"model": model, "input": texts, "task": task})
    assert status == 200
    assert np.array_equal(np.array([row["embedding"] for row in found["data"]], np.float32), wanted)
    others = [tasks.state.pool.embed(texts, model, adapter=other) for other in ("text-matching", "classification")]
    assert sum(np.array_equal(other, wanted) for other in others) == (task == "text-matching")
