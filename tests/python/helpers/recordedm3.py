"""A small model like BGE-M3 whose results of FlagEmbedding are recorded (tests/parity/libraries).

Its files come from NumPy and JSON alone: another version of torch or transformers writes the same weights. The numbers
of a tensor depend on its name only.
"""

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from adapterfiles import save_tensors

#: Largest number of tokens of a text.
LENGTH = 64
WIDTH, LAYERS, HEADS, INNER = 48, 2, 3, 90
_SPACE = "\u2581"
_WORDS = ("the", "a", "of", "in", "river", "tide", "stone", "is", "moon", "water", "harbour", "wheel", "turn", "mill",
          "light")
_PARTS = [*(_SPACE + word for word in _WORDS), "ing", "er", "s", "ed", "al"]
#: Tokens by id, as of XLM-RoBERTa: the mask token is the last.
TOKENS = ["<s>", "<pad>", "</s>", "<unk>",
          *dict.fromkeys([*_PARTS, _SPACE, *string.ascii_letters, *".,?!'-0123456789"]), "<mask>"]
SPECIAL = (0, 1, 2, 3, len(TOKENS) - 1)
#: Texts with repeated tokens, unknown characters, special tokens as words, no words, and more than LENGTH tokens.
TEXTS = ["The tide turns in the harbour.", "the water of the river turns the wheel of the mill", "moon", "",
         "The stone is a light stone, a stone in the river - is a stone light?",
         "the mill \u4e2d\u6587 the \U0001f30a tide", "the <mask> turns the tide",
         "river </s> water <unk> <s> stone", "!!! ?",
         "the moon turns the tide and the tide turns the water in the harbour, " * 4]
#: Weights of dense, sparse and token vectors in FlagEmbedding's sum of scores.
MODES = (0.4, 0.2, 0.4)


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the encoder, by its name in transformers' XLMRobertaModel."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(TOKENS), WIDTH),
        "embeddings.position_embeddings.weight": (LENGTH + 2, WIDTH),
        "embeddings.token_type_embeddings.weight": (1, WIDTH)}
    layers = {"attention.self.query": (WIDTH, WIDTH), "attention.self.key": (WIDTH, WIDTH),
              "attention.self.value": (WIDTH, WIDTH), "attention.output.dense": (WIDTH, WIDTH),
              "intermediate.dense": (INNER, WIDTH), "output.dense": (WIDTH, INNER)}
    linear = {f"encoder.layer.{at}.{name}": shape for at in range(LAYERS) for name, shape in layers.items()}
    for name, shape in {**linear, "pooler.dense": (WIDTH, WIDTH)}.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    norms = [f"encoder.layer.{at}.{part}" for at in range(LAYERS) for part in ("attention.output", "output")]
    for name in ("embeddings", *norms):
        found |= {f"{name}.LayerNorm.{part}": (WIDTH,) for part in ("weight", "bias")}
    return found


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return uniform numbers that depend on the name: weights of norms in [0.5, 1.5), biases in [-0.25, 0.25), all
    others in [-0.5, 0.5)."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    found = np.random.Generator(np.random.PCG64(seed)).random(shape, np.float32) - np.float32(0.5)
    if name.endswith("LayerNorm.weight"):
        return found + np.float32(1)
    return found * np.float32(0.5) if name.endswith(".bias") else found


def heads() -> dict[str, dict[str, np.ndarray]]:
    """Return the tensors of the heads by the stem of their file."""
    found = {stem: {part: _tensor(f"{stem}.{part}", shape)
                    for part, shape in (("weight", (rows, WIDTH)), ("bias", (rows,)))}
             for stem, rows in (("colbert_linear", WIDTH), ("sparse_linear", 1))}
    found["sparse_linear"]["bias"] += np.float32(3)  # above 0 for some tokens of a text, and below for others
    return found


def _tokenizer() -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` like that of XLM-RoBERTa."""
    scores = [0.0 if at in SPECIAL else -1.0 - len(TOKENS[at]) ** -1 - at / 64 for at in range(len(TOKENS))]
    added = [{"id": at, "content": TOKENS[at], "single_word": False, "lstrip": TOKENS[at] == "<mask>", "rstrip": False,
              "normalized": False, "special": True} for at in SPECIAL]
    around = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFKC"}, "pre_tokenizer": spaces, "decoder": spaces,
            "post_processor": {"type": "TemplateProcessing", "single": around, "pair": around + [
                {"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "special_tokens": {word: {"id": word, "ids": [TOKENS.index(word)], "tokens": [word]}
                                   for word in ("<s>", "</s>")}},
            "model": {"type": "Unigram", "unk_id": 3, "vocab": [list(pair) for pair in zip(TOKENS, scores)],
                      "byte_fallback": False}}


def inputs() -> str:
    """Return the tokenizer and the texts: recorded results belong to them, as they do to the weights."""
    return json.dumps([_tokenizer(), TEXTS])


def write(folder: Path) -> Path:
    """Write the model in the layout of BAAI/bge-m3, with the heads as safetensors: FlagEmbedding reads them as
    pickles, which the recording script adds."""
    folder.mkdir(parents=True)
    names = ("", "1_Pooling", "2_Normalize")
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": len(TOKENS),
            "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
            "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0,
            "eos_token_id": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "position_embedding_type": "absolute",
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "XLMRobertaTokenizer", "model_max_length": LENGTH, "bos_token": "<s>",
            "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
            "mask_token": "<mask>"},
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(zip(names, ("Transformer", "Pooling", "Normalize")))],
        "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": True,
                                  "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False,
                                  "pooling_mode_mean_sqrt_len_tokens": False}}
    for name in names[1:]:
        (folder / name).mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_tensors(folder / "model.safetensors", {name: _tensor(name, shape) for name, shape in _shapes().items()})
    for stem, tensors in heads().items():
        save_tensors(folder / f"{stem}.safetensors", tensors)
    return folder
