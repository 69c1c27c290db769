"""Small text encoders for ``mpool demo`` whose weights are set by hand, so that their results have a known meaning.

A component of a hidden state stands for a word of the vocabulary. The embedding of a word is 1 in its own component and
0 in all others. The only layer of the two BERT models adds the mean of the text's embeddings to each row
(:func:`write_classifier`) or nothing (:func:`write_sparse`).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_POSITIONS = 64
_FEED_FORWARD = 4
_ATTENTION = "bert.encoder.layer.0.attention.output.dense"
#: Factor of the classifier's weights, and of an adapter's update: large enough for scores near 0 and 1.
_GAIN = 6.0
#: Bias of the logits of special tokens, so low that sparse vectors have none of them.
_NEVER = -100.0


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the words of texts in lower case, each once."""
    return tuple(dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text.lower())))


def write_static(folder: Path, words: tuple[str, ...]) -> Path:
    """Write static embeddings as model2vec: the cosine of two texts measures the words that they share."""
    table = np.eye(len(_SPECIAL) + len(words), dtype=np.float32)
    table[:len(_SPECIAL)] = 0
    return _write(folder, {"model_type": "model2vec", "normalize": True}, {"embeddings": table}, words, template=False)


def write_sparse(folder: Path, words: tuple[str, ...], texts: Iterable[str]) -> Path:
    """Write a sparse encoder whose vectors have the words of a text and no others. A word in fewer ``texts`` has a
    larger weight."""
    size = len(_SPECIAL) + len(words)
    counts = np.sum([_indicator(words, words_of([text])) for text in texts], axis=0)
    tensors = _encoder(size, 0.0) | {
        "cls.predictions.transform.dense.weight": np.eye(size), "cls.predictions.transform.dense.bias": np.zeros(size),
        "cls.predictions.bias": np.where(counts, 1 - counts, _NEVER),
        **_norm("cls.predictions.transform.LayerNorm", size)}
    _write(folder, {"architectures": ["BertForMaskedLM"], **_config(size)}, tensors, words)
    pooling = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": pooling}]), encoding="utf-8")
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max"}), encoding="utf-8")
    return folder


def write_classifier(folder: Path, words: tuple[str, ...], topics: Mapping[str, Iterable[str]]) -> Path:
    """Write a sequence classifier. ``topics``: the words of each label."""
    size = len(_SPECIAL) + len(words)
    rows = np.stack([_indicator(words, found) for found in topics.values()])
    tensors = _encoder(size, 1.0) | {
        "bert.pooler.dense.weight": np.eye(size), "bert.pooler.dense.bias": np.zeros(size),
        "classifier.weight": _GAIN * rows, "classifier.bias": np.zeros(len(topics))}
    labels = dict(enumerate(topics))
    return _write(folder, {"architectures": ["BertForSequenceClassification"], **_config(size), "id2label": labels,
                           "label2id": {label: at for at, label in labels.items()}}, tensors, words)


def write_adapter(folder: Path, words: tuple[str, ...], source: Iterable[str], target: Iterable[str]) -> Path:
    """Write an adapter (LoRA of rank 1) of :func:`write_classifier`: it treats the words ``source`` as ``target``."""
    a, b = _indicator(words, source)[None], _indicator(words, target)[:, None] * _GAIN
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "SEQ_CLS", "r": 1, "lora_alpha": 1, "bias": "none",
        "target_modules": ["attention.output.dense"]}), encoding="utf-8")
    _save(folder / "adapter_model.safetensors", {f"base_model.model.{_ATTENTION}.lora_A.weight": a,
                                                 f"base_model.model.{_ATTENTION}.lora_B.weight": b})
    return folder


def _indicator(words: tuple[str, ...], chosen: Iterable[str]) -> Any:
    """Return a vector that is 1 for the chosen words."""
    found = np.zeros(len(_SPECIAL) + len(words))
    found[[len(_SPECIAL) + words.index(word) for word in chosen]] = 1
    return found


def _config(size: int) -> dict[str, Any]:
    return {"model_type": "bert", "vocab_size": size, "hidden_size": size, "num_hidden_layers": 1,
            "num_attention_heads": 1, "intermediate_size": _FEED_FORWARD, "max_position_embeddings": _POSITIONS,
            "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
            "tie_word_embeddings": True}


def _norm(name: str, size: int) -> dict[str, Any]:
    return {f"{name}.weight": np.ones(size), f"{name}.bias": np.zeros(size)}


def _encoder(size: int, attention: float) -> dict[str, Any]:
    """Return the tensors of a layer: uniform attention times a factor, and a feed-forward network that adds nothing."""
    layer = "bert.encoder.layer.0"
    tensors: dict[str, Any] = {
        "bert.embeddings.word_embeddings.weight": np.eye(size),
        "bert.embeddings.position_embeddings.weight": np.zeros((_POSITIONS, size)),
        "bert.embeddings.token_type_embeddings.weight": np.zeros((2, size)),
        **_norm("bert.embeddings.LayerNorm", size), **_norm(f"{layer}.attention.output.LayerNorm", size),
        **_norm(f"{layer}.output.LayerNorm", size)}
    linear = {f"{layer}.attention.self.query": np.zeros((size, size)),
              f"{layer}.attention.self.key": np.zeros((size, size)),
              f"{layer}.attention.self.value": np.eye(size), _ATTENTION: attention * np.eye(size),
              f"{layer}.intermediate.dense": np.zeros((_FEED_FORWARD, size)),
              f"{layer}.output.dense": np.zeros((size, _FEED_FORWARD))}
    for name, weight in linear.items():
        tensors |= {f"{name}.weight": weight, f"{name}.bias": np.zeros(len(weight))}
    return tensors


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Any], words: tuple[str, ...],
           template: bool = True) -> Path:
    """Write a folder. ``template``: put ``[CLS]`` and ``[SEP]`` around a text."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate((*_SPECIAL, *words))},
                                           unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _POSITIONS, "pad_token": "[PAD]",
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _save(folder / "model.safetensors", tensors)
    return folder


def _save(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file of float32 (https://huggingface.co/docs/safetensors)."""
    header: dict[str, Any] = {}
    parts, at = list[bytes](), 0
    for name, values in tensors.items():
        parts.append(np.ascontiguousarray(values, np.dtype("<f4")).tobytes())
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


__all__ = ["words_of", "write_adapter", "write_classifier", "write_sparse", "write_static"]
