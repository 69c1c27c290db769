"""Sparse vectors, token vectors and all outputs of one pass against sentence-transformers and the formulae, on
seeded checkpoints: largest difference 1e-4 of the largest value, and equal supports above 1e-5."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("sentence_transformers")
pytest.importorskip("safetensors")

from paritymodels import torch, transformers
from retrievalmodels import (
    MARKS, SPARSE_MODULES, TEXTS, VOCAB, bge_m3_outputs, masked_model, query_weights, same_sparse, save,
    write_colbert, write_jina_colbert, write_masked, write_metaspace_tokenizer, write_query_table, write_splade,
    write_tokenizer,
)

#: Folder of the query table of :func:`write_query_table`.
QUERIES = "query_0_SparseStaticEmbedding"


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=2)) as found:
        yield found


def same_tokens(found: mpool.TokenVectors, expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        matrix = np.asarray(other)
        assert one.shape == matrix.shape and np.abs(one - matrix).max() <= 1e-4 * np.abs(matrix).max()


# ---- sparse --------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@pytest.mark.parametrize("kind, strategy, function", [("bert", "max", "relu"), ("roberta", "sum", "log1p_relu"),
                                                      ("modernbert", "max", "log1p_relu"), ("mpnet", "max", "relu"),
                                                      ("distilbert", "max", "log1p_relu"), ("electra", "max", "relu"),
                                                      ("xlm_roberta", "max", "relu"), ("roberta", "max", "relu")])
def test_sparse_encoders(pool: mpool.Pool, tmp_path: Path, kind: str, strategy: str, function: str) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    base = write_masked(tmp_path / kind, kind)
    reference = SparseEncoder(modules=[Transformer(str(base), transformer_task="fill-mask"),
                                       SpladePooling(strategy, activation_function=function)], device="cpu")
    folder = str(save(reference, tmp_path / "sparse"))
    same_sparse(pool.embed_sparse(TEXTS, folder, compute="float32"), reference.encode(TEXTS).to_dense().numpy())
    most = pool.embed_sparse(TEXTS, folder, compute="float32", max_active=5)
    same_sparse(most, reference.encode(TEXTS, max_active_dims=5).to_dense().numpy())


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "mpnet", "distilbert", "electra"])
def test_decoders_with_own_weights(pool: mpool.Pool, tmp_path: Path, kind: str) -> None:
    """``tie_word_embeddings`` is false: the matrix and the bias of the decoder are weights of their own."""
    from sentence_transformers import SparseEncoder

    folder = write_splade(tmp_path / "untied", kind, tie_word_embeddings=False)
    reference = SparseEncoder(str(folder), device="cpu")
    found = pool.embed_sparse(TEXTS, folder, compute="float32")
    same_sparse(found, reference.encode(TEXTS).to_dense().numpy())


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("metaspace", [False, True])
def test_decoded_tokens(pool: mpool.Pool, tmp_path: Path, metaspace: bool, top_k: int | None) -> None:
    from sentence_transformers import SparseEncoder

    folder = write_splade(tmp_path / "splade", "bert")
    if metaspace:
        write_metaspace_tokenizer(folder, ("[QueryMarker]", "[DocumentMarker]"))
    reference = SparseEncoder(str(folder), device="cpu")
    vectors = reference.encode(TEXTS)
    found = pool.embed_sparse(TEXTS, folder, compute="float32").decoded(top_k)
    for one, other, every in zip(found, reference.decode(vectors, top_k), reference.decode(vectors), strict=True):
        weights, expected = dict(every), np.array([weight for _, weight in other])
        one, expected = [row for row in one if row[1] > 1e-5], expected[expected > 1e-5]
        assert len(dict(one)) == len(one) == len(expected) and (top_k is None or len(one) == top_k)
        # two weights that are nearly equal may change places: compare the weights in order, and that of each token
        bound = 1e-4 * expected[0]
        assert np.abs([weight for _, weight in one] - expected).max() <= bound
        assert all(abs(weight - weights[token]) <= bound for token, weight in one)


def test_class_names_of_older_versions(pool: mpool.Pool, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    folder = save(SparseEncoder(str(write_masked(tmp_path / "base", "bert")), device="cpu"), tmp_path / "sparse")
    package = "sentence_transformers.sparse_encoder.models"  # as version 5.0 wrote it
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{package}.SpladePooling.SpladePooling"}]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, "do_lower_case": False}))
    reference = SparseEncoder(str(folder), device="cpu")
    same_sparse(pool.embed_sparse(TEXTS, str(folder), compute="float32"), reference.encode(TEXTS).to_dense().numpy())


@pytest.mark.parametrize("kind, function", [("bert", "relu"), ("distilbert", "log1p_relu")])
def test_query_tables(pool: mpool.Pool, tmp_path: Path, kind: str, function: str) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseStaticEmbedding, SpladePooling

    base = str(write_masked(tmp_path / "base", kind))
    table = SparseStaticEmbedding(tokenizer=transformers.AutoTokenizer.from_pretrained(base), weight=query_weights())
    documents = [MLMTransformer(base), SpladePooling("max", activation_function=function)]
    router = Router.for_query_document(query_modules=[table], document_modules=documents)
    reference = SparseEncoder(modules=[router], device="cpu")
    check_query_table(pool, save(reference, tmp_path / "router"), reference)


def check_query_table(pool: mpool.Pool, folder: Path, reference: Any) -> None:
    """Compare both sides of a model with a query table with sentence-transformers."""
    queries = pool.embed_sparse(TEXTS, folder, task="query")
    documents = pool.embed_sparse(TEXTS, folder, task="document", compute="float32")
    same_sparse(queries, reference.encode_query(TEXTS).to_dense().numpy())
    same_sparse(documents, reference.encode_document(TEXTS).to_dense().numpy())
    scores = reference.similarity(reference.encode_query(TEXTS), reference.encode_document(TEXTS)).numpy()
    assert np.allclose(queries.dot(documents), scores, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["IDF", "IDF.IDF"])
def test_the_first_name_of_query_tables(pool: mpool.Pool, tmp_path: Path, query_table: Path, name: str) -> None:
    """SparseStaticEmbedding was called IDF before sentence-transformers 5.0 was released. A query has the weight of the
    table once for each of its distinct tokens (https://arxiv.org/abs/2411.04403), and its score for a document is the
    sum of these weights times those of the document."""
    folder = write_query_table(tmp_path / "idf", table=f"{SPARSE_MODULES}.{name}")
    tokenizer, weights = transformers.AutoTokenizer.from_pretrained(query_table / QUERIES), query_weights().numpy()
    expected = np.zeros((len(TEXTS), VOCAB), np.float32)
    for row, text in zip(expected, TEXTS):
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            row[token] = weights[token]
    found = pool.embed_sparse(TEXTS, folder, task="query")
    same_sparse(found, expected)
    documents = pool.embed_sparse(TEXTS, folder, task="document", compute="float32")
    rows = documents.to_scipy().toarray()
    assert np.allclose(found.dot(documents), [[sum(weights[token] * row[token] for token in np.flatnonzero(one))
                                               for row in rows] for one in expected], rtol=1e-4, atol=0)
    for task in ("query", "document"):
        assert pool.embed_sparse(TEXTS, folder, task=task) == pool.embed_sparse(TEXTS, query_table, task=task)


def test_tables_in_files_of_another_format_are_refused(tmp_path: Path) -> None:
    """``path``: sentence-transformers reads the weights from this JSON file, and not from model.safetensors."""
    folder = write_query_table(tmp_path / "table")
    (folder / QUERIES / "config.json").write_text(json.dumps({"frozen": True, "path": "idf.json"}))
    words = r"config\.json: path is idf\.json; .*safetensors"
    with mpool.Pool() as other, pytest.raises(mpool.Unsupported, match=words):
        other.embed_sparse(TEXTS, folder, task="query")


def test_models_of_the_promises(pool: mpool.Pool, splade: Path, query_table: Path, colbert: Path) -> None:
    """The models for which test_output_promises.py tests each promise have the outputs of sentence-transformers."""
    from sentence_transformers import SparseEncoder

    reference = SparseEncoder(str(splade), device="cpu")
    same_sparse(pool.embed_sparse(TEXTS, splade, compute="float32"), reference.encode(TEXTS).to_dense().numpy())
    check_query_table(pool, query_table, SparseEncoder(str(query_table), device="cpu"))
    check_both_tasks(pool, colbert)


def test_default_prompt(pool: mpool.Pool, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    folder = save(SparseEncoder(str(write_masked(tmp_path / "base", "bert")), device="cpu"), tmp_path / "sparse")
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config | {
        "prompts": {"search": "w30 w31 "}, "default_prompt_name": "search"}))
    reference = SparseEncoder(str(folder), device="cpu")
    found = pool.embed_sparse(TEXTS, str(folder), compute="float32")
    same_sparse(found, reference.encode(TEXTS).to_dense().numpy())
    assert found != pool.embed_sparse(TEXTS, str(folder), compute="float32", prompt="")


# ---- token vectors ---------------------------------------------------------------------------------------------------

def check_both_tasks(pool: mpool.Pool, folder: Path, other: Path | None = None) -> Any:
    """Compare with sentence-transformers. ``other``: the same model in a layout that it reads without remote code."""
    from sentence_transformers import MultiVectorEncoder

    reference = MultiVectorEncoder(str(other or folder), device="cpu")
    same_tokens(pool.embed_tokens(TEXTS, str(folder), task="document", compute="float32"),
                reference.encode_document(TEXTS))
    queries = pool.embed_tokens(TEXTS, str(folder), task="query", compute="float32")
    same_tokens(queries, reference.encode_query(TEXTS))
    return queries


@pytest.mark.sample(3)
@pytest.mark.parametrize("settings, length", [
    ({"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 11,
      "attend_to_expansion_tokens": False}, 12),
    ({"query_prefix": "[unused0]", "document_prefix": "[unused1]", "attend_to_expansion_tokens": True}, 32),
    ({"query_prefix": "[Q] ", "document_prefix": "[D] ", "do_query_expansion": False, "skiplist_words": ["w1", "."]},
     None),
    ({"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 300,
      "attend_to_expansion_tokens": False, "skiplist_words": ["w5", "."]}, 32)])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "lfm2"])
def test_pylate(pool: mpool.Pool, tmp_path: Path, kind: str, settings: dict[str, Any], length: int | None) -> None:
    folder = write_colbert(tmp_path / "colbert", [(48, 40), (40, 24)] if length == 12 else [(48, 24)], kind, **settings)
    queries = check_both_tasks(pool, folder)
    assert length is None or all(len(one) == length for one in queries)


def test_native_folders(pool: mpool.Pool, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    reference = MultiVectorEncoder(str(write_masked(tmp_path / "base", "modernbert")), device="cpu",
                                   prompts={"query": "w3 w4 ", "document": ""})
    reference[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 14}
    reference[0].document_length = 10
    reference[2].skiplist_words = MARKS
    same = save(reference, tmp_path / "native")
    check_both_tasks(pool, same)


def test_the_mask_token_of_a_tokenizer_class(pool: mpool.Pool, tmp_path: Path) -> None:
    """BertTokenizer has the mask token [MASK] if tokenizer_config.json names none."""
    folder = write_colbert(tmp_path / "colbert", [(48, 24)], query_prefix="[Q] ", document_prefix="[D] ",
                           query_length=12)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer",
                                                              "model_max_length": 64}))
    assert [len(query) for query in check_both_tasks(pool, folder)] == [12] * len(TEXTS)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_prompt_is_no_marker(pool: mpool.Pool, tmp_path: Path, blank: str) -> None:
    """The vocabulary has a blank token, as one with an empty line has. A model without a prompt inserts no marker."""
    from sentence_transformers import MultiVectorEncoder

    base = write_masked(tmp_path / "base", "bert")
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab[blank] = vocab.pop("w150")
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    reference = MultiVectorEncoder(str(base), device="cpu", prompts={"query": blank, "document": blank})
    check_both_tasks(pool, save(reference, tmp_path / "native"))


@pytest.mark.parametrize("size, query, document", [(20, 13, 12), (96, 32, 300)])
def test_stanford_colbert(pool: mpool.Pool, tmp_path: Path, size: int, query: int, document: int) -> None:
    """The second row has the query length and the components of answerai-colbert-small."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "stanford"
    folder.mkdir()
    model = masked_model("bert").bert
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tensors = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["linear.weight"] = torch.randn(size, 48, generator=torch.Generator().manual_seed(2))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    (folder / "artifact.metadata").write_text(json.dumps({
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": query,
        "doc_maxlen": document, "mask_punctuation": True, "attend_to_mask_tokens": False, "dim": size,
        "similarity": "cosine"}))
    assert [one.shape for one in check_both_tasks(pool, folder)] == [(query, size)] * len(TEXTS)


@pytest.mark.parametrize("size, metaspace", [(20, False), (7, True)])
def test_jina_colbert(pool: mpool.Pool, tmp_path: Path, size: int, metaspace: bool) -> None:
    """jina-colbert-v2: rotary XLM-RoBERTa, own markers, and expansion tokens that queries attend to."""
    write_jina_colbert(tmp_path / "published", tmp_path / "native", size, metaspace)
    queries = check_both_tasks(pool, tmp_path / "published", tmp_path / "native")
    assert [one.shape for one in queries] == [(13, size)] * len(TEXTS)
    check_both_tasks(pool, tmp_path / "native")
    for changed in ({"query_token_id": "[DocumentMarker]"}, {"attend_to_mask_tokens": False}, {"query_maxlen": 12}):
        settings = json.loads((tmp_path / "published/artifact.metadata").read_text())
        (tmp_path / "published/artifact.metadata").write_text(json.dumps(settings | changed))
        pool.unload(str(tmp_path / "published"))
        with pytest.raises(AssertionError):
            check_both_tasks(pool, tmp_path / "published", tmp_path / "native")
        (tmp_path / "published/artifact.metadata").write_text(json.dumps(settings))


def test_hidden_states_of_any_encoder(pool: mpool.Pool, tmp_path: Path) -> None:
    folder = write_masked(tmp_path / "base", "bert")
    model = masked_model("bert").bert
    found = pool.embed_tokens(TEXTS, str(folder), compute="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        same_tokens(found, [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS])


# ---- one pass ------------------------------------------------------------------------------------------------------

def test_bge_m3(pool: mpool.Pool, m3: Path) -> None:
    found = pool.embed_all(TEXTS, str(m3), compute="float32")
    dense, weights, rows = bge_m3_outputs(m3, TEXTS)
    assert np.abs(found.dense - dense).max() < 1e-5
    same_sparse(found.sparse, weights)
    same_tokens(found.tokens, rows)
    assert pool.embed(TEXTS, str(m3), compute="float32").tobytes() == found.dense.tobytes()
    one = pool.embed_sparse(TEXTS, str(m3), compute="float32")
    assert one.values.tobytes() == found.sparse.values.tobytes()
    assert pool.embed_tokens(TEXTS, str(m3), compute="float32").values.tobytes() == found.tokens.values.tobytes()
    assert [row.model for row in pool.ps()].count(f"{m3} (float32)") == 1  # one copy of the weights


# ---- promises ------------------------------------------------------------------------------------------------------

def test_results_behave_like_sequences(pool: mpool.Pool, m3: Path) -> None:
    sparse, tokens = pool.embed_sparse(TEXTS, str(m3)), pool.embed_tokens(TEXTS, str(m3))
    assert len(sparse) == len(tokens) == len(list(sparse)) == len(list(tokens)) == len(TEXTS)
    assert np.array_equal(sparse[-1][0], sparse[len(TEXTS) - 1][0]) and tokens[-1].shape[1] == 48
    assert sparse.decoded(1)[1][0][0] == "w7"
    for bad in (sparse, tokens):
        with pytest.raises(IndexError):
            bad[len(TEXTS)]
    empty = pool.embed_all([], str(m3))
    assert empty.dense.shape == (0, 48) and empty.sparse.shape == (0, VOCAB) and empty.tokens.values.shape == (0, 48)
    assert sparse.dot(empty.sparse).shape == (len(TEXTS), 0) and empty.sparse.dot(sparse).shape == (0, len(TEXTS))
    with pytest.raises(mpool.InvalidArgument, match="`top_k`"):
        sparse.decoded(0)


def test_bad_input(pool: mpool.Pool, m3: Path, tmp_path: Path) -> None:
    plain = str(write_masked(tmp_path / "plain", "bert"))
    with pytest.raises(mpool.WrongCapability, match="has no sparse vectors; it has: dense"):
        pool.embed_sparse(TEXTS, plain)
    for name in ("embed_sparse", "embed_tokens", "embed_all"):
        call = getattr(pool, name)
        with pytest.raises(mpool.InvalidArgument, match=r"`inputs\[1\]` must be a str"):
            call(["a", 5], str(m3))
        with pytest.raises(mpool.InvalidArgument, match="surrogate"):
            call("\ud800", str(m3))
        with pytest.raises(mpool.ContextOverflow):
            call("w1 " * 100, str(m3), truncate=False)
        with pytest.raises(mpool.LimitError):
            call(TEXTS, str(m3), max_inputs=2)
        with pytest.raises(mpool.InvalidArgument, match="`task`"):
            call(TEXTS, str(m3), task="passage")
    with pytest.raises(mpool.InvalidArgument, match="`max_active`"):
        pool.embed_sparse(TEXTS, str(m3), max_active=0)
    with pytest.raises(mpool.InvalidArgument, match="`output`"):
        pool.submit("text_embedding", inputs=TEXTS, model=str(m3), output="colbert")
