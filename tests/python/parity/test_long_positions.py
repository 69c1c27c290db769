"""Logits and hidden states at positions beyond 1,024, compared with transformers in float64 (``helpers/float64.py``).

The models are small, so that 33,000 positions take seconds. transformers in float32 would be no reference: its rotary
angles make it 4 to 20 times less exact than mpool at these lengths.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import paritymodels
from corelib import greedy, logits, token_vectors
from encodermodels import ENCODERS, VOCAB
from float64 import decoder_logits, encoder_states
from paritymodels import DECODERS, randomise, write_tokenizer

#: Largest difference, relative to the largest logit or state. The largest that was measured is a third of it.
TOLERANCE = 2e-5
#: Positions that the models allow.
POSITIONS = 40000
#: Two heads and one KV head, so that the reference's scores take little time.
SMALL: dict[str, Any] = {"hidden": 32, "vocab": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
#: Settings of models that differ from SMALL and from DECODERS.
OTHER: dict[str, dict[str, Any]] = {
    "deepseek2": {"num_key_value_heads": 2}, "deepseek2_lite": {"num_key_value_heads": 2},
    "llama_mistral": {"sliding_window": 700}, "gemma3_types": {"sliding_window": 900},
    "smollm3_window": {"sliding_window": 1100}, "gpt_oss": {"sliding_window": 800}}
#: A decoder for each kind of RoPE scaling, each kind of window, NoPE, and latent attention.
KINDS = ("llama", "llama_linear", "llama_dynamic", "llama_rope3", "llama_yarn", "llama_longrope", "llama_mistral",
         "gpt_oss", "deepseek2", "deepseek2_lite", "smollm3_window", "phi3_long", "gemma3_types")


def made(family: str, folder: Path, positions: int = POSITIONS, **more: Any) -> Any:
    """Save a seeded model with two or more layers. Returns it."""
    layers = len(paritymodels.LAYER_TYPES.get(family, (0, 0)))
    model = paritymodels.decoder(family, layers, positions=positions, **{**SMALL, **OTHER.get(family, {}), **more})
    randomise(model, 21)
    model.save_pretrained(folder)
    write_tokenizer(folder, SMALL["vocab"])
    return model


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(2, SMALL["vocab"], count)


def check(model: Any, folder: Path, count: int) -> None:
    """Compare the logits after each of ``count`` tokens."""
    with mpool.Pool() as pool:
        got = logits(pool, str(folder), tokens(count), "float32")
    expected = decoder_logits(model, tokens(count))
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", KINDS)
def test_1500_positions(tmp_path: Path, family: str) -> None:
    check(made(family, tmp_path), tmp_path, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_yarn", "llama_mistral"])
def test_5000_positions(tmp_path: Path, family: str) -> None:
    check(made(family, tmp_path), tmp_path, 5000)


def long_rope(original: int) -> dict[str, Any]:
    """Return LongRoPE parameters of a model that was trained with ``original`` positions."""
    return {**DECODERS["llama_longrope"][2]["rope_parameters"], "original_max_position_embeddings": original}


def test_longrope_factors_are_not_rounded(tmp_path: Path) -> None:
    """Factors rounded to float32 would turn the angle of position 30,000 by 1e-3 (seen in the slow test below)."""
    parameters = long_rope(39000)
    parameters["short_factor"] = [1.1, 1.3, 1.7, 1.9, 2.3, 2.7, 3.1, 3.3]
    check(made("llama_longrope", tmp_path, rope_parameters=parameters), tmp_path, 2500)


@pytest.mark.parametrize("count", [1498, 1501])
def test_longrope_on_both_sides_of_its_switch(tmp_path: Path, count: int) -> None:
    """A sequence that stays within the original length uses the short factors, a longer one the long factors."""
    check(made("llama_longrope", tmp_path, rope_parameters=long_rope(1500)), tmp_path, count)


@pytest.mark.slow
@pytest.mark.parametrize("original", [4096, 34000])
def test_longrope_at_33000_positions(tmp_path: Path, original: int) -> None:
    check(made("llama_longrope", tmp_path, rope_parameters=long_rope(original)), tmp_path, 33000)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5000, 33000])
@pytest.mark.parametrize("family", [name for name in KINDS if "long" not in name])
def test_all_kinds_far_out(tmp_path: Path, family: str, count: int) -> None:
    check(made(family, tmp_path), tmp_path, count)


@pytest.mark.slow
def test_131071_positions(tmp_path: Path) -> None:
    """Every position of a prompt of the longest context that most published models have, in two layers."""
    check(made("llama_yarn", tmp_path, positions=131_072), tmp_path, 131_071)


@pytest.mark.parametrize("family", ["llama_rope3", "deepseek2"])
def test_decoding_after_a_long_prompt(tmp_path: Path, family: str) -> None:
    """Tokens one by one, which other code computes than a prompt, are the reference's greedy choice."""
    model, prompt = made(family, tmp_path), tokens(1400)
    with mpool.Pool() as pool:
        generated = greedy(pool, str(tmp_path), prompt, 6, "float32")
    rows = decoder_logits(model, np.concatenate([prompt, generated]))[len(prompt) - 1:-1]
    rows[:, 1] = -np.inf  # the end token is not sampled
    best = np.sort(rows, axis=1)
    assert (best[:, -1] - best[:, -2]).min() > 10 * TOLERANCE * best[:, -1].max(), "choose another seed"
    assert rows.argmax(axis=1).tolist() == generated.tolist()


#: Encoder -> length of its texts. XLM-R's position table ends there.
LONG_TEXTS = {"modern_bert": 1500, "nomic_bert": 1500, "gte": 1500, "qwen3_embedding": 1500, "bert_xlm_roberta": 1500}


@pytest.mark.parametrize("name, count", [*LONG_TEXTS.items(),
                                         *(pytest.param(name, 8192, marks=pytest.mark.slow) for name in LONG_TEXTS)])
def test_long_texts(tmp_path: Path, name: str, count: int) -> None:
    encoder = ENCODERS[name]
    config = encoder.make(2).config
    # XLM-R's table begins with unused rows, as many as the padding token's id and one more.
    config.max_position_embeddings = count + (config.pad_token_id + 1 if name == "bert_xlm_roberta" else 0)
    model = type(encoder.make(2))(config).eval()
    randomise(model, 22)
    ids = np.random.default_rng(6).integers(5, VOCAB, count).tolist()
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(encoder.write(model, tmp_path)), [ids])[0]
    expected = encoder_states(model, ids)
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
