"""``mpool quantize`` of DeepSeek-V2, DeepSeek-V3 and Kimi K2, and keys and tensors of the files of other families."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.models.quantizing import quantize as writing
from mpool.models.quantizing.quantize import quantize

gguf = pytest.importorskip("gguf")

import paritymodels  # noqa: E402
import quantisedfiles  # noqa: E402
import quantisedmodels  # noqa: E402
import tinygguf  # noqa: E402
from corelib import greedy, logits  # noqa: E402
from kimifiles import TEMPLATE, trained, write  # noqa: E402

#: Sizes with which the columns of most matrices are whole superblocks.
WIDE = {"vocab": quantisedfiles.ROWS, "hidden": 256, "inner": 256, "kv_lora_rank": 256, "q_lora_rank": 256,
        "moe_intermediate_size": 256, "qk_nope_head_dim": 32, **quantisedfiles.LATENT}
PROMPT = np.array([5, 99, 61, 30, 17, 120, 3])
#: YaRN as in the config.json of Kimi K2.
KIMI_YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0,
             "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 100}


def values(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in gguf.GGUFReader(path).tensors}


def settings(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    name = fields["general.architecture"].contents()
    return {key: field.contents() for key, field in fields.items() if key.startswith(f"{name}.")}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as DeepSeek publishes it: FP8 weights with a scale per block. The model has their values."""
    folder = tmp_path_factory.mktemp("fp8")
    model = quantisedmodels.decoder("deepseek2", **WIDE)
    model.lm_head.weight.data[quantisedfiles.VOCAB:] = 0  # rows without a token are never the largest logit
    quantisedmodels.save(model, folder, "fp8")
    quantisedfiles.write_tokenizer(folder, "deepseek-v3")
    return folder, model


#: Keys that only some files have. Readers compute the same without them.
OPTIONAL = {"attention.layer_norm_rms_epsilon", "attention.temperature_length", "expert_weights_norm",
            "feed_forward_length"}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", quantisedfiles.AS_CONVERTED)
def test_keys_and_tensors_are_those_of_the_format(tmp_path: Path, name: str) -> None:
    """The reference file is written by the ``gguf`` package, with the names and splits of llama.cpp's converter."""
    model = quantisedfiles.save(name, tmp_path / "m")
    reference = tinygguf.write(tmp_path / "reference.gguf", model)
    quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "F32")
    expected, found = settings(reference), settings(tmp_path / "q.gguf")
    assert {key.partition(".")[2] for key in found.keys() ^ expected.keys()} <= OPTIONAL
    for key, value in expected.items():  # a file may state a size once, or for each layer
        if isinstance(value, str):
            assert found[key] == value, key
        else:
            np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)
    expected, found = values(reference), values(tmp_path / "q.gguf")
    assert found.keys() == expected.keys()
    for tensor, data in expected.items():
        np.testing.assert_allclose(found[tensor], data, rtol=3e-7, err_msg=tensor)


def test_sizes_are_in_the_keys_of_the_package(tmp_path: Path) -> None:
    model = quantisedfiles.save("deepseek2", tmp_path / "m")
    quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "F32")
    found, config, keys = settings(tmp_path / "q.gguf"), model.config, gguf.Keys
    for key, expected in (
            (keys.Attention.KEY_LENGTH, 64 + 16), (keys.Attention.VALUE_LENGTH, 64), (keys.Attention.HEAD_COUNT_KV, 1),
            (keys.Attention.KEY_LENGTH_MLA, 24 + 16), (keys.Attention.VALUE_LENGTH_MLA, 32),
            (keys.Attention.KV_LORA_RANK, 64), (keys.Attention.Q_LORA_RANK, 40), (keys.Rope.DIMENSION_COUNT, 16),
            (keys.LLM.LEADING_DENSE_BLOCK_COUNT, 1), (keys.LLM.EXPERT_COUNT, 12), (keys.LLM.EXPERT_USED_COUNT, 3),
            (keys.LLM.EXPERT_SHARED_COUNT, 1), (keys.LLM.EXPERT_FEED_FORWARD_LENGTH, 48),
            (keys.LLM.FEED_FORWARD_LENGTH, config.intermediate_size), (keys.LLM.EXPERT_WEIGHTS_NORM, True),
            (keys.LLM.EXPERT_GATING_FUNC, gguf.ExpertGatingFuncType.SIGMOID), (keys.LLM.EXPERT_GROUP_COUNT, 4),
            (keys.LLM.EXPERT_GROUP_USED_COUNT, 2)):
        assert found.pop(key.format(arch="deepseek2")) == expected, key
    assert found.pop(keys.LLM.EXPERT_WEIGHTS_SCALE.format(arch="deepseek2")) == pytest.approx(1.7)
    assert found.pop(keys.Rope.SCALING_YARN_LOG_MUL.format(arch="deepseek2")) == pytest.approx(0.1)
    assert sorted(key.removeprefix("deepseek2.") for key in found) == [
        "attention.head_count", "attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length",
        "rope.freq_base", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type",
        "vocab_size"]


def test_fp8_weights(fp8: tuple[Path, Any], tmp_path: Path) -> None:
    """The F32 file has the values of the codes times their scales, and mpool computes of it what it computes of the
    folder."""
    folder, model = fp8
    reference = tinygguf.write(tmp_path / "reference.gguf", model)
    quantize(str(folder), str(tmp_path / "q.gguf"), "F32")
    expected, found = values(reference), values(tmp_path / "q.gguf")
    assert found.keys() == expected.keys()
    for tensor, data in expected.items():
        np.testing.assert_allclose(found[tensor], data, rtol=1e-6, err_msg=tensor)
    with mpool.Pool() as pool:
        tokens = greedy(pool, str(folder), PROMPT, 24, "float32")
        assert greedy(pool, str(tmp_path / "q.gguf"), PROMPT, 24, "float32").tolist() == tokens.tolist()
        context = np.concatenate([PROMPT, tokens])
        expected_logits = logits(pool, str(folder), context, "float32")
        got = logits(pool, str(tmp_path / "q.gguf"), context, "float32")
    assert len(tokens) == 24 and np.abs(got - expected_logits).max() <= 1e-4 * np.abs(expected_logits).max()


@pytest.mark.parametrize("dtype, most", [("BF16", 0.002), ("Q8_0", 0.006), ("Q4_K_M", 0.08)])
def test_types_are_near_the_source(fp8: tuple[Path, Any], tmp_path: Path, dtype: str, most: float) -> None:
    folder, model = fp8
    expected = values(tinygguf.write(tmp_path / "reference.gguf", model))
    quantize(str(folder), str(tmp_path / "q.gguf"), dtype)
    for name, data in values(tmp_path / "q.gguf").items():
        error = np.sqrt(np.mean((data - expected[name]) ** 2) / np.mean(expected[name] ** 2))
        assert error <= most, name
    with mpool.Pool() as pool:
        assert len(greedy(pool, str(tmp_path / "q.gguf"), PROMPT, 4)) == 4


def test_types_of_the_latent_halves(fp8: tuple[Path, Any], tmp_path: Path) -> None:
    """llama.cpp's recipes have no rule for them: they get the usual type, or its replacement for narrow rows."""
    quantize(str(fp8[0]), str(tmp_path / "q.gguf"), "Q4_K_M")
    found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    assert {name: found[f"blk.1.{name}"] for name in (
        "attn_k_b.weight", "attn_v_b.weight", "attn_kv_a_mqa.weight", "attn_q_b.weight", "ffn_gate_exps.weight",
        "ffn_gate_inp.weight", "exp_probs_b.bias", "attn_kv_a_norm.weight")} == {
        "attn_k_b.weight": "Q5_0", "attn_v_b.weight": "Q4_K", "attn_kv_a_mqa.weight": "Q4_K",
        "attn_q_b.weight": "Q4_K", "ffn_gate_exps.weight": "Q4_K", "ffn_gate_inp.weight": "F32",
        "exp_probs_b.bias": "F32", "attn_kv_a_norm.weight": "F32"}


@pytest.mark.parametrize("chunk", [1, 5000])
def test_chunks_of_heads(fp8: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    quantize(str(fp8[0]), str(tmp_path / "whole.gguf"), "BF16")
    monkeypatch.setattr(writing, "_CHUNK", chunk)
    quantize(str(fp8[0]), str(tmp_path / "parts.gguf"), "BF16")
    assert (tmp_path / "parts.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_kimi_as_published(tmp_path: Path) -> None:
    """``tiktoken.model``, YaRN with other betas than the usual ones, and the name kimi_k2."""
    folder, target, size = tmp_path / "m", str(tmp_path / "q.gguf"), len(trained()) + 256
    model = paritymodels.decoder("deepseek2_kimi", 3, vocab=size, rope_parameters=KIMI_YARN,
                                **quantisedfiles.LATENT)
    paritymodels.randomise(model, 11)
    model.save_pretrained(folder)
    write(folder, trained())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2", "eos_token_id": size - 254}))
    quantize(str(folder), target, "F32")
    fields = gguf.GGUFReader(target).fields
    for key, expected in (("pre", "kimi-k2"), ("model", "gpt2"), ("bos_token_id", size - 256),
                          ("eos_token_id", size - 255), ("padding_token_id", size - 1), ("add_bos_token", False)):
        assert fields[f"tokenizer.ggml.{key}"].contents() == expected, key
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[size - 254] == gguf.TokenType.CONTROL and types[size - 245] == gguf.TokenType.USER_DEFINED
    assert types[300] == gguf.TokenType.NORMAL
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    fast, slow = (getattr(gguf.Keys.Rope, f"SCALING_YARN_BETA_{side}").format(arch="deepseek2")
                  for side in ("FAST", "SLOW"))
    assert fields[fast].contents() == 1.0 and slow not in fields  # 1 is what readers assume
    text = "getUserName's iPhone, HELLOWorld 12345 你好abc世界 <|im_user|>x<|tool_calls_section_begin|>"
    with mpool.Pool() as pool:
        assert pool.tokenize(text, target) == pool.tokenize(text, str(folder))
        tokens = np.random.default_rng(3).integers(0, size - 256, 120)
        expected_logits = logits(pool, str(folder), tokens, "float32")
        assert np.abs(logits(pool, target, tokens, "float32") - expected_logits).max() <= 1e-4
        options: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "compute": "float32", "ignore_eos": True}
        messages = [{"role": "user", "content": "Wie geht's?"}]
        assert pool.chat(messages, target, **options).token_ids == \
            pool.chat(messages, str(folder), **options).token_ids


def test_epsilon_of_the_latents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GGUF files have one epsilon. The published models have one, too."""
    for epsilon in (1e-6, 1e-5):
        folder = tmp_path / str(epsilon)
        quantisedfiles.save_as(folder, "deepseek2", {"rms_norm_eps": epsilon}, "deepseek-v3")
        quantize(str(folder), str(tmp_path / "q.gguf"), "F32", force=True)
        assert settings(tmp_path / "q.gguf")["deepseek2.attention.layer_norm_rms_epsilon"] == pytest.approx(epsilon)
        assert ("in the norms of the latents" in caplog.text) == (epsilon == 1e-5)


def _yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**KIMI_YARN, **changes}}


@pytest.mark.parametrize("settings, words", [
    ({"hidden_act": "gelu"}, "deepseek2 cannot state hidden_act"),
    ({"rope_interleave": False}, "deepseek2 cannot state order of rotary pairs, from rope_interleave"),
    (_yarn(mscale_all_dim=0.4), "deepseek2 cannot state scale of YaRN, from rope_parameters.mscale, "),
    (_yarn(attention_factor=1.0, mscale_all_dim=0.0), "deepseek2 cannot state .*yarn without mscale_all_dim"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
     "deepseek2 cannot state rope_type 'llama3'")])
def test_settings_that_files_cannot_express(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    quantisedfiles.save_as(tmp_path / "m", "deepseek2", settings, "deepseek-v3")
    with pytest.raises(mpool.Unsupported, match=words):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
