"""Makes the goldens of encoders that neither transformers nor sentence-transformers has: results of other public code.

The models are the seeded ones of tests/python/helpers/encodermodels.py with LAYERS layers, so no weights are needed.
For each text of TEXTS the goldens hold the last hidden states of each token; for NV-Embed also one pooled embedding.

| command | model | implementation | repository on GitHub | commit |
|---|---|---|---|---|
| contrastors | nomic_bert_moe | that of the model's authors | nomic-ai/contrastors | 613ddfd37309 |
| jina | jina_bert_v2 | fork of Jina AI's modeling_bert.py | veya2ztn/sci-bert-finetune | 09cc4c7e14d1 |
| tei | jina_bert_v2_code | its Python backend | huggingface/text-embeddings-inference | 0d124dc9773b |
| nv_embed | nv_embed | fork of NVIDIA's modeling_nvembed.py | abhaybd/NV-Embed-v2_fixed | 8b8cb489e947 |
| llama | GGUF files of the first three | llama.cpp, as built by llama-cpp-python 0.3.36 | | |

The fork of Jina's file adds options (flash attention, scaled ALiBi) that are off here. The fork of NVIDIA's file adapts
it to transformers 4.48 and turns the KV cache off; that code is licensed for non-commercial use.

Replaced, because it needs a GPU or a server:

- in contrastors, flash-attention's attention and rotary embedding by torch (``_stub_flash_attention``), and megablocks
  by contrastors' own ``MoEBlock``, which has linear layers per expert;
- in text-embeddings-inference, the server around the network. Its dropout layers stay in training mode, so their rate
  is set to 0;
- in NVIDIA's file, the tokenizer and ``datasets``.

Run by hand. CHECKOUT is a working tree of the repository:

    python make_encoder_goldens.py models FOLDER                  # torch, transformers, gguf
    python make_encoder_goldens.py contrastors FOLDER CHECKOUT    # torch, transformers 4.49, einops
    python make_encoder_goldens.py llama FOLDER                   # llama-cpp-python

``models`` writes the models, and the other commands complete encoders.npz beside this file.
"""

import contextlib
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "helpers"))

from filehash import file_hash  # noqa: E402

GOLDENS = Path(__file__).with_name("encoders.npz")
LAYERS = 3
#: Commands and the models that they compute.
PUBLIC = {"contrastors": "nomic_bert_moe", "jina": "jina_bert_v2", "tei": "jina_bert_v2_code", "nv_embed": "nv_embed"}
GGUF = ("nomic_bert_moe", "jina_bert_v2", "jina_bert_v2_code")
TEXTS = [np.random.default_rng(n).integers(5, 211, n).tolist() for n in (1, 2, 17, 96)]
#: A text for NV-Embed's pooling, which leaves out its first INSTRUCTION tokens.
POOLED, INSTRUCTION = [20, 21, 9, 10, 11, 1], 2


def folder_hash(folder: Path) -> np.ndarray:
    """Return the SHA-256 of the names and values of a folder's tensors, uint8 (32,)."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode() + str(tensor.shape).encode() + tensor.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def write_gguf(path: Path, name: str) -> Path:
    """Write a model as a GGUF file that llama.cpp reads as the public code of the model does. Returns the path.

    llama.cpp takes the first half of a fused gated layer as the gate, in jina_bert_v2_code that is the second half. The
    halves are therefore two tensors, as in files of older converters.
    """
    import encodermodels
    import tinygguf

    return tinygguf.write_encoder(path, name, tinygguf.without_dropped(encodermodels.built(name, LAYERS)), fused=False)


def models(folder: Path) -> None:
    """Write the models: FOLDER/NAME for safetensors, FOLDER/NAME.gguf."""
    import encodermodels

    for name in PUBLIC.values():
        encodermodels.ENCODERS[name].write(encodermodels.built(name, LAYERS), folder / name)
    for name in GGUF:
        write_gguf(folder / f"{name}.gguf", name)


# ---- replacements of modules ---------------------------------------------------------------------------------------

def _unused(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this function of a replaced module is not used")


def _stub(name: str, **members: Any) -> None:
    """Replace a module. Members that are not given raise an error when they are called."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(members, __getattr__=lambda member: _unused)
    sys.modules[name] = module


def _package(name: str, folder: Path, **members: Any) -> None:
    """Make the modules of a package importable without its ``__init__.py``."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} does not exist")
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__dict__.update(members)
    sys.modules[name] = module


def _stub_flash_attention() -> None:
    """Replace the functions of flash-attention that contrastors needs by torch."""
    import torch

    class RotaryEmbedding(torch.nn.Module):
        def __init__(self, dim: float, base: float, scale_base: None, interleaved: bool) -> None:
            super().__init__()
            assert scale_base is None and not interleaved
            self.inverse = base ** -(torch.arange(0, dim, 2) / dim)
            self.scale, self.interleaved = None, False

        def _update_cos_sin_cache(self, count: int, **_: Any) -> None:
            angles = torch.outer(torch.arange(count), self.inverse)
            self._cos_cached, self._sin_cached = angles.cos(), angles.sin()

    def rotate(qkv: Any, cos: Any, sin: Any, **_: Any) -> Any:
        """Rotate queries and keys of (batch, rows, 3, heads, size): pairs are one half of a head apart."""
        left, right = qkv[:, :, :2].chunk(2, -1)
        cos, sin = cos[:, None, None], sin[:, None, None]
        turned = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
        return torch.cat([turned, qkv[:, :, 2:]], 2)

    def attend(qkv: Any, softmax_scale: Any, causal: bool, **_: Any) -> Any:
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=float(softmax_scale))
        return mixed.transpose(1, 2)

    _stub("flash_attn", flash_attn_qkvpacked_func=attend)
    for name in ("bert_padding", "ops", "ops.activations", "ops.fused_dense", "ops.layer_norm", "layers", "losses",
                 "losses.cross_entropy"):
        _stub(f"flash_attn.{name}")
    _stub("flash_attn.ops.rms_norm", RMSNorm=type("RMSNorm", (torch.nn.Module,), {}))
    _stub("flash_attn.layers.rotary", RotaryEmbedding=RotaryEmbedding, apply_rotary_emb_qkv_=rotate)


# ---- implementations: functions of token ids -----------------------------------------------------------------------

def contrastors(folder: Path, checkout: Path) -> Callable[[Any], Any]:
    """Load nomic_bert_moe in contrastors."""
    from safetensors.torch import load_file

    _stub_flash_attention()
    for name in ("megablocks", "megablocks.layers", "megablocks.layers.arguments", "torchvision", "torchvision.ops"):
        _stub(name)
    source = checkout / "src" / "contrastors"
    for name in ("", ".models", ".models.encoder"):
        _package(f"contrastors{name}", source / name.replace(".", "/").strip("/"))
    module = importlib.import_module("contrastors.models.encoder.modeling_nomic_bert")
    config = module.NomicBertConfig(**{
        **json.loads((folder / "config.json").read_text()), "moe_impl": "contrastors", "fused_bias_fc": False,
        "fused_dropout_add_ln": False, "embd_pdrop": 0.0, "pad_vocab_size_multiple": 1})
    config.top_k = config.moe_top_k
    model = module.NomicBertModel(config, add_pooling_layer=False).eval()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        at, _, part = name.partition("mlp.experts.mlp.w")
        if part:  # megablocks: rows of all experts, w1 from the input and w2 to the output
            for expert, rows in enumerate(tensor.view(config.num_experts, config.n_inner, config.n_embd)):
                tensors[f"{at}mlp.experts.{expert}.fc{part}.weight"] = rows if part == "1" else rows.T
                size = config.n_inner if part == "1" else config.n_embd
                tensors[f"{at}mlp.experts.{expert}.fc{part}.bias"] = tensor.new_zeros(size)
        else:
            name = name.replace("mlp.router.layer.", "mlp.router.router.")
            tensors[name.replace("mlp.experts.bias", "mlp.bias")] = tensor
    model.load_state_dict(tensors)
    return lambda ids: model(ids).last_hidden_state


def jina(folder: Path, checkout: Path) -> Callable[[Any], Any]:
    """Load jina_bert_v2 in Jina AI's implementation."""
    from safetensors.torch import load_file

    _package("jinabert", checkout / "models" / "jinabert")
    module = importlib.import_module("jinabert.modeling_bert")
    config = module.JinaBertConfig(**{**json.loads((folder / "config.json").read_text()), "emb_pooler": None})
    model = module.JinaBertModel(config, add_pooling_layer=False).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return lambda ids: model(ids).last_hidden_state


def tei(folder: Path, checkout: Path) -> Callable[[Any], Any]:
    """Load jina_bert_v2_code in the Python backend of text-embeddings-inference."""
    import torch
    from safetensors import safe_open

    tracer = types.SimpleNamespace(start_as_current_span=lambda name: lambda function: function)
    _stub("opentelemetry", trace=types.SimpleNamespace(get_tracer=lambda name: tracer))
    name = "text_embeddings_server"
    _package(name, checkout / "backends/python/server" / name)
    _package(f"{name}.models", checkout / "backends/python/server" / name / "models", Model=object)
    for part in ("pooling", "types"):
        _stub(f"{name}.models.{part}")
    module = importlib.import_module(f"{name}.models.jinaBert_model")
    config = module.JinaBertConfig(**{**json.loads((folder / "config.json").read_text()), "hidden_dropout_prob": 0.0})
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        model = module.FlashJinaBertModel(file, torch.device("cpu"), torch.float32, config)
    return lambda ids: model.forward(ids, torch.zeros_like(ids), None, ids.shape[1])


def nv_embed(folder: Path, checkout: Path) -> Callable[..., Any]:
    """Load nv_embed in NVIDIA's implementation. With ``mask`` the function pools the tokens of the mask."""
    import torch
    from safetensors.torch import load_file

    _stub("datasets")
    _package("nv_embed_v2", checkout / "nv_embed_v2")
    torch.backends.cuda.sdp_kernel = lambda **_: contextlib.nullcontext()  # torch removed it; it chooses a GPU kernel
    module = importlib.import_module("nv_embed_v2.modeling_nvembed")
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda path: types.SimpleNamespace(eos_token=""))
    model = module.NVEmbedModel(module.NVEmbedConfig(**json.loads((folder / "config.json").read_text()))).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return lambda ids, mask=None: model(ids, torch.ones_like(ids), mask)["sentence_embeddings"]


def public(command: str, folder: Path, checkout: Path) -> dict[str, np.ndarray]:
    """Return the goldens of a public implementation in torch."""
    import torch
    import transformers.modeling_utils  # noqa: F401 - it asks for packages, before they are replaced

    name = PUBLIC[command]
    run = {"contrastors": contrastors, "jina": jina, "tei": tei, "nv_embed": nv_embed}[command](folder / name, checkout)
    with torch.no_grad():
        rows = np.concatenate([run(torch.tensor([ids]))[0].numpy() for ids in TEXTS])
        found = {f"{name}.hash": folder_hash(folder / name), f"{name}.rows": rows}
        if command == "nv_embed":
            mask = (torch.arange(len(POOLED)) >= INSTRUCTION)[None].long()
            found[f"{name}.pooled"] = run(torch.tensor([POOLED]), mask)[0].numpy()
    return found


def llama(folder: Path) -> dict[str, np.ndarray]:
    """Return the goldens of llama.cpp for GGUF files."""
    import llama_cpp

    found = {}
    for name in GGUF:
        path = folder / f"{name}.gguf"
        model = llama_cpp.Llama(str(path), n_ctx=128, n_batch=128, n_ubatch=128, n_threads=1, embedding=True,
                                pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE, flash_attn=False, verbose=False)
        rows = []
        for ids in TEXTS:
            model._batch.reset()
            model._batch.add_sequence(ids, 0, True)
            model._ctx.decode(model._batch)
            pointer = llama_cpp.llama_get_embeddings(model._ctx.ctx)
            rows.append(np.ctypeslib.as_array(pointer, (len(ids), model.n_embd())).copy())
        found |= {f"{name}.gguf.hash": file_hash(path), f"{name}.gguf.rows": np.concatenate(rows)}
    return found


def main(command: str, folder: Path, checkout: Path) -> None:
    """Run a command of the table above."""
    if command == "models":
        return models(folder)
    found = llama(folder) if command == "llama" else public(command, folder, checkout)
    for name, values in found.items():
        if not name.endswith("hash"):
            print(f"{name}: {values.shape}, largest {np.abs(values).max():.3f}")
    np.savez_compressed(GOLDENS, **{**(dict(np.load(GOLDENS)) if GOLDENS.exists() else {}), **found})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) > 3 else "."))
