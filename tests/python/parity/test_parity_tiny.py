"""Every layer of BERT and of every decoder compared with transformers in float32, on seeded checkpoints with random
norms and biases.

There is a checkpoint for each number of layers, so that the state after each layer is compared. The output matrix of
decoders is the identity, so that their logits are the normalised hidden states.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import mpool

from mpool.models.catalogue import state_bytes
from mpool.models.describing import describe

import float64
import paritymodels
from corelib import greedy, logits, token_vectors
from paritymodels import DECODERS, randomise, torch, transformers, write_tokenizer
from rounding import check_bfloat16, deviations, stable_tokens

LAYERS = 3
TOLERANCE = 1e-4
#: Decoders of archs.def. Each needs a model of the same name in DECODERS.
ARCHITECTURES = [name for name, capability in mpool._core.architectures() if capability == "text_to_text"]


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

def test_layers_of_every_kind_are_compared() -> None:
    """The models of a class have layers of all kinds that its default pattern has. If the pattern is longer than
    LAYERS, the class needs a further model, in LAYER_TYPES."""
    usual: dict[str, set[str]] = {}
    compared: dict[str, set[str]] = {}
    for name, (config, _, _) in DECODERS.items():
        with torch.device("meta"):
            made = paritymodels.decoder(name, LAYERS).config
        kinds = getattr(paritymodels.find_class(config)(num_hidden_layers=24), "layer_types", None) or ()
        usual[config] = set(kinds)
        compared.setdefault(config, set()).update(getattr(made, "layer_types", None) or ())
    assert {name for name, kinds in usual.items() if not kinds <= compared[name]} == set()


@pytest.mark.sample(3)
@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
@pytest.mark.parametrize("family", DECODERS)
def test_decoder_layers(tmp_path: Path, family: str, layers: int) -> None:
    model = paritymodels.decoder(family, layers)
    randomise(model, 3)
    model.lm_head.weight.data = torch.eye(96)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    tokens = np.random.default_rng(6).integers(0, 96, 203)
    with mpool.Pool() as pool:
        got = logits(pool, str(tmp_path), tokens, "float32")
        state = pool.ps()[0].facts["sequence_state_bytes"]
    assert state_bytes(describe(tmp_path)) == state  # the estimate before the load
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen35", "qwen3next"])
def test_delta_rule_row_by_row(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes the delta rule in chunks. In float64, its logits equal those of the rule row by row."""
    model = paritymodels.decoder(family, 2)
    randomise(model, 8)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    tokens = np.random.default_rng(6).integers(0, 96, 150)
    with mpool.Pool() as pool:
        got = logits(pool, str(tmp_path), tokens, "float32")
    chunked = float64.decoder_logits(model, tokens)
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule", float64.delta_rule)
    expected = float64.decoder_logits(model, tokens)
    assert 0 < np.abs(chunked - expected).max() <= 1e-9
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", [*ARCHITECTURES, "llama_mistral", "deepseek2_kimi", "deepseek2_lite", "phi3_long"])
@pytest.mark.parametrize("tie", [False, True])
def test_decoder_logits_and_greedy(tmp_path: Path, family: str, tie: bool) -> None:
    if tie and family == "gpt_oss":
        pytest.skip("published models are never tied")
    model = paritymodels.decoder(family, 2, vocab=157, tie=tie)
    randomise(model, 4)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(7).integers(2, 157, 50)
    with mpool.Pool() as pool:
        got = logits(pool, str(tmp_path), tokens, "float32")
        generated = greedy(pool, str(tmp_path), tokens, 24, "float32")
    with torch.no_grad():
        ids, first, end = torch.tensor([[*tokens, *generated]]), len(tokens), len(tokens) + 24
        assert len(generated) == 24
        assert np.abs(got - model(ids[:, :first]).logits[0].numpy()).max() <= TOLERANCE
        # The factors of phi3_long depend on the length of the text, so each token needs a pass of its own.
        rows = torch.cat([model(ids[:, :at]).logits[0, -1:] for at in range(first, end)]) if family == "phi3_long" \
            else model(ids[:, :-1]).logits[0, first - 1:]
        rows[:, 1] = -torch.inf  # end tokens are not sampled
        assert rows.argmax(1).tolist() == [*map(int, generated)]


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    model = paritymodels.decoder("lfm2moe", 2, vocab=157)
    randomise(model, 4)
    model.save_pretrained(tmp_path, save_original_format=False)
    write_tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(7).integers(2, 157, 30)
    with mpool.Pool() as pool, torch.no_grad():
        assert np.abs(logits(pool, str(tmp_path), tokens, "float32")
                      - model(torch.tensor([tokens])).logits[0].numpy()).max() <= TOLERANCE


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", [*ARCHITECTURES, "llama_mistral", "phi3_long", "llama_biased", "llama_heads2",
                                    "llama_heads12", "llama_heads100", "qwen3_biased", "qwen3moe_dense"])
def test_bfloat16_is_near_float32(tmp_path: Path, family: str) -> None:
    model = paritymodels.decoder(family, 2, vocab=157)
    randomise(model, 8)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 157)
    tokens = stable_tokens(model, 40, 157, 9)
    with mpool.Pool() as pool:
        check_bfloat16(logits(pool, str(tmp_path), tokens, "bfloat16"), model, tokens)


def multiplies_bfloat16() -> bool:
    """Return True if mpool uses bfloat16 products on this CPU."""
    return mpool.show_config("dicts")["cpu"]["level"] in ("avx512bf16", "amx", "bf16")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_floats_choose_the_compute_type(tmp_path: Path, stored: str) -> None:
    """Stored bfloat16 is computed in bfloat16 if the CPU supports it, everything else in float32, with equal bits."""
    model = paritymodels.decoder("llama", 2, vocab=157)
    randomise(model, 15)
    model.to(getattr(torch, stored)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 157)
    tokens = np.random.default_rng(18).integers(2, 157, 70)
    same = "bfloat16" if stored == "bfloat16" and multiplies_bfloat16() else "float32"
    with mpool.Pool() as pool:
        auto, named = (logits(pool, str(tmp_path), tokens, compute) for compute in ("auto", same))
    np.testing.assert_array_equal(auto, named)


# ---- GPT-OSS -------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@pytest.mark.parametrize("stored", ["mxfp4", "bfloat16", "float16"])
def test_gpt_oss_in_published_formats(tmp_path: Path, stored: str) -> None:
    """Experts are stored as MXFP4 codes and scales, as OpenAI publishes them, or transposed in half precision."""
    model = paritymodels.decoder("gpt_oss", 2, vocab=157)
    randomise(model, 14)
    if stored == "mxfp4":
        paritymodels.save_mxfp4(model, tmp_path)
    else:
        half = copy.deepcopy(model).to(getattr(torch, stored))
        half.save_pretrained(tmp_path)
        model.load_state_dict(half.state_dict())  # only parameters: the rotary frequencies do not change
    write_tokenizer(tmp_path, 157)
    tokens = stable_tokens(model, 70, 157, 17)
    with mpool.Pool() as pool:
        exact, near = (logits(pool, str(tmp_path), tokens, compute) for compute in ("float32", "auto"))
        generated = greedy(pool, str(tmp_path), tokens[:50], 16, "float32")
        # MXFP4, and bfloat16 if the CPU supports it, are computed in their stored type, which is a separate entry.
        as_stored = stored == "mxfp4" or (stored == "bfloat16" and multiplies_bfloat16())
        assert {row.compute for row in pool.ps()} == ({"float32", "stored"} if as_stored else {"float32"})
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
        assert np.abs(exact - expected).max() <= TOLERANCE
        context = np.concatenate([tokens[:50], generated])
        rows = model(torch.tensor(context[None])).logits[0, 49:-1].numpy().copy()
    rows[:, 1] = -np.inf
    assert rows.argmax(axis=1).tolist() == generated.tolist()
    assert deviations(near, expected).max() <= 1e-3  # three times the largest that was measured


@pytest.mark.parametrize("family", ["gpt_oss_clamp", "gpt_oss_limit"])
def test_gpt_oss_fixtures_reach_the_clamp(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates exceed the limit upwards (downwards they are not clamped), and up projections in both directions. Each part
    of the clamp changes logits by far more than the tolerance."""
    model = paritymodels.decoder(family, LAYERS)
    randomise(model, 3)
    ids, limit = torch.tensor(np.random.default_rng(6).integers(0, 96, 203)[None]), model.config.swiglu_limit
    experts = type(model.model.layers[0].mlp.experts)

    def run(gate_limit: float, low: float, high: float) -> np.ndarray:
        def gated(self, gate_up):
            gate, up = gate_up[..., ::2].clamp(max=gate_limit), gate_up[..., 1::2].clamp(low, high)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)

        monkeypatch.setattr(experts, "_apply_gate", gated)
        with torch.no_grad():
            return model(ids).logits[0].numpy()

    exact = run(limit, -limit, limit)
    for parts in ((np.inf, -limit, limit), (limit, -np.inf, limit), (limit, -limit, np.inf)):
        assert np.abs(run(*parts) - exact).max() > 100 * TOLERANCE


def test_inconsistent_gpt_oss_folders_are_refused(tmp_path: Path) -> None:
    model = paritymodels.decoder("gpt_oss", 1, vocab=157)
    paritymodels.save_mxfp4(model, tmp_path)
    write_tokenizer(tmp_path, 157)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, error, words in (
            ({"quantization_config": None}, mpool.errors.FormatError, "gate_up_proj"),
            ({"quantization_config": {"quant_method": "fp8"}}, mpool.Unsupported, "mxfp4"),
            ({"intermediate_size": 161}, mpool.errors.FormatError, "multiple of 32"),
            ({"swiglu_alpha": 1.5}, mpool.Unsupported, "swiglu_alpha"),
            ({"attention_bias": False}, mpool.Unsupported, "attention_bias"),
            ({"num_local_experts": 4}, mpool.errors.FormatError, "shape of model.layers.0.mlp.")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with mpool.Pool() as pool, pytest.raises(error, match=words):
            pool.load(str(tmp_path))
