"""Keys and values of 8 bits in models whose keys have few components that are much larger than the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import paritymodels
import tinygguf
from corelib import logits
from paritymodels import randomise, torch, write_tokenizer

VOCAB, PAIR, LARGE = 96, 1, 100.0


def plant(model: Any) -> None:
    """Enlarge one rotary pair of each key head, and make the same pair of the queries smaller."""
    for layer in model.model.layers:
        own = layer.self_attn
        components = [PAIR, PAIR + own.head_dim // 2]
        with torch.no_grad():
            if hasattr(own, "k_norm"):
                offset = 1 if type(own.k_norm).__name__.startswith("Gemma") else 0
                own.k_norm.weight[components] = LARGE - offset
                own.q_norm.weight[components] = 1 / LARGE - offset
            else:
                own.k_proj.bias.view(-1, own.head_dim)[:, components] = LARGE
                own.q_proj.bias.view(-1, own.head_dim)[:, components] /= LARGE
                own.q_proj.weight.view(-1, own.head_dim, own.q_proj.in_features)[:, components] /= LARGE


@pytest.mark.parametrize(("family", "gguf"), [
    ("qwen2", False), ("qwen2", True), ("llama_biased", False), ("llama_biased", True), ("qwen3", False),
    ("qwen3", True), ("qwen3_biased", False), ("gemma3", False), ("smollm3_biased", False)])
def test_large_components_of_keys_cost_little_precision(tmp_path: Path, family: str, gguf: bool) -> None:
    """GGUF files of Llama rotate neighbouring components together, the others components half a head apart.

    Without the factors of keys the errors are 0.04 to 0.18.
    """
    model = paritymodels.decoder(family, 2, vocab=VOCAB)
    randomise(model, 4)
    plant(model)
    place = tmp_path / "model"
    if gguf:
        place = tinygguf.write(tmp_path / "model.gguf", model)
    else:
        model.save_pretrained(place)
        write_tokenizer(place, VOCAB)
    tokens = np.random.default_rng(7).integers(2, VOCAB, 80)
    with mpool.Pool() as pool, torch.no_grad():
        pool.load(str(place), kv_dtype="int8", compute="float32")
        got = logits(pool, str(place), tokens, "float32")
    exact = model(torch.tensor(tokens[None])).logits[0].detach().numpy()
    error = np.sqrt(np.square(got - exact).mean() / np.square(exact).mean())
    print(f"relative error {error:.4f}")
    assert 1e-4 < error < (0.015 if hasattr(model.model.layers[0].self_attn, "k_norm") else 0.035)
