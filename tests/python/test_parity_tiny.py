"""Every layer of every family against transformers, in float32, on seeded checkpoints with random norms and biases.

A checkpoint is cut after each number of layers, so that what is compared is the state after each of them. Decoders get
the identity as their output matrix: their logits are then the normed hidden states themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpool

import paritymodels
from corelib import greedy, logits, token_vectors
from paritymodels import DECODERS, FILES_ONLY, randomise, torch, transformers, write_tokenizer

LAYERS = 3
TOLERANCE = 1e-4


# ---- BERT ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory):
    full = paritymodels.bert(LAYERS)
    randomise(full, 1)
    folders = []
    for layers in range(1, LAYERS + 1):
        folder = tmp_path_factory.mktemp(f"bert{layers}")
        part = paritymodels.bert(layers)
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        part.save_pretrained(folder)
        write_tokenizer(folder, 211)
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
    randomise(model, 2)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 97)
    ids = [list(range(3, 30))]
    with mpool.Pool() as pool:
        got = token_vectors(pool, str(tmp_path), ids)[0]
    with torch.no_grad():
        expected = model(torch.tensor(ids)).last_hidden_state[0].numpy()
    assert np.abs(got - expected).max() <= TOLERANCE


# ---- decoders ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=[name for name in DECODERS if name not in FILES_ONLY])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    full = paritymodels.decoder(request.param, LAYERS)
    randomise(full, 3)
    full.lm_head.weight.data = torch.eye(96)
    folders, parts = [], []
    for layers in range(1, LAYERS + 1):
        folder = tmp_path_factory.mktemp(f"{request.param}{layers}")
        part = paritymodels.decoder(request.param, layers)
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        part.save_pretrained(folder)
        write_tokenizer(folder, 96)
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


@pytest.mark.parametrize("family", ["llama", "llama_mistral", "qwen2", "qwen3", "qwen3moe", "smollm3", "granite",
                                    "phi3_long", "gemma2", "gemma3"])
@pytest.mark.parametrize("tie", [False, True])
def test_decoder_logits_and_greedy(tmp_path: Path, family: str, tie: bool) -> None:
    model = paritymodels.decoder(family, 2, vocab=157, tie=tie)
    randomise(model, 4)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 157)
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


@pytest.mark.parametrize("family", ["llama", "llama_mistral", "qwen3", "qwen3moe", "smollm3", "granite", "phi3_long",
                                    "gemma2", "gemma3"])
def test_bfloat16_class_is_near(tmp_path: Path, family: str) -> None:
    model = paritymodels.decoder(family, 2, vocab=157)
    randomise(model, 8)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(9).integers(2, 157, 40)
    with mpool.Pool() as pool:
        exact, near = (logits(pool, str(tmp_path), tokens, compute) for compute in ("float32", "bfloat16"))
    cosine = (exact * near).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(near, axis=1)
    # where experts are chosen, a choice may flip
    assert 0.999 <= (np.median(cosine) if "moe" in family else cosine.min()) and not np.array_equal(exact, near)
