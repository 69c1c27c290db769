"""Seeded encoders for parity tests, named after rows of archs.def. If transformers has the family, its model is used;
otherwise (the original is code in a model repository) a plain torch model written from the paper and configuration.
``test_encoder_against_public_code`` compares these with recorded results of public code."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paritymodels import randomise, torch, transformers, write_tokenizer

VOCAB = 211
#: Sizes that most of the small models share: odd sizes, three heads of 16.
SIZES: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=48, num_attention_heads=3, intermediate_size=100)


@dataclass
class Encoder:
    """Functions that create and save the models of a family, and the family's limits.

    Attributes:
        make: creates a model with a given number of layers.
        longest: maximum length of a text in tokens.
        published: returns the tensors under the names of the published files.
        save: saves a model to a folder.
        pooling: pooling of the saved sentence-transformers modules; "" = no modules.
        states: returns the last hidden states, (1, tokens, hidden).
    """

    make: Callable[[int], Any]
    longest: int
    published: Callable[[Any], dict[str, Any]] = lambda model: model.state_dict()
    save: Callable[[Any, Path], None] = lambda model, folder: model.save_pretrained(folder)
    pooling: str = ""
    states: Callable[[Any, Any], Any] = lambda model, ids: model(ids).last_hidden_state

    def write(self, model: Any, folder: Path) -> Path:
        """Save a model with a tokenizer. Returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(model, folder)
        write_tokenizer(folder, VOCAB)
        if self.pooling:
            write_modules(folder, self.pooling)
        return folder

    def expected(self, model: Any, ids: list[int]) -> Any:
        """Return the last hidden states of a text, (tokens, hidden)."""
        with torch.no_grad():
            return self.states(model, torch.tensor([ids]))[0].numpy()


def write_modules(folder: Path, pooling: str, dense: dict[str, Any] | None = None, **settings: Any) -> None:
    """Write sentence-transformers modules around a network: pooling, dense layers, normalisation.

    Args:
        dense: folder name -> torch layer.
        settings: fields of config_sentence_transformers.json.
    """
    safetensors = pytest.importorskip("safetensors.torch")
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    modules = ["", "1_Pooling", *(dense or {}), "9_Normalize"]
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense or {}), "Normalize"]
    (folder / "modules.json").write_text(json.dumps([
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(zip(modules, kinds))]))
    for path in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(
        {"word_embedding_dimension": hidden, "pooling_mode": pooling}))
    for path, layer in (dense or {}).items():
        safetensors.save_file({f"linear.{name}": value.detach().clone() for name, value in layer.state_dict().items()},
                              str(folder / path / "model.safetensors"))
        (folder / path / "config.json").write_text(json.dumps({
            "in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None,
            "activation_function": "torch.nn.modules.linear.Identity"}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def save_tensors(tensors: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Write a model folder with the tensor names and configuration of the family's published files."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
                          str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _renamed(state: dict[str, Any], names: list[tuple[str, str]]) -> dict[str, Any]:
    renamed = {}
    for name, tensor in state.items():
        for new, old in names:
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


def _fuse(state: dict[str, Any], parts: tuple[str, ...], whole: str) -> dict[str, Any]:
    """Concatenate the rows of tensors whose names differ only in ``parts``."""
    out = dict(state)
    for name in state:
        if parts[0] in name:
            out[name.replace(parts[0], whole)] = torch.cat([out.pop(name.replace(parts[0], part)) for part in parts])
    return out


# ---- BERT and its relatives, MPNet, ModernBERT -----------------------------------------------------------------------

def roberta(layers: int, **more: Any) -> Any:
    config = transformers.RobertaConfig(**{**SIZES, **more}, num_hidden_layers=layers, max_position_embeddings=75,
                                        pad_token_id=4, type_vocab_size=1, layer_norm_eps=1e-6)
    return transformers.RobertaModel(config, add_pooling_layer=False).eval()


def xlm_roberta(layers: int, positions: int = 72) -> Any:
    config = transformers.XLMRobertaConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=positions,
                                           pad_token_id=1, type_vocab_size=1)
    return transformers.XLMRobertaModel(config, add_pooling_layer=False).eval()


def distilbert(layers: int, **more: Any) -> Any:
    config = transformers.DistilBertConfig(**{**dict(vocab_size=VOCAB, dim=48, n_heads=3, hidden_dim=100,
                                                     n_layers=layers, max_position_embeddings=70), **more})
    return transformers.DistilBertModel(config).eval()


def electra(layers: int, size: int = 20) -> Any:
    """Create an ELECTRA with embeddings of ``size`` components."""
    config = transformers.ElectraConfig(**SIZES, num_hidden_layers=layers, embedding_size=size,
                                        max_position_embeddings=70, layer_norm_eps=1e-6)
    return transformers.ElectraModel(config).eval()


def albert(layers: int, size: int = 20, groups: int = 2, inner: int = 1, **more: Any) -> Any:
    """Create an ALBERT with ``layers`` layers in up to ``groups`` groups of ``inner`` layers."""
    config = transformers.AlbertConfig(**{**SIZES, "num_hidden_layers": layers, "embedding_size": size,
                                          "num_hidden_groups": min(groups, layers), "inner_group_num": inner,
                                          "max_position_embeddings": 70, "layer_norm_eps": 1e-6, **more})
    return transformers.AlbertModel(config, add_pooling_layer=False).eval()


def mpnet(layers: int) -> Any:
    """Create an MPNet for texts beyond 128 tokens, the distance at which the last relative-position bucket begins."""
    config = transformers.MPNetConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=262)
    return transformers.MPNetModel(config, add_pooling_layer=False).eval()


def deberta(layers: int, **more: Any) -> Any:
    """Create a DeBERTa v3 with 8 buckets per direction and texts of up to 150 tokens; the last bucket begins at 60."""
    config = transformers.DebertaV2Config(**{
        **SIZES, "num_hidden_layers": layers, "max_position_embeddings": 150, "relative_attention": True,
        "max_relative_positions": 60, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0, **more})
    return transformers.DebertaV2Model(config).eval()


def modern_bert(layers: int, **extra: Any) -> Any:
    """Create a ModernBERT with windows of 16 tokens and texts of up to 120."""
    config = transformers.ModernBertConfig(
        **{**SIZES, "num_hidden_layers": layers, "max_position_embeddings": 120, "local_attention": 16,
           "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "cls_token_id": 1, "sep_token_id": 2, **extra})
    return transformers.ModernBertModel(config).eval()


def save_old_modern_bert(model: Any, folder: Path) -> None:
    """Save with the configuration format of the first published files."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types")
    config |= {"global_attn_every_n_layers": 2, "global_rope_theta": rope["full_attention"]["rope_theta"],
               "local_rope_theta": rope["sliding_attention"]["rope_theta"], "reference_compile": None,
               "layer_norm_eps": config["norm_eps"], "position_embedding_type": "absolute"}
    (folder / "config.json").write_text(json.dumps(config))


# ---- Nomic ---------------------------------------------------------------------------------------------------------

def nomic_bert(layers: int) -> Any:
    config = transformers.NomicBertConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=96)
    return transformers.NomicBertModel(config).eval()


def published_nomic(model: Any) -> dict[str, Any]:
    """Return the tensors under the names of nomic-embed-text-v1.5."""
    state = _fuse(model.state_dict(), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn.Wqkv")
    return _renamed(state, [("layers.", "encoder.layers."), ("embeddings.LayerNorm", "emb_ln"),
                            ("self_attn.o_proj", "attn.out_proj"), ("up_proj", "fc11"), ("gate_proj", "fc12"),
                            ("down_proj", "fc2"), ("post_attention_layernorm", "norm1"),
                            ("post_mlp_layernorm", "norm2")])


def save_nomic(model: Any, folder: Path) -> None:
    """Save in the layout of nomic-embed-text-v1.5."""
    config = model.config
    save_tensors(published_nomic(model), {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0, "eos_token_id": None,
        "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
        "layer_norm_epsilon": config.layer_norm_eps, "max_trained_positions": 96, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads, "n_inner": config.intermediate_size, "n_layer": config.num_hidden_layers,
        "n_positions": 384, "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False,
        "prenorm": False, "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0,
        "rotary_emb_base": config.rope_parameters["rope_theta"], "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": 2, "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.0,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32",
        "type_vocab_size": 2, "use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True,
        "vocab_size": config.vocab_size}, folder)


class NomicMoe(torch.nn.Module):
    """nomic-embed-text-v2-moe, after arXiv:2502.07972 and the published configuration and tensors.

    NomicBERT's layers with biases and without a gate. The feed-forward sublayer of every second layer is MoE: the top
    two experts of each token, weighted by their softmax probabilities over all experts, plus one shared bias.
    """

    epsilon, base = 1e-5, 10000.0

    def __init__(self, layers: int, experts: int = 5) -> None:
        super().__init__()
        nn, D, F = torch.nn, 48, 100
        self.layers, self.experts, self.heads = layers, experts, 3
        parts: dict[str, Any] = {"embeddings.word_embeddings": nn.Embedding(VOCAB, D), "emb_ln": nn.LayerNorm(D),
                                 "embeddings.token_type_embeddings": nn.Embedding(1, D)}
        for i in range(layers):
            at = f"encoder.layers.{i}."
            parts |= {f"{at}attn.Wqkv": nn.Linear(D, 3 * D), f"{at}attn.out_proj": nn.Linear(D, D),
                      f"{at}norm1": nn.LayerNorm(D), f"{at}norm2": nn.LayerNorm(D)}
            if i % 2 == 0:
                parts |= {f"{at}mlp.fc1": nn.Linear(D, F), f"{at}mlp.fc2": nn.Linear(F, D)}
            else:  # w1 and w2 are stored as Linear layers: the rows of all experts, one expert after the other
                parts |= {f"{at}mlp.router.layer": nn.Linear(D, experts, bias=False),
                          f"{at}mlp.experts.mlp.w1": nn.Linear(D, experts * F, bias=False),
                          f"{at}mlp.experts.mlp.w2": nn.Linear(D, experts * F, bias=False),
                          f"{at}mlp.experts": nn.LayerNorm(D)}  # only its bias is used
        self.part = parts
        for name, module in parts.items():
            self.add_module(name.replace(".", "/"), module)

    def rotate(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] / self.base ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def moe(self, at: str, x: Any) -> Any:
        gelu, D = torch.nn.functional.gelu, x.shape[-1]
        shares = self.part[f"{at}mlp.router.layer"](x).softmax(-1)
        w1, w2 = (self.part[f"{at}mlp.experts.mlp.{name}"].weight.view(self.experts, -1, D) for name in ("w1", "w2"))
        out = torch.zeros_like(x)
        for row, share in enumerate(shares[0]):
            for expert in share.topk(2).indices:
                out[0, row] += share[expert] * (gelu(w1[expert] @ x[0, row]) @ w2[expert])
        return out + self.part[f"{at}mlp.experts"].bias

    def forward(self, ids: Any) -> Any:
        part = self.part
        x = part["embeddings.word_embeddings"](ids) + part["embeddings.token_type_embeddings"](torch.zeros_like(ids))
        x = part["emb_ln"](x)
        for i in range(self.layers):
            at = f"encoder.layers.{i}."
            q, k, v = (y.view(1, -1, self.heads, 16).transpose(1, 2) for y in part[f"{at}attn.Wqkv"](x).chunk(3, -1))
            scores = self.rotate(q) @ self.rotate(k).transpose(2, 3) / math.sqrt(16)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
            x = part[f"{at}norm1"](x + part[f"{at}attn.out_proj"](mixed))
            y = self.moe(at, x) if i % 2 else \
                part[f"{at}mlp.fc2"](torch.nn.functional.gelu(part[f"{at}mlp.fc1"](x)))
            x = part[f"{at}norm2"](x + y)
        return x

    def published(self) -> dict[str, Any]:
        """Return the tensors under the names of the published files."""
        names = {name.replace("/", "."): tensor for name, tensor in self.state_dict().items()}
        return {name.replace(".mlp.w1.weight", ".mlp.w1").replace(".mlp.w2.weight", ".mlp.w2"): tensor
                for name, tensor in names.items() if not name.endswith("mlp.experts.weight")}


def save_nomic_moe(model: NomicMoe, folder: Path) -> None:
    save_tensors(model.published(), {
        "activation_function": "gelu", "add_pooling_layer": False, "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0, "auto_map": {"AutoConfig": "nomic-ai/nomic-bert-2048--configuration.NomicBertConfig",
                                        "AutoModel": "nomic-ai/nomic-bert-2048--modeling.NomicBertModel"},
        "causal": False, "dense_seq_output": True, "embd_pdrop": 0.1, "expert_choice_router": False, "ffn_div": 1,
        "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
        "layer_norm_epsilon": model.epsilon,
        "max_trained_positions": 2048, "mlp_checkpoint_lvl": 0, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
        "model_type": "nomic_bert", "moe_every_n_layers": 2, "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "moe_top_k": 2, "n_embd": 48,
        "n_head": model.heads, "n_inner": 100, "n_layer": model.layers, "n_positions": 96,
        "num_experts": model.experts, "num_shared_experts": 0, "pad_token_id": 1, "pad_vocab_size_multiple": 64,
        "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": True,
        "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": model.base, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "router_aux_loss_coef": 0.1, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32", "type_vocab_size": 1,
        "use_cache": True, "use_flash_attn": True, "use_rms_norm": None, "use_xentropy": True, "vocab_size": VOCAB},
        folder)


# ---- GTE -----------------------------------------------------------------------------------------------------------

def gte(layers: int, **extra: Any) -> Any:
    config = transformers.GteConfig(**{**SIZES, "num_hidden_layers": layers, "max_position_embeddings": 96,
                                       "pad_token_id": 0, **extra})
    return transformers.GteModel(config).eval()


def ntk_gte(layers: int) -> Any:
    """Create a GTE with the published code's NTK scaling of the rotation by 2, which transformers lacks."""
    model = gte(layers, type_vocab_size=0)
    dim = 16
    base = 500.0 * 2
    model.rotary_emb.inv_freq.data = 1 / base ** (torch.arange(0, dim, 2).float() / dim) / 2 ** (2 / dim)
    return model


def save_gte(model: Any, folder: Path, **more: Any) -> None:
    """Save in the layout of gte-large-en-v1.5, but for the keys ``more`` of the configuration."""
    state = _fuse(model.state_dict(), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                  "attention.qkv_proj")
    state = _fuse(state, ("mlp.up_proj", "mlp.gate_proj"), "mlp.up_gate_proj")
    state = _renamed(state, [("layers.", "encoder.layer."), ("self_attn.o_proj", "attention.o_proj"),
                             ("post_attention_layernorm", "attn_ln"), ("post_mlp_layernorm", "mlp_ln")])
    config = model.config
    save_tensors({f"new.{name}": tensor for name, tensor in state.items()}, {
        "architectures": ["NewModel"], "attention_probs_dropout_prob": 0.0,
        "auto_map": {"AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel"},
        "classifier_dropout": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": config.hidden_size, "initializer_range": 0.02, "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.layer_norm_eps, "layer_norm_type": "layer_norm", "logn_attention_clip1": False,
        "logn_attention_scale": False, "max_position_embeddings": config.max_position_embeddings, "model_type": "new",
        "num_attention_heads": config.num_attention_heads, "num_hidden_layers": config.num_hidden_layers,
        "pack_qkv": True, "pad_token_id": 0, "position_embedding_type": "rope",
        "rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 500, "torch_dtype": "float32",
        "type_vocab_size": config.type_vocab_size, "unpad_inputs": False, "use_memory_efficient_attention": False,
        "vocab_size": config.vocab_size, **more}, folder)


def save_arctic(model: Any, folder: Path) -> None:
    """Save in the layout of snowflake-arctic-embed-m-v2.0: the published code's names with the model type ``gte``."""
    save_gte(model, folder, model_type="gte", architectures=["GteModel"], rope_scaling=None,
             rope_theta=model.config.rope_parameters["rope_theta"],
             auto_map={"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}, unpad_inputs="true")
    tensors = pytest.importorskip("safetensors.torch").load_file(folder / "model.safetensors")
    pytest.importorskip("safetensors.torch").save_file(
        {name.removeprefix("new."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors",
        metadata={"format": "pt"})


# ---- JinaBERT v2 ---------------------------------------------------------------------------------------------------

class JinaBert(torch.nn.Module):
    """JinaBERT v2, after arXiv:2310.19923 and the configuration of jina-embeddings-v2-base-en.

    Post-norm BERT layers with a GeGLU. ALiBi (arXiv:2108.12409) in both directions: each head's slope times the
    distance is subtracted from the scores.
    """

    epsilon = 1e-12

    def __init__(self, layers: int, heads: int = 6) -> None:
        super().__init__()
        nn, D, F = torch.nn, 48, 100
        self.heads, self.layers = heads, layers
        names = {"embeddings.word_embeddings": nn.Embedding(VOCAB, D),
                 "embeddings.token_type_embeddings": nn.Embedding(2, D), "embeddings.LayerNorm": nn.LayerNorm(D, 1e-12)}
        for i in range(layers):
            at = f"encoder.layer.{i}."
            names |= {f"{at}attention.self.{which}": nn.Linear(D, D) for which in ("query", "key", "value")}
            names |= {f"{at}attention.output.dense": nn.Linear(D, D),
                      f"{at}attention.output.LayerNorm": nn.LayerNorm(D, 1e-12),
                      f"{at}mlp.gated_layers": nn.Linear(D, 2 * F, bias=False), f"{at}mlp.wo": nn.Linear(F, D),
                      f"{at}mlp.layernorm": nn.LayerNorm(D, 1e-12)}
        self.part = names
        for name, module in names.items():
            self.add_module(name.replace(".", "/"), module)

    def slopes(self) -> list[float]:
        """Return the slope of each head as the paper defines it.

        The heads up to a power of two form a geometric sequence. Further heads use every other slope of the sequence
        for the next power of two.
        """
        def powers(n: int) -> list[float]:
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start ** i for i in range(n)]

        near = 2 ** math.floor(math.log2(self.heads))
        return powers(near) + powers(2 * near)[0::2][:self.heads - near]

    def project(self, which: str, at: str, x: Any) -> Any:
        return self.part[f"{at}attention.self.{which}"](x)

    def attend(self, at: str, x: Any, bias: Any) -> Any:
        q, k, v = (self.project(which, at, x).view(1, x.shape[1], self.heads, -1).transpose(1, 2)
                   for which in ("query", "key", "value"))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.part[f"{at}attention.output.LayerNorm"](x + self.part[f"{at}attention.output.dense"](mixed))

    def layer(self, at: str, x: Any, bias: Any) -> Any:
        x = self.attend(at, x, bias)
        gate, up = self.part[f"{at}mlp.gated_layers"](x).chunk(2, -1)
        return self.part[f"{at}mlp.layernorm"](x + self.part[f"{at}mlp.wo"](torch.nn.functional.gelu(gate) * up))

    def forward(self, ids: Any, types: Any = None) -> Any:
        part, n = self.part, ids.shape[1]
        types = torch.zeros_like(ids) if types is None else types
        x = part["embeddings.word_embeddings"](ids) + part["embeddings.token_type_embeddings"](types)
        x = part["embeddings.LayerNorm"](x)
        distance = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).abs().float()
        bias = -torch.tensor(self.slopes())[:, None, None] * distance
        for i in range(self.layers):
            x = self.layer(f"encoder.layer.{i}.", x, bias)
        return x

    def published(self) -> dict[str, Any]:
        """Return the tensors under the names of the published files."""
        return {name.replace("/", "."): tensor for name, tensor in self.state_dict().items()}


class JinaBertCode(JinaBert):
    """jina-embeddings-v2-base-code, after its tensors and the implementation in text-embeddings-inference.

    Differences from JinaBERT v2: queries and keys are normalised before the split into heads; the layer's input is
    added a second time after attention, followed by another norm; the second half of the GeGLU's input is the gate.
    """

    def __init__(self, layers: int, heads: int = 6) -> None:
        super().__init__(layers, heads)
        for i in range(layers):
            at = f"encoder.layer.{i}."
            for new, old in (("up_gated_layer", "gated_layers"), ("down_layer", "wo")):
                self.rename(f"{at}mlp.{old}", f"{at}mlp.{new}")
            self.rename(f"{at}mlp.layernorm", f"{at}layer_norm_2")
            for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"):
                self.part[at + name] = torch.nn.LayerNorm(48, 1e-12)
                self.add_module((at + name).replace(".", "/"), self.part[at + name])

    def rename(self, old: str, new: str) -> None:
        self.part[new] = self.part.pop(old)
        delattr(self, old.replace(".", "/"))
        self.add_module(new.replace(".", "/"), self.part[new])

    def project(self, which: str, at: str, x: Any) -> Any:
        y = super().project(which, at, x)
        return y if which == "value" else self.part[f"{at}attention.self.layer_norm_{which[0]}"](y)

    def layer(self, at: str, x: Any, bias: Any) -> Any:
        x = self.part[f"{at}layer_norm_1"](x + self.attend(at, x, bias))
        up, gate = self.part[f"{at}mlp.up_gated_layer"](x).chunk(2, -1)
        return self.part[f"{at}layer_norm_2"](x + self.part[f"{at}mlp.down_layer"](
            up * torch.nn.functional.gelu(gate)))


def save_jina(model: JinaBert, folder: Path) -> None:
    save_tensors(model.published(), {
        "architectures": ["JinaBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "attn_implementation": None,
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
        "classifier_dropout": None, "emb_pooler": "mean", "feed_forward_type": "geglu", "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 100, "layer_norm_eps": model.epsilon, "max_position_embeddings": 96,
        "model_max_length": 96,
        "model_type": "bert", "num_attention_heads": model.heads, "num_hidden_layers": model.layers, "pad_token_id": 0,
        "position_embedding_type": "alibi", "torch_dtype": "float32", "type_vocab_size": 2, "use_cache": True,
        "vocab_size": VOCAB}, folder)


# ---- jina-embeddings-v3 --------------------------------------------------------------------------------------------

def jina_v3(layers: int, **more: Any) -> Any:
    config = transformers.JinaEmbeddingsV3Config(**{**SIZES, **more}, num_hidden_layers=layers, layer_norm_eps=1e-4,
                                                 max_position_embeddings=96, rope_parameters={
                                                     "rope_type": "default", "rope_theta": 500.0})
    return transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False).eval()


def published_jina_v3(model: Any) -> dict[str, Any]:
    """Return the tensors under the names of jinaai/xlm-roberta-flash-implementation, which transformers' mapping of
    checkpoints also lists."""
    state = _fuse(model.state_dict(), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "mixer.Wqkv")
    names = [("embeddings.LayerNorm", "emb_ln"), ("layers.", "encoder.layers."), ("self_attn.o_proj", "mixer.out_proj"),
             ("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2")]
    return {"roberta." + name: tensor for name, tensor in _renamed(state, names).items() if "inv_freq" not in name
            and "position_ids" not in name}


#: Keys of the config.json of jina-embeddings-v3 and jina-colbert-v2 beside the sizes: those of XLMRobertaFlashConfig.
FLASH: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"], "attention_probs_dropout_prob": 0.1, "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "bos_token_id": 0, "classifier_dropout": None, "emb_pooler": None, "eos_token_id": 2, "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02, "lora_adaptations": None, "lora_alpha": 1, "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False, "lora_rank": 4, "load_trained_adapters": False,
    "matryoshka_dimensions": None, "model_type": "xlm-roberta", "pad_token_id": 1, "position_embedding_type": "rotary",
    "torch_dtype": "bfloat16", "truncate_dim": None, "use_cache": True, "use_flash_attn": True, "use_reentrant": False}


def flash_config(model: Any, **more: Any) -> dict[str, Any]:
    """Return the config.json of a model in the published layout."""
    config = model.config
    return {**FLASH, **{name: getattr(config, name) for name in (
        "hidden_act", "hidden_size", "intermediate_size", "layer_norm_eps", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "type_vocab_size", "vocab_size")},
        "rotary_emb_base": config.rope_parameters["rope_theta"], **more}


def save_jina_v3(model: Any, folder: Path) -> None:
    save_tensors(published_jina_v3(model), flash_config(model), folder)


# ---- decoders ------------------------------------------------------------------------------------------------------

_GROUPED: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
                                intermediate_size=100, max_position_embeddings=96, rms_norm_eps=1e-5)


def qwen3(layers: int, head_dim: int = 16) -> Any:
    """Create a Qwen3 whose head size, 16 unless stated, is not 48 / 6."""
    config = transformers.Qwen3Config(**_GROUPED, num_hidden_layers=layers, head_dim=head_dim)
    return transformers.Qwen3Model(config).eval()


def lfm2(layers: int, taps: int = 3) -> Any:
    config = transformers.Lfm2Config(**_GROUPED, num_hidden_layers=layers, norm_eps=1e-4, use_cache=False,
                                     conv_L_cache=taps, conv_bias=taps > 3, block_multiple_of=8,
                                     block_ffn_dim_multiplier=1.3 if taps > 3 else 1.0,
                                     layer_types=["conv", "full_attention", "conv", "conv"][:layers])
    return transformers.Lfm2Model(config).eval()


def lfm2_both_ways(model: Any, ids: Any) -> Any:
    """Return the hidden states of a Lfm2Model as Lfm2BidirectionalModel of newer versions of transformers computes
    them: attention has no mask, and a convolution has as many taps before its row as after it."""
    def centred(conv: Any, states: Any) -> Any:
        before, gate, x = conv.in_proj(states).transpose(1, 2).chunk(3, 1)
        mixed = torch.nn.functional.conv1d(before * x, conv.conv.weight, conv.conv.bias, groups=x.shape[1],
                                           padding=conv.conv.weight.shape[-1] // 2)
        return conv.out_proj((gate * mixed).transpose(1, 2))

    own = [layer.conv for layer in model.layers if not layer.is_attention_layer]
    for conv in own:
        conv.forward = lambda hidden_states, conv=conv, **named: centred(conv, hidden_states)
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    found = model(ids, attention_mask={"full_attention": mask, "conv": None}).last_hidden_state
    for conv in own:
        del conv.forward
    return found


def save_lfm2(model: Any, folder: Path) -> None:
    """Save in the layout of LFM2.5-Embedding, which has custom code for both directions."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Lfm2BidirectionalModel"],
               "auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"}}
    (folder / "config.json").write_text(json.dumps(config))


def qwen2(layers: int) -> Any:
    config = transformers.Qwen2Config(**_GROUPED, num_hidden_layers=layers, is_causal=False)
    return transformers.Qwen2Model(config).eval()


def save_qwen2(model: Any, folder: Path) -> None:
    """Save in the layout of gte-Qwen2 and Stella: a causal model's names, and custom code for bidirectional
    attention."""
    config = model.config.to_dict()
    config.pop("is_causal")
    config |= {"architectures": ["Qwen2ForCausalLM"], "rope_theta": config.pop("rope_parameters")["rope_theta"],
               "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    save_tensors({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, config, folder)


def eurobert(layers: int, **more: Any) -> Any:
    config = transformers.EuroBertConfig(**{**_GROUPED, "num_hidden_layers": layers, "head_dim": 8, "pad_token_id": 0,
                                            "bos_token_id": 1, "eos_token_id": 2, **more})
    return transformers.EuroBertModel(config).eval()


def save_eurobert(model: Any, folder: Path) -> None:
    """Save in the layout of EuroBERT-210m: a masked language model's names, and a configuration for custom code."""
    config = model.config.to_dict()
    config |= {"architectures": ["EuroBertForMaskedLM"], "rope_scaling": None,
               "rope_theta": config.pop("rope_parameters")["rope_theta"],
               "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "clf_pooling": "late",
               "bos_token": "<|begin_of_text|>", "mask_token": "<|mask|>", "pretraining_tp": 1}
    save_tensors({**{f"model.{name}": tensor for name, tensor in model.state_dict().items()},
                  "lm_head.weight": torch.zeros(VOCAB, 48)}, config, folder)


def mistral(layers: int) -> Any:
    """Create a Mistral with a window of 20 tokens."""
    config = transformers.MistralConfig(**_GROUPED, num_hidden_layers=layers, sliding_window=20)
    return transformers.MistralModel(config).eval()


def gemma(layers: int) -> Any:
    """Create a bidirectional Gemma 3 with heads of 16. Every second layer is full attention, the others have windows of
    20 tokens, both directions together."""
    config = transformers.Gemma3TextConfig(
        **{**_GROUPED, "rms_norm_eps": 1e-6}, num_hidden_layers=layers, head_dim=16, query_pre_attn_scalar=24,
        sliding_window=20, use_bidirectional_attention=True,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}})
    return transformers.Gemma3TextModel(config).eval()


class NVEmbed(torch.nn.Module):
    """NV-Embed v2, after arXiv:2405.17428 and its configuration.

    Mistral without a causal mask. Then each normalised hidden state attends to normalised latents, followed by a gated
    feed-forward layer; both have residuals.
    """

    def __init__(self, layers: int, heads: int = 3, head: int = 24, count: int = 20, **more: Any) -> None:
        super().__init__()
        nn = torch.nn
        self.layers, self.heads, self.head = layers, heads, head
        config = transformers.Qwen2Config(**{**_GROUPED, **more}, num_hidden_layers=layers, is_causal=False)
        self.network = transformers.Qwen2Model(config)
        for block in self.network.layers:  # Mistral is Qwen2 without these biases
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(block.self_attn, name).bias = None
        D, inner = 48, heads * head
        self.latents = nn.Parameter(torch.zeros(count, D))
        self.norm, self.context_norm, self.ffn_norm = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_q, self.to_kv = nn.Linear(D, inner, bias=False), nn.Linear(D, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, D, bias=False)
        self.wide, self.narrow = nn.Linear(D, 8 * D), nn.Linear(4 * D, D)

    def _split(self, x: Any) -> Any:
        return x.view(x.shape[0], self.heads, self.head).transpose(0, 1)

    def forward(self, ids: Any) -> Any:
        x = self.network(ids).last_hidden_state[0]
        q = self._split(self.to_q(self.norm(x)))
        k, v = map(self._split, self.to_kv(self.context_norm(self.latents)).chunk(2, -1))
        attended = (q @ k.transpose(1, 2) / math.sqrt(self.head)).softmax(-1) @ v
        x = x + self.to_out(attended.transpose(0, 1).reshape(x.shape[0], -1))
        up, gate = self.wide(self.ffn_norm(x)).chunk(2, -1)
        return (x + self.narrow(up * torch.nn.functional.gelu(gate)))[None]

    def published(self) -> dict[str, Any]:
        """Return the tensors under the names of the published files."""
        block = "latent_attention_model.cross_attend_blocks"
        names = {"norm.": f"{block}.0.norm.", "context_norm.": f"{block}.0.norm_context.",
                 "to_q.": f"{block}.0.fn.to_q.", "to_kv.": f"{block}.0.fn.to_kv.", "to_out.": f"{block}.0.fn.to_out.",
                 "ffn_norm.": f"{block}.1.norm.", "wide.": f"{block}.1.fn.net.0.", "narrow.": f"{block}.1.fn.net.2.",
                 "latents": "latent_attention_model.latents", "network.": "embedding_model."}
        found = {}
        for key, tensor in self.state_dict().items():
            start = next(start for start in names if key.startswith(start))
            found[names[start] + key[len(start):]] = tensor
        return found


def save_nv_embed(model: NVEmbed, folder: Path) -> None:
    text = {**transformers.MistralConfig(**_GROUPED, num_hidden_layers=model.layers, sliding_window=20).to_dict(),
            **{key: getattr(model.network.config, key) for key in ("rms_norm_eps", "rope_parameters")},
            "model_type": "bidir_mistral", "architectures": ["MistralModel"]}
    save_tensors(model.published(), {
        "add_eos": True, "add_pad_token": True, "architectures": ["NVEmbedModel"], "hidden_size": 48,
        "auto_map": {"AutoModel": "modeling_nvembed.NVEmbedModel"}, "is_mask_instruction": True, "mask_type": "b",
        "latent_attention_config": {
            "cross_dim_head": model.head, "hidden_dim": 48, "latent_dim": 48, "model_type": "latent_attention",
            "num_cross_heads": model.heads, "num_latents_value": len(model.latents), "output_normalize": True},
        "model_type": "nvembed", "padding_side": "right", "text_config": text, "torch_dtype": "float32"}, folder)


#: Encoders by name. A name begins with that of its row in archs.def.
ENCODERS: dict[str, Encoder] = {
    "bert_roberta": Encoder(roberta, 70),
    "bert_heads": Encoder(lambda layers: roberta(layers, hidden_size=78, hidden_act="quick_gelu"), 70),  # heads of 26
    "bert_xlm_roberta": Encoder(xlm_roberta, 70),
    "bert_xlm_roberta_long": Encoder(lambda layers: xlm_roberta(layers, 8194), 1500),
    "bert_distilbert": Encoder(distilbert, 70),
    "bert_distilbert_relu": Encoder(lambda layers: distilbert(layers, activation="relu", dim=78), 70),
    "bert_electra": Encoder(electra, 70),
    "bert_electra_wide": Encoder(lambda layers: electra(layers, 48), 70),  # no projection
    "bert_albert": Encoder(albert, 70),
    "bert_albert_inner": Encoder(lambda layers: albert(layers, 60, 2, 2, hidden_act="gelu"), 70),
    "bert_albert_one": Encoder(lambda layers: albert(layers, 48, 1), 70),  # a projection of the same size
    "nomic_bert": Encoder(nomic_bert, 96),
    "nomic_bert_published": Encoder(nomic_bert, 96, published_nomic, save_nomic),
    "nomic_bert_moe": Encoder(NomicMoe, 96, NomicMoe.published, save_nomic_moe,
                              states=lambda model, ids: model(ids)),
    "mpnet": Encoder(mpnet, 260),
    "deberta_v2": Encoder(deberta, 150),
    "deberta_v2_own": Encoder(lambda layers: deberta(  # projections of their own, and one row for each near distance
        layers, share_att_key=False, position_buckets=-1, max_relative_positions=40, norm_rel_ebd="none",
        position_biased_input=True, type_vocab_size=2, hidden_act="gelu_new", layer_norm_eps=1e-5), 150),
    "deberta_v2_narrow": Encoder(lambda layers: deberta(
        layers, embedding_size=20, position_buckets=21, max_relative_positions=-1, pos_att_type=["c2p"]), 150),
    "deberta_v2_queries": Encoder(lambda layers: deberta(
        layers, hidden_size=78, share_att_key=False, pos_att_type="p2c", type_vocab_size=3), 150),
    # buckets that skip rows: a text needs more rows than it has distances
    "deberta_v2_sparse": Encoder(lambda layers: deberta(layers, position_buckets=64, max_relative_positions=40), 150),
    "modern_bert": Encoder(modern_bert, 120),
    "modern_bert_old": Encoder(lambda layers: modern_bert(layers, rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}), 120, save=save_old_modern_bert),
    # a head size of granite-embedding-small-english-r2, and windows in two of three layers
    "modern_bert_granite": Encoder(lambda layers: modern_bert(
        layers, hidden_size=64, num_attention_heads=2, global_attn_every_n_layers=3, hidden_activation="silu",
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 80000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}), 120),
    "modern_bert_biases": Encoder(lambda layers: modern_bert(
        layers, norm_bias=True, attention_bias=True, mlp_bias=True, hidden_activation="gelu_pytorch_tanh"), 120),
    "gte": Encoder(gte, 96),
    "gte_heads": Encoder(lambda layers: gte(layers, num_attention_heads=4, hidden_act="quick_gelu"), 96),
    "gte_arctic": Encoder(gte, 96, save=save_arctic),
    "gte_published": Encoder(ntk_gte, 96, save=save_gte),
    "qwen3_embedding": Encoder(qwen3, 96, pooling="lasttoken"),
    "qwen3_embedding_heads": Encoder(lambda layers: qwen3(layers, 10), 96, pooling="lasttoken"),
    "lfm2_embedding": Encoder(lfm2, 96, save=save_lfm2, pooling="cls", states=lfm2_both_ways),
    "lfm2_embedding_causal": Encoder(lambda layers: lfm2(layers, 5), 96, pooling="mean"),
    "llama_embedding_qwen2": Encoder(qwen2, 96, pooling="lasttoken"),
    "llama_embedding_published": Encoder(qwen2, 96, save=save_qwen2, pooling="mean"),
    "llama_embedding_eurobert": Encoder(lambda layers: eurobert(layers, num_key_value_heads=6), 96, pooling="mean"),
    "llama_embedding_eurobert_published": Encoder(lambda layers: eurobert(layers, hidden_act="gelu", head_dim=16), 96,
                                                  save=save_eurobert),
    "llama_embedding_mistral": Encoder(mistral, 96, pooling="lasttoken"),
    "gemma_embedding": Encoder(gemma, 96, pooling="mean"),
    "nv_embed": Encoder(NVEmbed, 96, NVEmbed.published, save_nv_embed, "mean", lambda model, ids: model(ids)),
    "jina_bert_v3": Encoder(jina_v3, 96),
    "jina_bert_v3_published": Encoder(lambda layers: jina_v3(layers, type_vocab_size=2), 96, published_jina_v3,
                                      save_jina_v3),
    "jina_bert_v2": Encoder(JinaBert, 96, JinaBert.published, save_jina, states=lambda model, ids: model(ids)),
    "jina_bert_v2_code": Encoder(JinaBertCode, 96, JinaBertCode.published, save_jina,
                                 states=lambda model, ids: model(ids)),
}


def built(name: str, layers: int, seed: int = 1, full: int = 3) -> Any:
    """Return the first ``layers`` layers of a seeded model of ``full`` layers."""
    encoder = ENCODERS[name]
    whole = encoder.make(full)
    randomise(whole, seed)
    part = encoder.make(layers)
    part.load_state_dict({key: value for key, value in whole.state_dict().items() if key in part.state_dict()})
    return part
