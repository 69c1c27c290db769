"""Low-rank adapters compared with transformers: a model with merged weights, W + scale * B A, in float32."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import paritymodels
from adapterfiles import ALL, ATTENTION, matrices, merged, save_gguf, save_peft
from corelib import logits
from librarycases import VOCAB, small_decoder
from paritymodels import randomise, torch, write_tokenizer

TOLERANCE = 1e-4
#: Families, and their settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 26}),
    "granite": ("Granite", {"residual_multiplier": 0.7}),
    "gemma2": ("Gemma2", {"head_dim": 14}),
    "glm4": ("Glm4", {"head_dim": 20}),
    "qwen2moe": ("Qwen2Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                              "shared_expert_intermediate_size": 52}),
}


def make(family: str) -> Any:
    return small_decoder(FAMILIES[family][0], **FAMILIES[family][1])


def save(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return str(folder)


def expected(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize(("family", "rank"), [("llama", 1), ("llama", 8), ("llama", 16), ("llama", 33), ("qwen2", 16),
                                              ("qwen3", 8), ("granite", 16), ("gemma2", 5), ("glm4", 7),
                                              ("qwen2moe", 8)])
def test_logits(tmp_path: Path, family: str, rank: int) -> None:
    model = make(family)
    folder, found = save(tmp_path / "base", model), matrices(model, rank, 5)
    stable, scale = rank % 2 == 1, 1.5
    save_peft(tmp_path / "lora", found, scale * (math.sqrt(rank) if stable else rank), use_rslora=stable)
    tokens = np.random.default_rng(7).integers(2, VOCAB, 203)
    with mpool.Pool() as pool:
        plain = logits(pool, folder, tokens, "float32")
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = logits(pool, folder, tokens, "float32", "one")
        assert np.array_equal(logits(pool, folder, tokens, "float32"), plain)
    assert np.abs(got - expected(merged(model, found, scale), tokens)).max() <= TOLERANCE
    assert np.abs(got - plain).max() > 0.1


@pytest.mark.sample(3)
@pytest.mark.parametrize("targets", [*((name,) for name in ALL), ("q_proj", "v_proj"), ("k_proj", "up_proj"),
                                     ATTENTION])
def test_targets(tmp_path: Path, targets: tuple[str, ...]) -> None:
    model = make("llama")
    folder, found = save(tmp_path / "base", model), matrices(model, 4, 6, targets)
    save_peft(tmp_path / "lora", found, -3.0)
    tokens = np.random.default_rng(8).integers(2, VOCAB, 21)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = logits(pool, folder, tokens, "float32", "one")
    assert np.abs(got - expected(merged(model, found, -3.0 / 4), tokens)).max() <= TOLERANCE


@pytest.mark.parametrize(("family", "targets"), [
    ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("lfm2", ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3")),
    ("lfm3", ("in_proj", "q_proj", "g_proj", "o_proj", "w1")),
    ("qwen35", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "up_proj")),
    ("qwen3next", ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj")),
    ("granitehybrid", ("k_proj", "in_proj", "out_proj", "input_linear", "output_linear")),
    ("falcon_h1", ("k_proj", "o_proj", "in_proj", "out_proj", "gate_proj", "down_proj")),
    ("gemma4", ("q_proj", "k_proj", "v_proj", "gate_proj", "down_proj", "per_layer_input_gate", "per_layer_projection",
                "per_layer_model_projection")),
    ("nemotron_h_latent", ("k_proj", "in_proj", "up_proj", "fc1_latent_proj", "fc2_latent_proj"))])
def test_other_modules(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    """Phi-3 has one matrix for queries, keys and values, and one for gate and up. LFM2 has short convolutions, Qwen3.5
    and Qwen3-Next have gated delta nets, Granite 4 H has Mamba-2, Falcon-H1 has factors, Gemma 4 has inputs per layer,
    Nemotron 3 Super has latents.
    """
    model = paritymodels.decoder(family, paritymodels.LAYERS.get(family, 2), vocab=VOCAB)
    randomise(model, 4)
    folder = save(tmp_path / "base", model)
    found = matrices(model, 3, 9, targets)
    assert {name.rpartition(".")[2] for name in found} == set(targets)
    save_peft(tmp_path / "lora", found, 6.0)
    tokens = np.random.default_rng(9).integers(2, VOCAB, 50)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = logits(pool, folder, tokens, "float32", "one")
    assert np.abs(got - expected(merged(model, found, 2.0), tokens)).max() <= TOLERANCE


def test_ranks_and_alphas_of_modules(tmp_path: Path) -> None:
    model = make("llama")
    folder = save(tmp_path / "base", model)
    found = {**matrices(model, 3, 1, ("q_proj", "down_proj")), **matrices(model, 7, 2, ("k_proj",))}
    special = "model.layers.1.self_attn.k_proj"
    save_peft(tmp_path / "lora", found, 6.0, r=3, rank_pattern={"k_proj": 7}, alpha_pattern={special: 21.0})
    whole = model
    for name, pair in found.items():
        whole = merged(whole, {name: pair}, (21.0 if name == special else 6.0) / pair[0].shape[0])
    tokens = np.random.default_rng(9).integers(2, VOCAB, 50)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = logits(pool, folder, tokens, "float32", "one")
    assert np.abs(got - expected(whole, tokens)).max() <= TOLERANCE


def _tiled(found: Any, config: Any) -> Any:
    """Return the matrices of an adapter of Qwen3.5 as llama.cpp's converter orders them: the rows of value heads, and
    the columns of the output projection."""
    import tinygguf

    def of(name: str, matrix: np.ndarray) -> np.ndarray:
        return next(iter(tinygguf._delta_parts(f"{name}.weight", matrix, config).values()))
    return {name: (a, b) if ".linear_attn." not in name else (of(name, a), b) if name.endswith("out_proj") else
            (a, of(name, b)) for name, (a, b) in found.items()}


_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "down_proj")


@pytest.mark.parametrize(("family", "base", "targets"), [
    ("qwen35", "gguf", _DELTA), ("qwen35", "folder", _DELTA),
    ("granitehybrid", "gguf", ("q_proj", "k_proj", "in_proj", "out_proj")),
    ("nemotron_h_latent", "gguf", ("q_proj", "k_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")),
    ("falcon_h1", "gguf", ("up_proj",))])
def test_orders_of_gguf_files(tmp_path: Path, family: str, base: str, targets: tuple[str, ...]) -> None:
    """GGUF files may order the rows and columns of a matrix in another way than folders. An adapter of the other format
    is ordered like the model."""
    import tinygguf

    model = paritymodels.decoder(family, paritymodels.LAYERS.get(family, 2), vocab=VOCAB)
    randomise(model, 4)
    found = matrices(model, 3, 3, targets)
    if base == "gguf":
        place, lora = str(tinygguf.write(tmp_path / "base.gguf", model)), save_peft(tmp_path / "lora", found, 3.0)
    else:
        place = save(tmp_path / "base", model)
        lora = save_gguf(tmp_path / "lora.gguf", _tiled(found, model.config), 3.0, architecture=family)
    tokens = np.random.default_rng(7).integers(2, VOCAB, 60)
    with mpool.Pool() as pool:
        pool.load(place, adapters={"one": lora}, compute="float32")
        got = logits(pool, place, tokens, "float32", "one")
    whole = expected(merged(model, found, 1.0), tokens)
    assert np.abs(got - whole).max() <= TOLERANCE
    assert np.abs(expected(model, tokens) - whole).max() > 100 * TOLERANCE


@pytest.mark.parametrize("base", ["gguf", "folder"])
def test_factors_of_gguf_files(tmp_path: Path, base: str) -> None:
    """GGUF files of Falcon-H1 hold most weights times factors, and do not state these: an adapter of the other format
    would be added without its factors."""
    import tinygguf

    model = paritymodels.decoder("falcon_h1", 2, vocab=VOCAB)
    found = matrices(model, 3, 3, ("o_proj",))
    if base == "gguf":
        place, lora = str(tinygguf.write(tmp_path / "base.gguf", model)), save_peft(tmp_path / "lora", found, 3.0)
    else:
        place = save(tmp_path / "base", model)
        lora = save_gguf(tmp_path / "lora.gguf", found, 3.0, architecture="falcon-h1")
    with mpool.Pool() as pool, pytest.raises(mpool.errors.Unsupported, match="o_proj|attn_output"):
        pool.load(place, adapters={"one": lora}, compute="float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_types(tmp_path: Path, dtype: str) -> None:
    model = make("qwen2")
    folder, found = save(tmp_path / "base", model), matrices(model, 8, 5)
    save_peft(tmp_path / "lora", found, 8.0, dtype)
    kind = getattr(torch, dtype)
    rounded = {name: tuple(torch.from_numpy(m).to(kind).float().numpy() for m in pair) for name, pair in found.items()}
    tokens = np.random.default_rng(7).integers(2, VOCAB, 50)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": tmp_path / "lora"}, compute="float32")
        got = logits(pool, folder, tokens, "float32", "one")
    assert np.abs(got - expected(merged(model, rounded, 1.0), tokens)).max() <= TOLERANCE


@pytest.mark.parametrize(("family", "base", "adapter"), [
    ("llama", "gguf", "gguf"), ("llama", "gguf", "peft"), ("llama", "folder", "gguf"), ("qwen2", "gguf", "gguf"),
    ("qwen2", "gguf", "peft"), ("qwen2", "folder", "gguf")])
def test_gguf(tmp_path: Path, family: str, base: str, adapter: str) -> None:
    """GGUF files of Llama interleave the halves of each head in the rows of queries and keys, those of Qwen2 do not."""
    import tinygguf

    model = paritymodels.decoder(family, 2, vocab=VOCAB)
    randomise(model, 4)
    place = save(tmp_path / "base", model) if base == "folder" else str(tinygguf.write(tmp_path / "base.gguf", model))
    found = matrices(model, 6, 3)
    if adapter == "peft":
        path = save_peft(tmp_path / "lora", found, 3.0)
    else:
        path = save_gguf(tmp_path / "lora.gguf", found, 3.0, {"q_proj": 6, "k_proj": 2} if family == "llama" else None,
                         family)
    tokens = np.random.default_rng(7).integers(2, VOCAB, 60)
    with mpool.Pool() as pool:
        pool.load(place, adapters={"one": path}, compute="float32")
        got = logits(pool, place, tokens, "float32", "one")
    assert np.abs(got - expected(merged(model, found, 0.5), tokens)).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["internvl", "lfm2_vl", "mistral3", "qwen2_5_vl", "qwen3_5"])
def test_logits_of_a_vision_model(tmp_path: Path, family: str) -> None:
    """An adapter updates the decoder, also where it reads an image."""
    import visionmodels
    from visionparity import random_images, reference, relative, request, run

    model = visionmodels.randomised(family)
    folder = visionmodels.save(model, family, tmp_path / "base")
    found = {name: pair for name, pair in matrices(model, 8, 5, ATTENTION).items() if "language_model" in name}
    assert found
    save_peft(tmp_path / "lora", found, 12.0)
    images = random_images([(63, 90)])
    with mpool.Pool() as pool:
        pool.load(str(folder), adapters={"one": tmp_path / "lora"}, compute="float32")
        made = request(pool, folder, images)
        adapter = pool.get(str(folder))._entry.setup.adapter_id("one")
        got = run(pool, made, prompt_logits=True, adapter=adapter).prompt_logits()
        plain = run(pool, made, prompt_logits=True).prompt_logits()
    assert relative(plain, reference(model, made, images)[1]) <= TOLERANCE
    changed = merged(model, found, 1.5)
    changed.mpool_family = family
    assert relative(got, reference(changed, made, images)[1]) <= TOLERANCE and not np.array_equal(got, plain)
