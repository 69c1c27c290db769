"""GGUF files of seeded models compared with the transformers models that they were written from, in float32.

Folders contain queries and keys in their trained order, GGUF files in the order of their family's converter. Only GGUF
files can therefore show that the core rotates the right pairs of these.
"""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import paritymodels
import tinygguf
from corelib import greedy, logits, token_vectors
from encodermodels import ENCODERS, VOCAB, built
from filehash import file_hash
from paritymodels import DECODERS, FOLDERS_ONLY, randomise, torch, transformers
from rounding import deviations, stable_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "encoder"))

import make_encoder_goldens as encoder_goldens  # noqa: E402

TOLERANCE = 1e-4
#: Tolerance of encoders with GELU against llama.cpp, relative to the largest value; the largest difference is 1.6e-3.
NEAR_GELU = 2e-3
TOKENS = np.random.default_rng(31).integers(2, 157, 131)


def _expected(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*(name for name in DECODERS if name not in FOLDERS_ONLY), "llama_tied"])
def test_decoder(tmp_path: Path, name: str) -> None:
    path = str(tinygguf.write(tmp_path / "m.gguf", tinygguf.model(name)))
    with mpool.Pool() as pool:
        got = logits(pool, path, TOKENS, "float32")
        generated = greedy(pool, path, TOKENS[:9], 12, "float32")
    assert np.abs(got - _expected(tinygguf.model(name), TOKENS)).max() <= TOLERANCE
    context = np.concatenate([TOKENS[:9], generated])
    rows = _expected(tinygguf.model(name), context)[8:-1].copy()
    rows[:, 1] = -np.inf  # the end token is not sampled
    assert rows.argmax(axis=1).tolist() == generated.tolist()


@pytest.mark.parametrize("name", ["deepseek2", "deepseek2_lite"])
def test_latents_in_one_tensor_or_two(tmp_path: Path, name: str) -> None:
    """Older files have one tensor for keys and values, newer files two."""
    path = str(tinygguf.write(tmp_path / "m.gguf", tinygguf.model(name), halves=False))
    with mpool.Pool() as pool:
        got = logits(pool, path, TOKENS, "float32")
    assert np.abs(got - _expected(tinygguf.model(name), TOKENS)).max() <= TOLERANCE


GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "decoder" / "tiny.npz"


#: SHOWN: positions of the goldens. OTHERWISE: those at which llama.cpp differs from transformers, the reference of the
#: tests above. llama.cpp rounds the corners of YaRN's ramp even if the model says not to, has no window for Phi-3, and
#: scores DeepSeek-V2's groups of experts by their two best experts, as for V3.
SHOWN, OTHERWISE = (0, 7, 40, 130), {"gpt_oss": (7, 40, 130), "phi3": (130,), "deepseek2_v2": (7, 40, 130)}
#: Tolerances of models with GELU, for which llama.cpp uses a half-precision table. The scores of Gemma 4's attention,
#: which have no scale, magnify the difference.
NEAR = {"gemma2": 1e-3, "gemma3": 1e-3, "gemma4": 2e-3, "gemma4_keys": 0.015, "gemma4_experts": 0.015}
#: Models whose greedy tokens differ for these reasons, or because llama.cpp chooses LongRoPE's long factors by the size
#: of its context and not by the length of the text.
OTHER_TEXT = ("gpt_oss", "phi3_long", "deepseek2_v2")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(name.removesuffix(".hash") for name in np.load(GOLDENS) if ".hash" in name))
def test_decoder_against_llama_cpp(tmp_path: Path, name: str) -> None:
    """Logits and 16 greedy tokens match those of llama.cpp for the same bytes (``make_tiny_goldens.py``)."""
    path = tinygguf.write(tmp_path / "m.gguf", tinygguf.model(name))
    with np.load(GOLDENS) as goldens:
        known, expected, tokens = (goldens[f"{name}.{part}"] for part in ("hash", "logits", "greedy"))
    assert np.array_equal(file_hash(path), known), "the file changed: regenerate the goldens"
    with mpool.Pool() as pool:
        got = logits(pool, str(path), TOKENS, "float32")[list(SHOWN)]
        generated = greedy(pool, str(path), TOKENS[:9], 16, "float32")
    alike = [position not in OTHERWISE.get(name, ()) for position in SHOWN]
    assert np.abs(got - expected)[alike].max() <= NEAR.get(name, 1e-5) * np.abs(expected).max()
    assert name in OTHER_TEXT or generated.tolist() == tokens.tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("type_name", ["MXFP4", "Q8_0"])
@pytest.mark.parametrize("name", ["gpt_oss"])
def test_experts_quantised(tmp_path: Path, name: str, type_name: str) -> None:
    """GPT-OSS is published in MXFP4. The reference has the same rounded weights."""
    kind = tinygguf.gguf.GGMLQuantizationType[type_name]
    model = copy.deepcopy(tinygguf.model(name))
    for parameter_name, parameter in model.named_parameters():
        if ".experts." in parameter_name and parameter.dim() == 3:
            stored = parameter.data.transpose(1, 2).contiguous().numpy()
            rounded = tinygguf.gguf.quants.dequantize(tinygguf.gguf.quants.quantize(stored, kind), kind)
            parameter.data = torch.tensor(rounded).transpose(1, 2).contiguous()
    path = str(tinygguf.write(tmp_path / "m.gguf", model, experts=kind))
    tokens = stable_tokens(model, 60, 157, 31)
    with mpool.Pool() as pool:
        exact, near = (logits(pool, path, tokens, compute) for compute in ("float32", "auto"))
    expected = _expected(model, tokens)
    assert np.abs(exact - expected).max() <= TOLERANCE
    assert deviations(near, expected).max() <= 1e-3  # three times the largest that was measured
    assert not np.array_equal(exact, near)


@pytest.mark.parametrize(("family", "kinds"), [
    ("qwen35moe", ["linear_attention", "full_attention", "full_attention"]),
    ("nemotron_h_latent", ["full_attention", "linear_attention", "moe", "moe"])])
def test_layers_for_drafts_are_read_over(tmp_path: Path, family: str, kinds: list[str]) -> None:
    """Files of Qwen3.5 and Nemotron 3 end with a layer for drafts. Those of Qwen3.5 may state only every how many
    layers one has attention."""
    whole, model = (paritymodels.decoder(family, layers, layer_types=kinds[:layers])
                    for layers in (len(kinds), len(kinds) - 1))
    randomise(whole, 12)
    model.load_state_dict({name: value for name, value in whole.state_dict().items() if name in model.state_dict()})
    path = str(tinygguf.write(tmp_path / "m.gguf", whole, drafts=1))
    tokens = TOKENS % 96
    with mpool.Pool() as pool:
        got = logits(pool, path, tokens, "float32")
    assert np.abs(got - _expected(model, tokens)).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt_oss"])
def test_order_of_rotary_pairs_matters(tmp_path: Path, name: str) -> None:
    """The wrong order of queries and keys gives other logits, so the comparison above detects it."""
    path = str(tinygguf.write(tmp_path / "m.gguf", tinygguf.model(name), adjacent=name != "llama"))
    with mpool.Pool() as pool:
        got = logits(pool, path, TOKENS, "float32")
    assert np.abs(got - _expected(tinygguf.model(name), TOKENS)).max() > 100 * TOLERANCE


def test_bert(tmp_path: Path) -> None:
    path = str(tinygguf.write(tmp_path / "m.gguf", tinygguf.model("bert")))
    texts = [np.random.default_rng(n).integers(0, 211, n).tolist() for n in (1, 2, 17, 64, 70)]
    with mpool.Pool() as pool:
        got = token_vectors(pool, path, texts)
    for ids, vectors in zip(texts, got):
        with torch.no_grad():
            expected = tinygguf.model("bert")(torch.tensor([ids])).last_hidden_state[0].numpy()
        assert np.abs(vectors - expected).max() <= TOLERANCE


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, each", [*((name, False) for name in tinygguf.ENCODERS), ("modern_bert", True)])
def test_encoder(tmp_path: Path, name: str, each: bool) -> None:
    model, encoder = tinygguf.without_dropped(built(name, 3)), ENCODERS[name]
    path = str(tinygguf.write_encoder(tmp_path / "m.gguf", name, model, each=each))
    texts = [np.random.default_rng(n).integers(5, VOCAB, n).tolist() for n in (1, 17, encoder.longest)]
    with mpool.Pool() as pool:
        got = token_vectors(pool, path, texts)
    for ids, vectors in zip(texts, got):
        expected = encoder.expected(model, ids)
        assert np.abs(vectors - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", encoder_goldens.GGUF)
def test_encoder_against_llama_cpp(tmp_path: Path, name: str) -> None:
    """The hidden states match those of llama.cpp for the same bytes (``make_encoder_goldens.py``). Its GELU is the
    approximation with tanh, from a half-precision table."""
    path = encoder_goldens.write_gguf(tmp_path / "m.gguf", name)
    with np.load(encoder_goldens.GOLDENS) as goldens:
        known, expected = (goldens[f"{name}.gguf.{part}"] for part in ("hash", "rows"))
    assert np.array_equal(file_hash(path), known), "the file changed: regenerate the goldens"
    with mpool.Pool() as pool:
        got = np.concatenate(token_vectors(pool, str(path), encoder_goldens.TEXTS))
    assert np.abs(got - expected).max() <= NEAR_GELU * np.abs(expected).max()


@pytest.mark.parametrize("name, kind", [("nomic_bert_published", "Q8_0"), ("nomic_bert_published", "Q4_0"),
                                        ("modern_bert", "Q8_0")])
def test_quantised_encoder(tmp_path: Path, name: str, kind: str) -> None:
    """Parts of fused tensors are also read in their stored type. The reference has the dequantised values."""
    import gguf

    type_ = getattr(gguf.GGMLQuantizationType, kind)
    make = {"nomic_bert_published": transformers.NomicBertModel, "modern_bert": transformers.ModernBertModel}[name]
    config = built(name, 2).config
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 64, 4, 96
    config.head_dim = 16
    model = make(config).eval()
    randomise(model, 4)
    path = str(tinygguf.write_encoder(tmp_path / "m.gguf", name, model, type_))
    for key, tensor in model.state_dict().items():
        if tensor.dim() == 2 and "layers." in key:
            stored = gguf.quants.quantize(tensor.numpy(), type_)
            tensor.copy_(torch.tensor(gguf.quants.dequantize(stored, type_).reshape(tensor.shape)))
    ids = np.random.default_rng(3).integers(5, VOCAB, 60).tolist()
    with mpool.Pool() as pool:
        got = token_vectors(pool, path, [ids])[0]
    expected = ENCODERS[name].expected(model, ids)
    assert np.abs(got - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.sample(4)
@pytest.mark.parametrize("tensor", ["output_norm.weight", "token_embd.weight"])
@pytest.mark.parametrize("kind", [24, 25, 26, 27, 28], ids=["I8", "I16", "I32", "I64", "F64"])
def test_tensors_of_types_that_are_no_weights_are_refused(tmp_path: Path, tensor: str, kind: int) -> None:
    """Such a file once ended the process: these types have no reader. It is read by a process of its own."""
    path = tinygguf.write(tmp_path / "m.gguf", tinygguf.model("llama"))
    data = bytearray(path.read_bytes())
    at = data.index(tensor.encode()) + len(tensor)
    at += 4 + 8 * int.from_bytes(data[at:at + 4], "little")
    data[at:at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)
    program = "import mpool, sys\ntry: mpool.generate([1, 2], sys.argv[1], max_tokens=1)\n" \
              "except mpool.MpoolError as error: print(type(error).__name__)"
    run = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() in ("Unsupported", "FormatError"), (run.returncode, run.stderr)
