"""Complete embedding models, compared with sentence-transformers: tokenizer, prompts, network, pooling, dense layers.

The models are small and have seeded random weights; their folders have the layout of the published models.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import encodermodels
import tinygguf
import tinymodels
from paritymodels import randomise, torch, transformers

SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer

TEXTS = ["A cat sat on the mat.", "Numbers 0 1 2 3", "The quick brown fox jumps over the lazy dog. " * 6, "日本語 äöü"]
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": "", "s2s": "Instruct: the same\nQuery: "}

_QWEN2 = (r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
          r"""|\s+(?!\S)|\s+""")


@pytest.fixture(scope="module")
def pool():
    with mpool.Pool() as made:
        yield made


def _byte_level(folder: Path) -> int:
    """Write a tokenizer like that of Qwen3-Embedding, and return its vocabulary size.

    It is a byte-level BPE that appends the end-of-text token to every text, although ``add_eos_token`` is missing.
    """
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    tinymodels._decoder_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # transformers uses these for the family, even if tokenizer.json states others
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
                                                       pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "model_max_length": 64}))
    return tokenizer.get_vocab_size()


def _decoder(folder: Path, name: str, **extra: Any) -> Path:
    vocab = _byte_level(folder)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=100,
        max_position_embeddings=64, num_hidden_layers=2, **extra)
    model = getattr(transformers, f"{name}Model")(config).eval()
    randomise(model, 3)
    model.save_pretrained(folder)
    return folder


def _same(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * max(1, np.abs(expected).max())


def test_qwen3_embedding(pool: mpool.Pool, tmp_path: Path) -> None:
    folder = _decoder(tmp_path / "qwen3", "Qwen3", head_dim=16)
    encodermodels.write_modules(folder, "lasttoken", prompts=PROMPTS, default_prompt_name=None,
                                similarity_fn_name="cosine")
    theirs = SentenceTransformer(str(folder))
    _same(pool.embed(TEXTS, str(folder), compute="float32"), theirs.encode(TEXTS))
    _same(pool.embed(TEXTS, str(folder), task="query", compute="float32"), theirs.encode(TEXTS, prompt_name="query"))
    _same(pool.embed(TEXTS, str(folder), prompt_name="s2s", compute="float32"), theirs.encode(TEXTS, prompt_name="s2s"))
    assert pool.get(str(folder)).capability == "text_embedding"


def test_stella_sizes(pool: mpool.Pool, tmp_path: Path) -> None:
    """Bidirectional Qwen2 with one dense layer for each output size; modules.json names one of them."""
    folder = _decoder(tmp_path / "stella", "Qwen2", is_causal=False)
    torch.manual_seed(4)
    layers = {size: torch.nn.Linear(48, size) for size in (16, 8, 100)}
    encodermodels.write_modules(folder, "mean", {f"2_Dense_{size}": layer for size, layer in layers.items()},
                                prompts=PROMPTS)
    modules = json.loads((folder / "modules.json").read_text())
    kept = [module for module in modules if module["path"] not in ("2_Dense_8", "2_Dense_100", "9_Normalize")]
    (folder / "modules.json").write_text(json.dumps([{**module, "idx": at} for at, module in enumerate(kept)]))
    theirs = SentenceTransformer(str(folder))
    expected = theirs.encode(TEXTS, prompt_name="s2s")
    model = pool.get(str(folder))
    assert model.dimensions == 16 and model.description.embedding.sizes == (8, 100)
    _same(pool.embed(TEXTS, model, prompt_name="s2s", compute="float32"), expected)
    pooled = torch.tensor(SentenceTransformer(modules=[theirs[0], theirs[1]]).encode(TEXTS, prompt=PROMPTS["s2s"]))
    for size, layer in layers.items():
        with torch.no_grad():
            rows = layer(pooled).numpy()
        found = pool.embed(TEXTS, model, prompt_name="s2s", dimensions=size, compute="float32")
        assert found.shape == (len(TEXTS), size)
        _same(found, rows)
        unit = pool.embed(TEXTS[0], model, prompt_name="s2s", dimensions=size, normalize=True, compute="float32")
        assert abs(np.linalg.norm(unit) - 1) < 1e-6
    for wrong in (12, 101, 48):
        with pytest.raises(mpool.InvalidArgument, match=f"`dimensions` must be one of 8, 16, 100, got {wrong}"):
            pool.embed(TEXTS, model, dimensions=wrong)
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as other:
        assert np.array_equal(other.embed(TEXTS, str(folder), dimensions=100),
                              pool.embed(TEXTS, str(folder), dimensions=100))


def test_dense_folder_with_another_output_size_is_refused(tmp_path: Path) -> None:
    folder = _decoder(tmp_path / "stella", "Qwen2", is_causal=False)
    layers = {"2_Dense_16": torch.nn.Linear(48, 16), "2_Dense_8": torch.nn.Linear(48, 9)}
    encodermodels.write_modules(folder, "mean", layers)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([module for module in modules if module["idx"] < 3]))
    with mpool.Pool() as pool, pytest.raises(mpool.errors.FormatError, match="9 outputs"):
        pool.embed("A text.", str(folder))


def test_xlm_roberta(pool: mpool.Pool, tmp_path: Path) -> None:
    """The architecture of multilingual-e5 and bge-m3: a Unigram tokenizer; positions start after the padding id."""
    vocab = tinymodels.unigram(tmp_path)
    model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(
        vocab_size=vocab, hidden_size=48, num_attention_heads=3, intermediate_size=100, num_hidden_layers=2,
        max_position_embeddings=66, pad_token_id=1, type_vocab_size=1)).eval()
    randomise(model, 8)
    model.save_pretrained(tmp_path)
    encodermodels.write_modules(tmp_path, "cls")
    _same(pool.embed(TEXTS, str(tmp_path), compute="float32"), SentenceTransformer(str(tmp_path)).encode(TEXTS))


def _gemma(folder: Path) -> tuple[Any, dict[str, Any]]:
    vocab = tinymodels.unigram(folder)
    config = transformers.Gemma3TextConfig(
        vocab_size=vocab, hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        intermediate_size=100, max_position_embeddings=64, num_hidden_layers=7, sliding_window=16,
        query_pre_attn_scalar=16, use_bidirectional_attention=True, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model = transformers.Gemma3TextModel(config).eval()
    randomise(model, 8)
    model.save_pretrained(folder)
    torch.manual_seed(9)
    layers = {"2_Dense": torch.nn.Linear(48, 96, bias=False), "3_Dense": torch.nn.Linear(96, 48, bias=False)}
    encodermodels.write_modules(folder, "mean", layers, prompts={"query": "task: search result | query: "})
    return model, layers


def test_embedding_gemma(pool: mpool.Pool, tmp_path: Path) -> None:
    """Gemma 3 with bidirectional attention and two dense layers, and truncation to fewer components."""
    _gemma(tmp_path)
    theirs = SentenceTransformer(str(tmp_path))
    _same(pool.embed(TEXTS, str(tmp_path), task="query", compute="float32"),
          theirs.encode(TEXTS, prompt_name="query"))
    expected = SentenceTransformer(str(tmp_path), truncate_dim=16).encode(TEXTS, normalize_embeddings=True)
    _same(pool.embed(TEXTS, str(tmp_path), dimensions=16, compute="float32"), expected)


def test_nv_embed(pool: mpool.Pool, tmp_path: Path) -> None:
    """The end-of-text token is appended, and the mean excludes the instruction.

    A worker process, which receives the packed products of the latents, computes the same embeddings.
    """
    encoder = encodermodels.ENCODERS["nv_embed"]
    model = encodermodels.built("nv_embed", 2)
    folder = encoder.write(model, tmp_path / "nv")
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0", "eos_token": "w1"}))
    text, prompt = "w9 w10 w11", "w20 w21 "
    with torch.no_grad():
        plain, prompted = model(torch.tensor([[9, 10, 11, 1]]))[0], model(torch.tensor([[20, 21, 9, 10, 11, 1]]))[0]
        expected = [torch.nn.functional.normalize(rows.mean(0), dim=0).numpy() for rows in (plain, prompted[2:])]
    _same(pool.embed(text, str(folder), compute="float32"), expected[0])
    _same(pool.embed(text, str(folder), prompt=prompt, compute="float32"), expected[1])
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as other:
        assert np.array_equal(other.embed(text, str(folder)), pool.embed(text, str(folder)))


@pytest.mark.parametrize("dense", [True, False])
def test_gguf_of_embedding_gemma(pool: mpool.Pool, tmp_path: Path, dense: bool) -> None:
    """GGUF files as llama.cpp's converter writes them: norm weights include the added 1; dense layers are optional."""
    model, layers = _gemma(tmp_path)
    ids = np.random.default_rng(3).integers(5, model.config.vocab_size, 60)
    path = str(tinygguf.write_gemma(tmp_path / "m.gguf", model, layers if dense else {}))
    found = pool.get(path)
    assert found.description.embedding.output_size == 48
    key = found._entry.core_key("float32")
    rows = pool.registry.embed(key, ids.astype(np.int32), np.array([0, 60]))
    with torch.no_grad():
        pooled = model(torch.tensor(ids[None])).last_hidden_state[0].mean(0)
        for layer in layers.values() if dense else ():
            pooled = layer(pooled)
        _same(rows[0], torch.nn.functional.normalize(pooled, dim=0).numpy())


def test_ollamas_gguf_of_embedding_gemma(tmp_path: Path) -> None:
    """Ollama's file has the architecture gemma3. Its description is equal to that of llama.cpp's file."""
    from mpool.models.formats import gguf_model, gguf_tables, ollama_gguf

    model, layers = _gemma(tmp_path)
    path = tinygguf.write_gemma(tmp_path / "m.gguf", model, layers)
    raw, tensors, files = gguf_tables.read_gguf(str(path))
    plain = gguf_model.describe_tables(raw, tensors, files, key="k", ref="r")
    stored_names = {"dense_2.weight": "dense.0.weight", "dense_3.weight": "dense.1.weight",
                    "output_norm.weight": "norm.weight"}
    kv = {key.replace("gemma-embedding.", "gemma3."): value for key, value in raw.items()}
    kv |= {"general.architecture": "gemma3", "gemma3.rope.global.freq_base": kv.pop("gemma3.rope.freq_base"),
           "gemma3.rope.local.freq_base": 10000.0, "gemma3.attention.sliding_window_pattern": [True, False],
           "tokenizer.ggml.tokens": [*kv["tokenizer.ggml.tokens"], "<image_soft_token>"]}
    for key in ("scores", "token_type"):
        kv[f"tokenizer.ggml.{key}"] = [*kv[f"tokenizer.ggml.{key}"], 1]
    moved = tuple(replace(entry, name=stored_names.get(entry.name, entry.name)) for entry in tensors)
    found = gguf_model.describe_tables(*ollama_gguf.translated(kv, moved), files, key="k", ref="r")
    assert found.spec.tensors == plain.spec.tensors and found.embedding == plain.embedding
    assert found.spec.architecture == "gemma_embedding" and found.spec.kv["mpool.dense_count"] == 2
    for key, value in plain.spec.kv.items():
        assert found.spec.kv[key] == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Lfm2"])
def test_gguf_of_a_decoder(pool: mpool.Pool, tmp_path: Path, name: str) -> None:
    """A GGUF file with a pooling type is an embedding model; without one it is a language model."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=157, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        max_position_embeddings=64, num_hidden_layers=2, eos_token_id=1, tie_word_embeddings=True,
        **({"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False} if name == "Lfm2" else {}))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    randomise(model, 5)
    model.tie_weights()
    path = str(tinygguf.write(tmp_path / "m.gguf", model, pooling=3))
    found = pool.get(path)
    assert found.capability == "text_embedding" and found.description.embedding.pooling == ("lasttoken",)
    ids = np.random.default_rng(3).integers(2, 157, 40)
    key = found._entry.core_key("float32")
    ticket = pool.registry.submit_embed(key, ids.astype(np.int32), np.array([0, 40]), outputs=2)
    ticket.wait()
    rows = ticket.states()
    with torch.no_grad():
        _same(rows, model.model(torch.tensor(ids[None])).last_hidden_state[0].numpy())
    assert pool.get(str(tinygguf.write(tmp_path / "t.gguf", model))).capability == "text_to_text"


@pytest.mark.parametrize("layers, dtype, default", [(13, "float32", "float32"), (12, "float32", "auto"),
                                                    (13, "bfloat16", "auto")])
def test_default_compute_type_of_deep_networks(tmp_path: Path, layers: int, dtype: str, default: str) -> None:
    """A pre-norm encoder with more than 12 layers and float32 weights is computed in float32 by default."""
    model = encodermodels.modern_bert(layers).to(getattr(torch, dtype))
    folder = encodermodels.ENCODERS["modern_bert"].write(model, tmp_path / "deep")
    with mpool.Pool() as pool:
        found, exact, half = (pool.embed("w9 w10 w11", str(folder), compute=compute)
                              for compute in ("auto", "float32", "bfloat16"))
        computes = {row["key"]: row["facts"]["compute"] for row in pool.registry.entries()}
    if default == "float32":
        assert np.array_equal(found, exact) and "bfloat16" not in computes[str(folder)]
    else:
        assert np.array_equal(found, half) or np.array_equal(found, exact)
    assert not np.array_equal(exact, half)
