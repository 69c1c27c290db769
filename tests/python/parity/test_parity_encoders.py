"""Every layer of every encoder family in float32, compared with transformers, or with torch models written from papers
and recorded results of public code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import mpool
from mpool.models.formats.hf_folder import describe_folder

from corelib import token_vectors
from encodermodels import ENCODERS, VOCAB, albert, built
from paritymodels import randomise, transformers, write_tokenizer
from rerankers import make_reranker, set_config
from rounding import deviations

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "encoder"))

import make_encoder_goldens as recorded  # noqa: E402

TOLERANCE = 1e-4
LAYERS = 3


def _texts(longest: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(5, VOCAB, n).tolist() for n in (1, 2, 17, 64, longest)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_layers(tmp_path: Path, name: str, layers: int) -> None:
    encoder = ENCODERS[name]
    model = built(name, layers)
    texts = _texts(encoder.longest)
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(encoder.write(model, tmp_path)), texts)
    for ids, vectors in zip(texts, got):
        expected = encoder.expected(model, ids)
        assert np.abs(vectors - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", recorded.PUBLIC.values())
def test_encoder_against_public_code(tmp_path: Path, name: str) -> None:
    """mpool and the tests' torch model match recorded results of public code for each token."""
    encoder = ENCODERS[name]
    model = built(name, recorded.LAYERS)
    folder = encoder.write(model, tmp_path)
    with np.load(recorded.GOLDENS) as goldens:
        known, expected = (goldens[f"{name}.{part}"] for part in ("hash", "rows"))
    assert np.array_equal(recorded.folder_hash(folder), known), "the weights changed: regenerate the goldens"
    with mpool.Pool() as pool:
        got = np.concatenate(token_vectors(pool, str(folder), recorded.TEXTS))
    own = np.concatenate([encoder.expected(model, ids) for ids in recorded.TEXTS])
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.abs(own - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_nv_embed_pools_as_public_code(tmp_path: Path) -> None:
    """The pooled embedding leaves out the instruction, as in the public code."""
    folder = ENCODERS["nv_embed"].write(built("nv_embed", recorded.LAYERS), tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0", "eos_token": "w1"}))
    words = [f"w{i}" for i in recorded.POOLED[:-1]]
    prompt, text = " ".join(words[:recorded.INSTRUCTION]) + " ", " ".join(words[recorded.INSTRUCTION:])
    with mpool.Pool() as pool:
        got = pool.embed(text, str(folder), prompt=prompt, compute="float32")
    assert np.abs(got - np.load(recorded.GOLDENS)["nv_embed.pooled"]).max() <= 1e-5


#: Largest 1 - cosine of the mean of a text's embeddings and of each token's, three times the largest of all families
#: but NV-Embed, whose pooling by attention is less robust with random weights. On CPUs with AMX, attention
#: too is computed in bfloat16: one token of EuroBERT is at 2.64e-3 there.
BOUNDS = {"bfloat16": (3e-4, 3.2e-3), "int8": (3e-3, 6e-2)}
NV_EMBED = {"bfloat16": (6e-4, 1.5e-2), "int8": (3e-3, 6e-2)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("compute", BOUNDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_precisions_are_near(tmp_path: Path, name: str, compute: str) -> None:
    encoder = ENCODERS[name]
    model = built(name, 2)
    texts = _texts(encoder.longest)
    mean, each = (NV_EMBED if name == "nv_embed" else BOUNDS)[compute]
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(encoder.write(model, tmp_path)), texts, compute)
    for ids, vectors in zip(texts, got):
        expected = encoder.expected(model, ids)
        assert deviations(vectors.mean(0), expected.mean(0)) <= mean
        assert 1e-8 < deviations(vectors, expected).max() <= each


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_does_not_depend_on_its_batch(tmp_path: Path, name: str) -> None:
    encoder = ENCODERS[name]
    model = encoder.make(2)
    randomise(model, 9)
    folder = str(encoder.write(model, tmp_path))
    texts = _texts(encoder.longest)
    with mpool.Pool() as pool:
        for compute in ("float32", "int8"):
            together = token_vectors(pool, folder, texts, compute)
            for ids, vectors in zip(texts, together):
                assert np.array_equal(token_vectors(pool, folder, [ids], compute)[0], vectors)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, key, value", [
    ("nomic_bert_published", "prenorm", True), ("nomic_bert_published", "rotary_emb_fraction", 0.5),
    ("nomic_bert_published", "qkv_proj_bias", True), ("nomic_bert_published", "moe_every_n_layers", 2),
    ("nomic_bert_moe", "expert_choice_router", True), ("nomic_bert_moe", "moe_normalize_expert_weights", 1.0),
    ("nomic_bert_moe", "num_shared_experts", 1), ("nomic_bert_moe", "moe_every_n_layers", 0),
    ("gte_published", "position_embedding_type", "absolute"), ("gte_published", "logn_attention_scale", True),
    ("gte_published", "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 1.0}),
    ("gte_published", "rope_scaling", {"type": "ntk", "factor": 1e200}),
    ("gte", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1000.0}),
    ("modern_bert", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("jina_bert_v2", "feed_forward_type", "original"),
    ("gte_arctic", "position_embedding_type", "absolute"),
    ("bert_xlm_roberta", "position_embedding_type", "relative_key"),
    ("bert_electra", "position_embedding_type", "relative_key"),
    ("deberta_v2", "conv_kernel_size", 3), ("deberta_v2", "relative_attention", False),
    ("deberta_v2", "pos_att_type", "p2p"), ("deberta_v2", "pos_att_type", ""),
    ("deberta_v2", "norm_rel_ebd", "batch_norm"),
    ("bert_distilbert", "activation", "tanh"),
    ("llama_embedding_eurobert", "attention_bias", True),
    ("llama_embedding_eurobert", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}),
])
def test_keys_that_change_the_computation_are_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    folder = ENCODERS[name].write(built(name, 1), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises((mpool.errors.Unsupported, mpool.errors.FormatError), match=key):
        describe_folder(str(folder), key="k", ref="r")


@pytest.mark.parametrize("key, value, got", [
    ("classifier_pooling", "late", "'late'"), ("clf_pooling", "late", "'late'"),
    ("classifier_pooling", None, "missing")])
def test_classifiers_of_eurobert_that_pool_logits_are_refused(tmp_path: Path, key: str, value: str | None,
                                                              got: str) -> None:
    """The published Python code of EuroBERT calls the key clf_pooling, and transformers classifier_pooling. The default
    of both is 'late'."""
    folder = make_reranker(tmp_path / "model", "eurobert_late")
    set_config(folder, classifier_pooling=None)
    set_config(folder, **{key: value})
    with pytest.raises(mpool.errors.Unsupported) as caught:
        describe_folder(str(folder), key="k", ref="r")
    expected = f"{folder / 'config.json'}: {key} is {got}, mpool supports only 'bos' and 'mean'"
    assert str(caught.value) == expected


#: Values of a key that contradict the tensors, or that no model has: name, key, value, field of the error.
HOSTILE = [
    ("bert_albert", "num_hidden_groups", 0, "num_hidden_groups"),
    ("bert_albert", "num_hidden_groups", -1, "num_hidden_groups"),
    ("bert_albert", "num_hidden_groups", 3, "num_hidden_groups"),
    ("bert_albert", "num_hidden_groups", 1.5, "num_hidden_groups"),
    ("bert_albert", "num_hidden_groups", 1, "tensors"),
    ("bert_albert", "inner_group_num", 0, "inner_group_num"), ("bert_albert", "inner_group_num", 2, "tensors"),
    ("bert_albert", "embedding_size", 0, "embedding_size"),
    ("bert_albert", "embedding_size", 1 << 40, "embedding_size"),
    ("bert_albert", "embedding_size", 21, "shape of embeddings.word_embeddings.weight"),
    ("bert_electra", "embedding_size", 48, "shape of embeddings.word_embeddings.weight"),
    ("bert_electra_wide", "embedding_size", 20, "shape of embeddings.word_embeddings.weight"),
    ("bert_distilbert", "dim", 0, "dim"), ("bert_distilbert", "n_heads", 5, "attention.head_count"),
    ("bert_distilbert", "hidden_dim", 99, "shape of transformer.layer.0.ffn.lin1"),
    ("deberta_v2", "position_buckets", 1, "position_buckets"),
    ("deberta_v2", "position_buckets", 118, "position_buckets"),  # the last bucket would begin before the others end
    ("deberta_v2", "position_buckets", 1 << 40, "position_buckets"),
    ("deberta_v2", "position_buckets", -2, "position_buckets"),
    ("deberta_v2", "position_buckets", 9, "shape of encoder.rel_embeddings.weight"),
    ("deberta_v2", "max_relative_positions", 1 << 40, "max_relative_positions"),
    ("deberta_v2", "max_relative_positions", -7, "max_relative_positions"),
    ("deberta_v2", "max_relative_positions", 1.5, "max_relative_positions"),
    ("deberta_v2", "share_att_key", False, "tensors"), ("deberta_v2", "norm_rel_ebd", "none", "tensors"),
    ("deberta_v2", "embedding_size", 47, "shape of embeddings.word_embeddings"),
    ("deberta_v2", "pos_att_type", [1], "pos_att_type"),
    ("deberta_v2", "attention_head_size", 8, "num_attention_heads"),
    ("deberta_v2", "position_biased_input", True, "tensors"),
    ("deberta_v2", "type_vocab_size", 1 << 40, "type_vocab_size"),
    ("deberta_v2_own", "share_att_key", True, "tensors"),
    ("llama_embedding_eurobert", "head_dim", 0, "head_dim"),
    ("llama_embedding_eurobert", "num_key_value_heads", 4, "attention.head_count_kv"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, key, value, field", HOSTILE)
def test_hostile_configurations_are_refused(tmp_path: Path, name: str, key: str, value: object, field: str) -> None:
    folder = ENCODERS[name].write(built(name, 2), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(mpool.errors.FormatError) as caught:
        describe_folder(str(folder), key="k", ref="r")
    assert field in caught.value.field and str(folder) in caught.value.file


def test_layers_times_inner_layers_are_limited(tmp_path: Path) -> None:
    folder = ENCODERS["bert_albert"].write(built("bert_albert", 2), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "inner_group_num": 1 << 40}))
    with pytest.raises(mpool.LimitError, match="inner_group_num"):
        describe_folder(str(folder), key="k", ref="r")


def test_decoders_of_ettin_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.ModernBertDecoderConfig(vocab_size=VOCAB, hidden_size=48, num_attention_heads=3,
                                                  num_hidden_layers=2, intermediate_size=64, pad_token_id=0)
    transformers.ModernBertDecoderModel(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, VOCAB)
    with pytest.raises(mpool.errors.FormatError, match="'modernbert-decoder'"):
        describe_folder(str(tmp_path), key="k", ref="r")


def test_shared_layers_are_in_memory_once(tmp_path: Path) -> None:
    """Twelve layers of one group take the memory of one layer."""
    sizes = {}
    for layers in (1, 12):
        folder = tmp_path / str(layers)
        ENCODERS["bert_albert"].write(albert(layers, groups=1), folder)
        with mpool.Pool() as pool:
            token_vectors(pool, str(folder), [[5, 6]])
            facts = pool.ps()[0].facts
        sizes[layers] = facts["weight_bytes"]
        assert facts["layers"] == layers
    assert sizes[1] == sizes[12]


@pytest.mark.parametrize("name", ["modern_bert_old", "gemma_embedding", "llama_embedding_mistral", "nv_embed"])
def test_too_many_layers_are_refused_before_they_are_listed(tmp_path: Path, name: str) -> None:
    folder = ENCODERS[name].write(built(name, 1), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = 1 << 40
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(mpool.LimitError, match="layers"):
        describe_folder(str(folder), key="k", ref="r")
