"""Low-rank adapters of encoders compared with transformers: models with merged weights, W + scale * B A, in float32."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import Unsupported

import paritymodels
from adapterfiles import ALL, matrices, merged, save_gguf, save_peft
from corelib import token_vectors
from encodermodels import ENCODERS, VOCAB, Encoder, built
from paritymodels import randomise
from rerankers import make_reranker

TOLERANCE = 1e-4
BERT = ("query", "key", "value", "dense")
#: Encoder -> modules of its adapter: all that mpool supports.
FAMILIES: dict[str, tuple[str, ...]] = {
    "bert_roberta": BERT, "bert_heads": BERT, "bert_xlm_roberta": BERT,
    "bert_distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"), "bert_electra": BERT,
    # groups of layers share their weights, and so the updates
    "bert_albert": (*BERT, "ffn", "ffn_output"), "bert_albert_inner": (*BERT, "ffn", "ffn_output"),
    "mpnet": ("q", "k", "v", "o", "dense"),
    "deberta_v2": ("value_proj", "dense"), "deberta_v2_own": ("value_proj", "dense"),
    "modern_bert": ("Wqkv", "Wo", "Wi"), "modern_bert_granite": ("Wqkv", "Wo", "Wi"),
    "modern_bert_biases": ("Wqkv", "Wo", "Wi"), "nomic_bert": ALL, "gte": ALL,
    "qwen3_embedding": ALL, "llama_embedding_qwen2": ALL, "llama_embedding_eurobert": ALL,
    "llama_embedding_mistral": ALL, "gemma_embedding": ALL,
}


def _texts(longest: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(5, VOCAB, n).tolist() for n in (1, 2, 17, 64, longest)]


def largest_error(got: list[np.ndarray], encoder: Encoder, model: Any, texts: list[list[int]]) -> float:
    """Return the largest deviation from the model's states, in units of their scale."""
    wanted = [encoder.expected(model, ids) for ids in texts]
    return max(float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())) for a, b in zip(got, wanted))


@pytest.mark.sample(4)
@pytest.mark.parametrize("rank", [1, 8, 33])
@pytest.mark.parametrize("name", FAMILIES)
def test_encoders(tmp_path: Path, name: str, rank: int) -> None:
    encoder, model = ENCODERS[name], built(name, 2)
    folder = str(encoder.write(model, tmp_path / "base"))
    found = matrices(model, rank, 5, FAMILIES[name])
    assert len(found) >= len(FAMILIES[name])
    stable, scale = rank == 33, 1.5
    save_peft(tmp_path / "lora", found, scale * (math.sqrt(rank) if stable else rank), use_rslora=stable,
              task_type="FEATURE_EXTRACTION")
    texts = _texts(encoder.longest)
    with mpool.Pool() as pool:
        plain = token_vectors(pool, folder, texts)
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = token_vectors(pool, folder, texts, adapter="one")
        assert all(map(np.array_equal, token_vectors(pool, folder, texts), plain))
    assert largest_error(got, encoder, merged(model, found, scale), texts) <= TOLERANCE
    assert largest_error(got, encoder, model, texts) > 50 * TOLERANCE


@pytest.mark.parametrize("targets", [("query",), ("key",), ("value",), ("dense",), ("query", "value")])
def test_targets(tmp_path: Path, targets: tuple[str, ...]) -> None:
    encoder, model = ENCODERS["bert_xlm_roberta"], built("bert_xlm_roberta", 2)
    folder, found = str(encoder.write(model, tmp_path / "base")), matrices(model, 4, 6, targets)
    save_peft(tmp_path / "lora", found, -3.0)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = token_vectors(pool, folder, _texts(70), adapter="one")
    assert largest_error(got, encoder, merged(model, found, -0.75), _texts(70)) <= TOLERANCE


@pytest.mark.parametrize("layer", ["attention.self.query", "intermediate.dense", "attention.output.dense"])
def test_names_of_modules_with_dots(tmp_path: Path, layer: str) -> None:
    """Keys of ``alpha_pattern`` and ``rank_pattern`` as PEFT reads them: the end of a name, ``.`` for any character."""
    encoder, model = ENCODERS["bert_roberta"], built("bert_roberta", 2)
    folder = str(encoder.write(model, tmp_path / "base"))
    chosen = matrices(model, 7, 2, BERT)
    found = {**matrices(model, 3, 1, BERT), **{name: pair for name, pair in chosen.items() if name.endswith(layer)}}
    first = next(name for name in found if name.endswith(layer))
    alphas = {"^" + first.replace(".", r"\."): 21.0, layer.replace("attention", "att.ntion"): 14.0, "ttention": 1.0,
              "layer": 1.0, "^" + layer: 1.0}
    save_peft(tmp_path / "lora", found, 6.0, r=3, rank_pattern={layer: 7}, alpha_pattern=alphas)
    whole = model
    for name, pair in found.items():
        alpha = next((alpha for key, alpha in alphas.items() if re.match(rf"(.*\.)?({key})$", name)), 6.0)
        assert (alpha == 6.0) != name.endswith(layer)
        whole = merged(whole, {name: pair}, alpha / pair[0].shape[0])
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = token_vectors(pool, folder, _texts(70), adapter="one")
    assert largest_error(got, encoder, whole, _texts(70)) <= TOLERANCE


@pytest.mark.parametrize("adapter", ["gguf", "peft"])
def test_gguf(tmp_path: Path, adapter: str) -> None:
    import tinygguf

    model = paritymodels.bert(2)
    randomise(model, 4)
    base = str(tinygguf.write(tmp_path / "base.gguf", model))
    found = matrices(model, 6, 3, BERT)
    path = save_peft(tmp_path / "lora", found, 3.0) if adapter == "peft" else save_gguf(
        tmp_path / "lora.gguf", found, 3.0, None, "bert")
    texts = _texts(40)
    encoder = Encoder(paritymodels.bert, 40)
    with mpool.Pool() as pool:
        pool.load(base, adapters={"one": path}, compute="float32")
        got = token_vectors(pool, base, texts, adapter="one")
    assert largest_error(got, encoder, merged(model, found, 0.5), texts) <= TOLERANCE


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "mpnet", "distilbert", "modern_bert"])
def test_rerankers(tmp_path: Path, name: str) -> None:
    """Adapters of the task SEQ_CLS name modules with the prefix of the family."""
    transformers = paritymodels.transformers
    folder = make_reranker(tmp_path / "base", name)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    targets = {"mpnet": ("q", "v", "dense"), "distilbert": ("q_lin", "lin1"), "modern_bert": ("Wqkv", "Wi")}.get(
        name, ("query", "value", "dense"))
    found = {key: pair for key, pair in matrices(model, 5, 3, targets).items() if "layer" in key}
    save_peft(tmp_path / "lora", found, 5.0, task_type="SEQ_CLS")
    documents = ["a cat sat on the mat", "the dog", "numbers 0 1 2 3"]
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"})
        options: dict[str, Any] = dict(compute="float32", function_to_apply="none")
        got = pool.rerank("the dog", documents, folder, adapter="one", **options).scores
        plain = pool.rerank("the dog", documents, folder, **options).scores
        merged(model, found, 1.0).save_pretrained(folder)
        pool.unload(folder)
    with mpool.Pool() as pool:
        wanted = pool.rerank("the dog", documents, folder, **options).scores
    assert np.abs(np.subtract(got, wanted)).max() <= TOLERANCE
    assert np.abs(np.subtract(got, plain)).max() > 1e-3


@pytest.mark.parametrize("target", ["query_proj", "key_proj", "pos_key_proj", "pos_query_proj"])
def test_queries_and_keys_of_disentangled_attention_are_refused(tmp_path: Path, target: str) -> None:
    """The terms of distances are products of the same matrices, which are computed when the model is loaded."""
    name = "deberta_v2_own" if target.startswith("pos") else "deberta_v2"
    encoder, model = ENCODERS[name], built(name, 1)
    folder = encoder.write(model, tmp_path / "base")
    save_peft(tmp_path / "lora", matrices(model, 4, 6, (target,)), 4.0)
    with mpool.Pool() as pool, pytest.raises(Unsupported, match=f"{target}.*supports adapters of value_proj, dense"):
        pool.load(folder, adapters={"one": tmp_path / "lora"})
