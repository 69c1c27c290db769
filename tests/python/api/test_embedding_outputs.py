"""Requests for sparse vectors and token vectors: input, limits and forms, on a seeded model with a query table."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.models import load_catalogue
from mpool.tasks import outputs

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from cancelling import distinct_texts
from retrievalmodels import TEXTS, VOCAB, write_masked


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=2)) as found:
        yield found


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sparse encoder with a table of weights for queries."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("routed")
    write_masked(folder / "document_0_Transformer", "bert")
    for name, config in (("document_1_SpladePooling", {"pooling_strategy": "max"}),
                         ("query_0_SparseStaticEmbedding", {"frozen": False})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(3).random(VOCAB).astype(np.float32)
    save_file({"weight": weights}, str(folder / "query_0_SparseStaticEmbedding" / "model.safetensors"))
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}]))
    package = "sentence_transformers.sparse_encoder.modules"
    (folder / "router_config.json").write_text(json.dumps({
        "types": {"query_0_SparseStaticEmbedding": f"{package}.SparseStaticEmbedding",
                  "document_0_Transformer": "sentence_transformers.base.modules.transformer.Transformer",
                  "document_1_SpladePooling": f"{package}.SpladePooling"},
        "structure": {"query": ["query_0_SparseStaticEmbedding"],
                      "document": ["document_0_Transformer", "document_1_SpladePooling"]}, "parameters": {}}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    return str(folder)


def _forms(pool: mpool.Pool, model: str) -> dict[str, Callable[..., Any]]:
    """The forms of a request for sparse vectors of queries."""
    return {
        "function": lambda inputs, **more: pool.embed_sparse(inputs, model, task="query", **more),
        "aio": lambda inputs, **more: asyncio.run(
            mpool.aio.embed_sparse(inputs, model, task="query", pool=pool, **more)),
        "job": lambda inputs, **more: pool.submit("text_embedding", inputs=inputs, model=model, output="sparse",
                                                  task="query", **more).result(),
        "all": lambda inputs, **more: pool.embed_all(inputs, model, task="query", **more).sparse}


@pytest.mark.parametrize("form", ("function", "aio", "job", "all"))
def test_queries_of_a_table(pool: mpool.Pool, routed: str, form: str) -> None:
    call = _forms(pool, routed)[form]
    expected = pool.embed_sparse(TEXTS, routed, task="query")
    found = call(TEXTS)
    assert found.values.tobytes() == expected.values.tobytes() and found.shape == expected.shape
    assert call([[20, 21, 20], [30]]).indices.tolist() == [20, 21, 30]
    assert len(call("")) == 1
    for bad, message in ((["a", 3], r"`inputs\[1\]` must be a str"),
                         (["w1", "w1 " * 400_000], r"`inputs\[1\]` must be a str"),
                         (["w1", "\ud800"], r"`inputs\[1\]` must be Unicode"), ([[20], "w1"], r"inputs\[1\]"),
                         ([[20], [VOCAB]], r"inputs\[1\]\[0\]")):
        with pytest.raises(mpool.InvalidArgument, match=message):
            call(bad)
    with pytest.raises(mpool.ContextOverflow, match=r"`inputs\[1\]` has 100 tokens"):
        call(["w1", "w1 " * 100], truncate=False)


@pytest.mark.parametrize("form", ("function", "aio", "job", "all"))
def test_queries_of_a_table_have_a_deadline(pool: mpool.Pool, routed: str, form: str) -> None:
    call = _forms(pool, routed)[form]
    with pytest.raises(mpool.Timeout):
        call(["w1 " * 300_000] * 8, timeout=0.001)


def test_token_vectors_of_a_query_table_are_refused(pool: mpool.Pool, routed: str) -> None:
    """Queries have no pass through the model, so that their tokens have no vectors; documents have."""
    calls: list[Callable[[], Any]] = [
        lambda: pool.embed_tokens(TEXTS, routed, task="query"),
        lambda: pool.embed_iter(TEXTS, routed, task="query", output="tokens"),
        lambda: pool.submit("text_embedding", inputs=TEXTS, model=routed, output="tokens", task="query")]
    for call in calls:
        with pytest.raises(mpool.InvalidArgument, match="document or None: this model looks the weights") as caught:
            call()
        assert caught.value.param == "task" and "embed_sparse" in str(caught.value.hint)
    assert len(pool.embed_tokens(TEXTS, routed, task="document")) == len(pool.embed_tokens(TEXTS, routed)) == len(TEXTS)


def test_queries_of_a_table_in_an_iterator(pool: mpool.Pool, routed: str) -> None:
    texts = TEXTS * 300
    expected = pool.embed_sparse(texts, routed, task="query")
    assert list(pool.embed_iter(iter(texts), routed, task="query", output="sparse", batch_size=1200)) == [expected]
    found = list(pool.embed_iter(texts, routed, task="query", output="sparse"))
    assert [ids.tolist() for ids, _ in found] == [ids.tolist() for ids, _ in expected]
    both = next(pool.embed_iter(texts, routed, task="query", output="all", batch_size=7))
    assert both.sparse == expected[:7]
    with pytest.raises(mpool.Timeout):
        list(pool.embed_iter(["w1 " * 300_000] * 8, routed, task="query", output="sparse", timeout=0.001))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_masked(tmp_path_factory.mktemp("plain") / "bert", "bert"))


def test_results_are_bounded(plain: str) -> None:
    memory = 64 << 20
    texts = ["w1 " * 62] * 1500  # 1500 texts of 64 tokens with 48 components: 18.4 MB, more than a quarter
    with mpool.Pool(mpool.PoolConfig(threads=2, memory_bytes=memory)) as small:
        assert len(small.embed_tokens(texts[:100], plain)) == 100
        calls: list[Callable[[], Any]] = [
            lambda: small.embed_tokens(texts, plain),
            lambda: asyncio.run(mpool.aio.embed_tokens(texts, plain, pool=small)),
            lambda: small.submit("text_embedding", inputs=texts, model=plain, output="tokens").result()]
        for call in calls:
            with pytest.raises(mpool.LimitError, match=r"limit is 16\.8 MB, a quarter of the pool's") as caught:
                call()
            assert caught.value.param == "inputs" and "fewer texts" in str(caught.value)


def test_a_result_that_is_too_large_is_not_computed(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens of a single slice is known before: 300 texts of 64 tokens have 3.7 MB."""
    def computed(*_: Any) -> Any:
        raise AssertionError("the request must not reach the model")

    texts = ["w1 " * 62] * 300
    monkeypatch.setattr(outputs, "RESULT_SHARE", 64)
    with mpool.Pool(mpool.PoolConfig(threads=2, memory_bytes=64 << 20)) as small:
        assert len(small.embed_tokens(texts[:50], plain)) == 50
        monkeypatch.setattr(outputs, "part_of", computed)
        monkeypatch.setitem(outputs.FINISH, "tokens", computed)
        calls: list[Callable[[], Any]] = [
            lambda: small.embed_tokens(texts, plain),
            lambda: asyncio.run(mpool.aio.embed_tokens(texts, plain, pool=small)),
            lambda: small.submit("text_embedding", inputs=texts, model=plain, output="tokens").result()]
        for call in calls:
            with pytest.raises(mpool.LimitError, match=r"needs at least 3\.7 MB for its result, the limit is 1\.0 MB"):
                call()


def test_a_control_token_without_a_row_fails_its_request(pool: mpool.Pool, query_table: Path, tmp_path: Path) -> None:
    """A tokenizer may have control tokens that the embedding has no row for, and the table of weights no number."""
    folder = shutil.copytree(query_table, tmp_path / "model")
    for path in folder.rglob("tokenizer.json"):
        tokenizer = json.loads(path.read_text())
        tokenizer["added_tokens"].append({"id": VOCAB, "content": "[IMG]", "special": True, "normalized": False,
                                          "single_word": False, "lstrip": False, "rstrip": False})
        path.write_text(json.dumps(tokenizer))
    for task in ("query", "document"):
        with pytest.raises(mpool.InvalidArgument, match=f"token id {VOCAB}"):
            pool.embed_sparse(["w1", "w1 [IMG]"], folder, task=task, parse_special=True)
        assert pool.embed_sparse(["w1", "w1 [IMG]"], folder, task=task)[:1] == \
            pool.embed_sparse(["w1"], query_table, task=task)


# ---- all outputs -----------------------------------------------------------------------------------------------------

def test_all_outputs_share_a_pass(m3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request for all outputs reads the texts once and multiplies once by the weights of all layers, as one for
    token vectors does. Where OpenBLAS serves ``float32-fast`` only, it computes the products of the layers, which are
    counted, and not those of the small heads."""
    texts = distinct_texts(40)

    def state(used: mpool.Pool) -> list[int]:
        found = used.metrics()
        return [*(found[name] for name in ("steps", "step_items", "units_in")),
                mpool.show_config("dicts")["blas"]["multiply_adds"]]

    def cost(used: mpool.Pool, name: str) -> list[int]:
        before = state(used)
        getattr(used, name)(texts, m3, compute="float32-fast")
        return [after - one for one, after in zip(before, state(used))]

    options = mpool.PoolConfig._registry_options
    monkeypatch.setattr(mpool.PoolConfig, "_registry_options", lambda self: {**options(self), "step_budget": 60.0})
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as used:
        used.embed("w1", m3, compute="float32-fast")
        steps, items, tokens, products = cost(used, "embed_tokens")
        assert (steps, items) == (1, 1) and tokens >= len(texts) * 62
        assert products > 0 or "float32-fast" not in mpool.show_config("dicts")["blas"]["why"]
        assert cost(used, "embed_all") == [steps, items, tokens, products]
        each = [cost(used, name) for name in ("embed", "embed_sparse", "embed_tokens")]
        assert [sum(one) for one in zip(*each)][:3] == [3 * steps, 3 * items, 3 * tokens]
        assert sum(one[3] for one in each) > 2 * products or not products


def test_default_model_of_sparse_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in takes the same model, which is not the default of dense vectors; offline, the error names it."""
    for name in ("MPOOL_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    with mpool.Pool(mpool.PoolConfig(offline=True)) as offline:
        for call in (lambda: offline.embed_sparse("A text."),
                     lambda: list(offline.embed_iter(["A text."], output="sparse"))):
            with pytest.raises(mpool.errors.OfflineError, match="granite-embedding-30m-sparse"):
                call()
    assert load_catalogue().default("embed_sparse").license == "apache-2.0"
