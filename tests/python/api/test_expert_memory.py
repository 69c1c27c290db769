"""Models whose experts are larger than the memory of the pool: they load, and ``ps`` says where the experts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.cli import main

MEMORY = 80 << 20  # bytes, of which 64 MiB are predicted for an engine


BASE: dict[str, Any] = {
    "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 400, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_theta": 10000.0, "attention_bias": False, "eos_token_id": 1, "bos_token_id": 0}


def save(folder: Path, hidden: int, ffn: int, experts: int) -> Path:
    """Save a Qwen3 or, with experts, a Qwen3-MoE with random weights in float32."""
    numpy = pytest.importorskip("safetensors.numpy")
    tokenizers = pytest.importorskip("tokenizers")
    random = np.random.default_rng(5)
    config = {**BASE, "hidden_size": hidden, "intermediate_size": ffn, "model_type": "qwen3",
              "architectures": ["Qwen3ForCausalLM"]}
    if experts:
        config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts,
                   "num_experts_per_tok": 2, "moe_intermediate_size": ffn, "norm_topk_prob": True}
    tensors: dict[str, Any] = {}
    values = random.standard_normal(50021, dtype=np.float32) * np.float32(0.05)

    def add(name: str, *shape: int) -> None:
        tensors[name] = np.ones(shape, np.float32)
        if len(shape) > 1:
            start = int(random.integers(0, 1000))  # the rows repeat after a prime number of values, which is faster
            tensors[name] = np.resize(values[start:], shape)

    add("model.embed_tokens.weight", 96, hidden)
    add("lm_head.weight", 96, hidden)
    add("model.norm.weight", hidden)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 128)):
            add(f"{at}self_attn.{name}_proj.weight", rows, columns)
        for name, n in (("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.q_norm", 32),
                        ("self_attn.k_norm", 32)):
            add(f"{at}{name}.weight", n)
        if experts:
            add(f"{at}mlp.gate.weight", experts, hidden)
        for part in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
                add(f"{at}{part}.{name}_proj.weight", rows, columns)
    numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save an MoE with 100 MB of experts, and a dense model of the same size."""
    return {"moe": save(tmp_path_factory.mktemp("moe"), 256, 512, 32),
            "dense": save(tmp_path_factory.mktemp("dense"), 512, 8192, 0)}


def answers(pool: mpool.Pool, folder: Path) -> list[str]:
    prompts = ["w5 w9 w31", " ".join(f"w{i * 7 % 90 + 2}" for i in range(60))]
    return [pool.generate(prompt, str(folder), max_tokens=6, temperature=0, ignore_eos=True).text for prompt in prompts]


def test_experts_larger_than_memory_are_served_from_the_file(folders: dict[str, Path]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        expected = answers(pool, folders["moe"])
        row, = pool.ps()
        assert row.facts["expert_bytes"] == 2 * 32 * 3 * 256 * 512 * 4
        assert row.experts == "packing" and 0 < row.facts["expert_packed_bytes"] < row.model_bytes
        assert "101 MB of experts packing" in repr(pool.ps())
    with mpool.Pool(mpool.PoolConfig(threads=1, memory_bytes=MEMORY)) as pool:
        assert answers(pool, folders["moe"]) == expected
        row, = pool.ps()
        stats = pool.registry.stats()
        assert row.facts["expert_bytes"] > stats["memory_limit"] == MEMORY
        assert stats["memory_used"] <= stats["memory_limit"]
        assert row.experts in ("mapped", "packing")
        assert row.facts["expert_packed_bytes"] <= stats["memory_limit"] * 2 // 3
        assert not row.thrashing  # the file is in the page cache
    with mpool.Pool(mpool.PoolConfig(threads=1, memory_bytes=MEMORY, weights="mapped")) as pool:
        assert answers(pool, folders["moe"]) == expected
        row, = pool.ps()
        assert (row.weights, row.experts, row.facts["expert_packed_bytes"]) == ("mapped", "mapped", 0)
        assert "mapped, 101 MB of experts mapped" in repr(pool.ps())


def test_worker_processes_read_experts_from_the_file(folders: dict[str, Path]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        expected = answers(pool, folders["moe"])
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation="process")) as pool:
        assert answers(pool, folders["moe"]) == expected
        row, = pool.ps()
        assert (row.experts, row.facts["expert_packed_bytes"]) == ("mapped", 0)
        assert row.model_bytes < row.facts["expert_bytes"]


def test_show_states_the_experts_of_the_files(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, experts in (("moe", 2 * 32 * 3 * 256 * 512 * 4), ("dense", None)):
        assert main(["show", str(folders[name]), "--json"]) == 0
        assert json.loads(capsys.readouterr().out).get("expert_bytes") == experts
    assert main(["show", str(folders["moe"])]) == 0
    assert "101 MB" in capsys.readouterr().out


def test_a_dense_model_larger_than_memory_is_refused(folders: dict[str, Path]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, memory_bytes=MEMORY)) as pool:
        with pytest.raises(mpool.MemoryExhausted, match=r"needs \d\d\d\.\d MB, but the memory limit is 83\.9 MB"):
            answers(pool, folders["dense"])
        assert pool.load(str(folders["dense"]), weights="mapped")  # its pages belong to the page cache
        row, = pool.ps()
        assert (row.weights, row.experts, row.thrashing) == ("mapped", None, False)
