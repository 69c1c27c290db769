"""Every layer of every family against transformers, in float32, on seeded checkpoints with random norms and biases.

A checkpoint is cut after each number of layers, so that what is compared is the state after each of them. Decoders get
the identity as their output matrix: their logits are then the normed hidden states themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mpool

from corelib import greedy, logits, token_vectors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS = 3
TOLERANCE = 1e-4


def _randomise(model: object, seed: int) -> None:
    """Random norms and biases too: ones and zeros would hide a missing one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = (1 + 0.3 * noise) if "norm" in name.lower() and name.endswith("weight") else 0.3 * noise
        else:
            parameter.data = noise * (0.5 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5)


def _tokenizer(folder: Path, vocab: int) -> None:
    """Any valid tokenizer of the right size; these tests give ids."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))


def _cut(config: object, layers: int) -> object:
    config = type(config).from_dict({**config.to_dict(), "num_hidden_layers": layers})
    return config


# ---- BERT ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory):
    config = transformers.BertConfig(vocab_size=211, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=3,
                                     intermediate_size=100, max_position_embeddings=70, hidden_act="gelu",
                                     layer_norm_eps=1e-6)
    full = transformers.BertModel(config, add_pooling_layer=False).eval()
    _randomise(full, 1)
    folders = []
    for layers in range(1, LAYERS + 1):
        folder = tmp_path_factory.mktemp(f"bert{layers}")
        part = transformers.BertModel(_cut(config, layers), add_pooling_layer=False).eval()
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        part.save_pretrained(folder)
        _tokenizer(folder, 211)
        folders.append(folder)
    return full, folders


@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_bert_layers(bert, layers: int) -> None:
    full, folders = bert
    generator = np.random.default_rng(5)
    texts = [generator.integers(0, 211, n).tolist() for n in (1, 2, 17, 64, 70)]
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(folders[layers - 1]), texts)
    for ids, vectors in zip(texts, got):
        with torch.no_grad():
            states = full(torch.tensor([ids]), output_hidden_states=True).hidden_states
        assert np.abs(vectors - states[layers][0].numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("act", ["gelu_new", "relu", "silu"])
def test_bert_activations(tmp_path: Path, act: str) -> None:
    config = transformers.BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=64, max_position_embeddings=32, hidden_act=act)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    _randomise(model, 2)
    model.save_pretrained(tmp_path)
    _tokenizer(tmp_path, 97)
    ids = [list(range(3, 30))]
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(tmp_path), ids)[0]
    with torch.no_grad():
        expected = model(torch.tensor(ids)).last_hidden_state[0].numpy()
    assert np.abs(got - expected).max() <= TOLERANCE


# ---- decoders ------------------------------------------------------------------------------------------------------

DECODERS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_rope3": ("LlamaConfig", "LlamaForCausalLM",
                    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": 64}}),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM",
                     {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
}


def _decoder(family: str, layers: int, hidden: int = 96, vocab: int = 96, tie: bool = False):
    config_class, model_class, extra = DECODERS[family]
    config = getattr(transformers, config_class)(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=144, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=400, tie_word_embeddings=tie, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, rms_norm_eps=1e-5, **extra)
    return getattr(transformers, model_class)(config).eval()


@pytest.fixture(scope="module", params=list(DECODERS))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    full = _decoder(request.param, LAYERS)
    _randomise(full, 3)
    full.lm_head.weight.data = torch.eye(96)
    folders, parts = [], []
    for layers in range(1, LAYERS + 1):
        folder = tmp_path_factory.mktemp(f"{request.param}{layers}")
        part = _decoder(request.param, layers)
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        part.save_pretrained(folder)
        _tokenizer(folder, 96)
        folders.append(folder)
        parts.append(part)
    return parts, folders


@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_decoder_layers(decoder, layers: int) -> None:
    parts, folders = decoder
    tokens = np.random.default_rng(6).integers(0, 96, 203)
    with mpool.Pool() as pool:
        got = logits(pool, str(folders[layers - 1]), tokens, "float32")
    with torch.no_grad():
        expected = parts[layers - 1](torch.tensor(tokens[None])).logits[0].numpy()
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tie", [False, True])
def test_decoder_logits_and_greedy(tmp_path: Path, family: str, tie: bool) -> None:
    model = _decoder(family, 2, vocab=157, tie=tie)
    _randomise(model, 4)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    _tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(7).integers(2, 157, 50)
    with mpool.Pool() as pool:
        got = logits(pool, str(tmp_path), tokens, "float32")
        answer = greedy(pool, str(tmp_path), tokens, 24, "float32")
    with torch.no_grad():
        ids = torch.tensor(tokens[None])
        assert np.abs(got - model(ids).logits[0].numpy()).max() <= TOLERANCE
        for token in answer:  # barred ends: 1 is never drawn
            row = model(ids).logits[0, -1].clone()
            row[1] = -torch.inf
            assert int(row.argmax()) == int(token)
            ids = torch.cat([ids, torch.tensor([[int(token)]])], dim=1)


def test_bfloat16_class_is_near(tmp_path: Path) -> None:
    model = _decoder("llama", 2, vocab=157)
    _randomise(model, 8)
    model.save_pretrained(tmp_path)
    _tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(9).integers(2, 157, 40)
    with mpool.Pool() as pool:
        exact, near = (logits(pool, str(tmp_path), tokens, compute) for compute in ("float32", "bfloat16"))
    cosine = (exact * near).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(near, axis=1)
    assert 0.999 <= cosine.min() and not np.array_equal(exact, near)
