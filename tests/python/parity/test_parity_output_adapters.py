"""Low-rank adapters with every output of a text encoder, against transformers and sentence-transformers on copies of
the models with merged weights: largest difference 1e-4 of the largest value. Rows of several adapters in one pass have
the bytes of each row alone, and requests that were accepted before their adapter was replaced complete with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("sentence_transformers")
pytest.importorskip("safetensors")

import isolated
from adapterfiles import Matrices, matrices, merged_folder, save_peft
from cancelling import distinct_texts
from outputcalls import OUTPUTS, QUERY, Output, bytes_of
from paritymodels import torch, transformers
from retrievalmodels import bge_m3_outputs

BERT = ("query", "key", "value", "dense")
TEXTS = [f"w{number} The fox{number % 7} jumps, w{number % 31} over {number} dogs." for number in range(12)]
NAMES = (None, "one", "two", "three")
ALPHA = 9.0


def _sparse_encoder(folder: Path, task: str | None = None) -> list[Any]:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")
    return [(model.encode if task is None else model.encode_document)(TEXTS).to_dense().numpy()]


def _multi_vectors(folder: Path, task: str) -> list[Any]:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(folder), device="cpu")
    return [np.asarray(rows) for rows in (model.encode_query if task == "query" else model.encode_document)(TEXTS)]


def _logits(folder: Path, kind: str, *more: list[str]) -> list[Any]:
    """Return the logits of each text, or of each pair if there are more texts."""
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        return [model(**tokenizer(*texts, return_tensors="pt", truncation=True, max_length=64)).logits[0]
                for texts in zip(*more, TEXTS)]


def _best(logits: Any) -> Any:
    """Return the score of the best label of each token, without those of special tokens."""
    return torch.softmax(logits, -1).max(-1).values.numpy()[1:-1]


def _bge_m3(folder: Path) -> list[Any]:
    dense, sparse, tokens = bge_m3_outputs(folder, TEXTS)
    return [dense, sparse, *tokens]


@dataclass(frozen=True)
class Case:
    """An output: modules of its adapters, arrays of the reference for a folder, and those of a result."""

    targets: tuple[str, ...]
    reference: Callable[[Path], list[Any]]
    arrays: Callable[[Any], list[Any]]
    weights: str = ""  #: folder with the weights that adapters update, below the model's


def _matrix(found: mpool.SparseVectors) -> list[Any]:
    return [found.to_scipy().toarray()]


CASES = {
    "splade": Case(("q_lin", "v_lin", "lin1", "lin2"), _sparse_encoder, _matrix),
    "documents of a query table": Case(BERT, lambda folder: _sparse_encoder(folder, "document"), _matrix,
                                       "document_0_MLMTransformer"),
    "queries of ColBERT": Case(("Wqkv", "Wo", "Wi"), lambda folder: _multi_vectors(folder, "query"), list),
    "documents of ColBERT": Case(("Wqkv", "Wo", "Wi"), lambda folder: _multi_vectors(folder, "document"), list),
    "all": Case(BERT, _bge_m3, lambda found: [found.dense, found.sparse.to_scipy().toarray(), *found.tokens]),
    "labels": Case(BERT, lambda folder: [torch.softmax(one, -1).numpy() for one in _logits(
        folder, "SequenceClassification")], lambda found: list(found.scores)),
    "several labels": Case(("Wqkv", "Wo", "Wi"), lambda folder: [torch.sigmoid(one).numpy() for one in _logits(
        folder, "SequenceClassification")], lambda found: list(found.scores)),
    "scores": Case(BERT, lambda folder: [torch.sigmoid(one).numpy() for one in _logits(
        folder, "SequenceClassification", [QUERY] * len(TEXTS))], lambda found: [[one] for one in found.scores]),
    "spans": Case(BERT, lambda folder: [_best(one) for one in _logits(folder, "TokenClassification")],
                  lambda found: [[one.score for one in spans] for spans in found])}


@dataclass(frozen=True)
class Adapted:
    """An output, the folder of its model, the matrices of three adapters, and their folders."""

    output: Output
    case: Case
    folder: Path
    found: dict[str, Matrices]
    adapters: dict[str, Path]


@pytest.fixture(params=CASES)
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> Adapted:
    output, case = OUTPUTS[request.param], CASES[request.param]
    folder: Path = request.getfixturevalue(output.model)
    found = {}
    for seed, (name, rank, targets) in enumerate((("one", 6, case.targets), ("two", 3, case.targets[:2]),
                                                  ("three", 6, case.targets[1:]))):
        made = matrices(folder / case.weights, rank, seed, targets)
        found[name] = {key: pair for key, pair in made.items() if ".layer" in f".{key}"}
        assert len(found[name]) >= 4
    adapters = {name: save_peft(tmp_path / name, made, ALPHA, task_type="FEATURE_EXTRACTION")
                for name, made in found.items()}
    return Adapted(output, case, folder, found, adapters)


@pytest.mark.sample(3)
def test_outputs_of_merged_weights(adapted: Adapted, tmp_path: Path) -> None:
    output, case, found = adapted.output, adapted.case, adapted.found["one"]
    scale = ALPHA / next(iter(found.values()))[0].shape[0]
    whole = merged_folder(adapted.folder, tmp_path / "merged", found, scale, case.weights)
    options: dict[str, Any] = {"compute": "float32"}
    if output.submit == "spans":  # the best label of every token
        options["ignore_labels"] = []
        output = Output(output.model, output.function, output.parameter, {"aggregation": "none"})
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        pool.load(adapted.folder, adapters=adapted.adapters, compute="float32")
        with_adapter = case.arrays(output.call(pool, TEXTS, adapted.folder, adapter="one", **options))
        without = case.arrays(output.call(pool, TEXTS, adapted.folder, **options))
    wanted = case.reference(whole)
    assert [np.shape(one) for one in with_adapter] == [np.shape(one) for one in wanted]
    largest = max(np.abs(one).max() for one in wanted)
    assert max(np.abs(one - other).max() for one, other in zip(with_adapter, wanted)) <= 1e-4 * largest
    assert max(np.abs(np.subtract(one, other)).max() for one, other in zip(without, wanted)) > 1e-2 * largest


@pytest.mark.sample(4)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_rows_of_several_adapters_in_one_pass(adapted: Adapted, isolation: Any) -> None:
    """The worker gets requests with all adapters at once, also of equal texts."""
    output, expected = adapted.output, {}
    for name in NAMES:
        with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
            pool.load(adapted.folder, adapters={} if name is None else {name: adapted.adapters[name]})
            expected[name] = [bytes_of(output.call(pool, [text], adapted.folder, adapter=name))[0] for text in TEXTS]
    assert len({bytes(b"".join(rows)) for rows in expected.values()}) == len(NAMES)
    config = mpool.PoolConfig(threads=2, max_workers_per_model=1, isolation=isolation)
    with mpool.Pool(config) as pool:
        pool.load(adapted.folder, adapters=adapted.adapters)
        chosen = [NAMES[at * 7 % 4] for at in range(40)]
        parts = [TEXTS if at % 3 else [TEXTS[at % 6]] for at in range(40)]
        jobs = [output.job(pool, part, adapted.folder, adapter=name) for name, part in zip(chosen, parts)]
        for at, (name, part, job) in enumerate(zip(chosen, parts, jobs)):
            assert bytes_of(job.result(60)) == [expected[name][TEXTS.index(text)] for text in part], (at, name)


@contextmanager
def stopping_workers(pool: mpool.Pool) -> Iterator[Callable[[], None]]:
    """Return a function that stops the worker processes of the pool's current models. The function ignores those of a
    replaced model without requests, which may end at any time. All of them continue at the end of the block."""
    stopped: set[int] = set()

    def stop() -> None:
        found = isolated.signal_all(pool, signal.SIGSTOP)
        assert set(found) - stopped, "no further worker process runs"
        stopped.update(found)

    try:
        yield stop
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.sample(4)
def test_requests_in_flight_keep_their_adapter(adapted: Adapted) -> None:
    """Other adapters replace those of the model, and the model is unloaded, while it has requests: each of them
    completes with the adapter that it was accepted with. The worker processes are stopped until the model is unloaded,
    so that no request completes earlier."""
    output, parts = adapted.output, [distinct_texts(200, seed) for seed in range(4)]
    with isolated.pool_of() as pool:
        expected = []
        for name in ("one", "two"):
            pool.load(adapted.folder, adapters={"it": adapted.adapters[name]})
            expected.append([bytes_of(output.call(pool, texts, adapted.folder, adapter="it")) for texts in parts])
        assert expected[0] != expected[1]
        pool.load(adapted.folder, adapters={"it": adapted.adapters["one"]})
        with stopping_workers(pool) as stop:
            stop()
            before = [output.job(pool, texts, adapted.folder, adapter="it") for texts in parts]
            pool.load(adapted.folder, adapters={"it": adapted.adapters["two"]})
            stop()
            after = [output.job(pool, texts, adapted.folder, adapter="it") for texts in parts]
            with pytest.raises(mpool.Timeout):
                pool.unload(adapted.folder, timeout=0.001)
            assert not any(job.done() for job in (*before, *after))
        unloads = threading.Thread(target=pool.unload, args=(adapted.folder,))
        unloads.start()
        assert [bytes_of(job.result(60)) for job in before] == expected[0]
        assert [bytes_of(job.result(60)) for job in after] == expected[1]
        unloads.join(60)
        assert not unloads.is_alive()
        assert bytes_of(output.call(pool, parts[0], adapted.folder, adapter="it")) == expected[1][0]
        pool.load(adapted.folder, adapters={})
        with pytest.raises(mpool.InvalidArgument, match="the model has no adapters"):
            output.job(pool, parts[0], adapted.folder, adapter="it")
