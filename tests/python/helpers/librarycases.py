"""Seeded models and adapters whose results of PEFT and llama.cpp are recorded (tests/parity/libraries)."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from adapterfiles import ALL, Matrices, digest_of as digest_of, matrices, save_peft
from paritymodels import randomise, transformers, write_tokenizer
from rerankers import make_classifier
from retrievalmodels import TEXTS as TEXTS

LABELS = ("one", "two", "three")
_BERT, _MODERN = ("query", "key", "value", "dense"), ("Wqkv", "Wo", "Wi")
ALPHA = 9.0
#: Name -> kind of the classifier, rank and targets of the adapter, and further keys of its adapter_config.json.
ADAPTERS: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("bert", 6, _BERT, {}),
    "bert_rslora": ("bert", 3, _BERT[:2], {"use_rslora": True}),
    "bert_alpha_pattern": ("bert", 4, _BERT, {"alpha_pattern": {"attention.self.query": 2.5}}),
    "modernbert": ("modern_bert_mean", 5, _MODERN, {})}


class Decoder(NamedTuple):
    """A decoder and its adapter."""
    family: str
    settings: dict[str, Any]
    #: Targets of each rank.
    ranks: dict[int, tuple[str, ...]]
    #: Further keys of adapter_config.json.
    config: dict[str, Any]


VOCAB = 157
DECODERS = {
    "llama": Decoder("Llama", {"attention_bias": True, "mlp_bias": True}, {5: ALL}, {}),
    "qwen2_rslora": Decoder("Qwen2", {}, {6: ALL}, {"use_rslora": True}),
    "qwen2_patterns": Decoder("Qwen2", {}, {3: ("q_proj", "o_proj", "down_proj"), 7: ("k_proj",)}, {
        "r": 3, "rank_pattern": {"k_proj": 7},
        "alpha_pattern": {"model.layers.1.self_attn.k_proj": 21.0, "down_proj": 4.0}})}
#: Token ids whose logits are recorded.
TOKENS = np.random.default_rng(7).integers(2, VOCAB, 23)


def small_decoder(family: str, **settings: Any) -> Any:
    """Return a seeded model of a family of transformers. No tile of a kernel divides its sizes."""
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=84, intermediate_size=111, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=400, bos_token_id=0, eos_token_id=1, pad_token_id=0,
        rms_norm_eps=1e-5, tie_word_embeddings=False, **settings)).eval()
    randomise(model, 4)
    return model


def make_decoder(name: str) -> Any:
    """Return the model of a case of DECODERS."""
    return small_decoder(DECODERS[name].family, **DECODERS[name].settings)


def decoder_matrices(name: str, model: Any) -> Matrices:
    """Return the matrices of the adapter of a case of DECODERS. ``model``: that of :func:`make_decoder`."""
    return {key: pair for rank, targets in DECODERS[name].ranks.items()
            for key, pair in matrices(model, rank, 11 + rank, targets).items()}


def write_adapted(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the model and the adapter of a case of ADAPTERS or DECODERS. Returns their folders."""
    if name in DECODERS:
        base, model = folder / "model", make_decoder(name)
        model.save_pretrained(base)
        write_tokenizer(base, VOCAB)
        found = decoder_matrices(name, model)
        return base, save_peft(folder / "adapter", found, ALPHA, **DECODERS[name].config)
    kind, rank, targets, config = ADAPTERS[name]
    base = make_classifier(folder / "model", kind, LABELS)
    found = {key: pair for key, pair in matrices(base, rank, 11, targets).items() if ".layer" in key}
    return base, save_peft(folder / "adapter", found, ALPHA, task_type="FEATURE_EXTRACTION", **config)
