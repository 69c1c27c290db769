"""Every layer of every encoder family in float32, compared with transformers, or with torch models written from papers
and recorded results of public code."""

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
