"""Seeded static embeddings, as folders of model2vec and of sentence-transformers. Needs only numpy, tokenizers and
safetensors: tests/parity/static/make_static_goldens.py uses it too."""

import json
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

DIM = 21
WORDS = ["the", "cat", "sleeps", "on", "warm", "roof", "bread", "rises", "##s", "##ing", "un", "##usual", "a", "b"]
TEXTS = ["the cat sleeps on the warm roof", "Bread rises", "cats unusual breading", "zebra cat quagga the", "zebra",
         "the " * 40, "cat", "on\nroof roof"]


def vocabulary() -> dict[str, int]:
    return {text: number for number, text in enumerate(["[PAD]", "[UNK]", *WORDS])}


def tokenizer(words: dict[str, int] | None = None) -> Tokenizer:
    made = Tokenizer(models.WordPiece(words or vocabulary(), unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def unigram() -> Tokenizer:
    """Return a tokenizer of a unigram model, which names its unknown token by the id 2."""
    texts = ["[PAD]", "[CLS]", "[UNK]", *("\u2581" + word for word in WORDS if not word.startswith("##")), "s", "ing"]
    made = Tokenizer(models.Unigram([(text, -float(at)) for at, text in enumerate(texts)], unk_id=2))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def table(dtype: Any = np.float32, rows: int | None = None) -> np.ndarray:
    values = np.random.default_rng(5).standard_normal((rows or len(vocabulary()), DIM))
    return np.rint(values * 40).astype(dtype) if dtype == np.int8 else values.astype(dtype)


def weights() -> np.ndarray:
    return np.random.default_rng(6).uniform(0.2, 2.0, len(vocabulary())).astype(np.float32)


def mapping(rows: int = 7) -> np.ndarray:
    return np.random.default_rng(7).integers(0, rows, len(vocabulary()))


#: Variants of model2vec folders: tensors and settings.
VARIANTS: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {
    "plain": ({"embeddings": table()}, {"normalize": False}),
    "normalised": ({"embeddings": table()}, {"normalize": True}),
    "cut": ({"embeddings": table()}, {"normalize": True, "max_length": 5}),
    "int8": ({"embeddings": table(np.int8)}, {"normalize": True}),
    "float16": ({"embeddings": table(np.float16)}, {"normalize": True}),
    "quantised": ({"embeddings": table(rows=7), "weights": weights(), "mapping": mapping()}, {"normalize": True}),
    "weighted": ({"embeddings": table(), "weights": weights().astype(np.float64)}, {"normalize": False}),
    "unigram": ({"embeddings": table()}, {"normalize": False}),
}


def write_variant(folder: Path, variant: str) -> Path:
    """Write the model2vec folder of a variant."""
    return write(folder, *VARIANTS[variant], unigram() if variant == "unigram" else None)


def write_letters(folder: Path) -> Path:
    """Write a model2vec folder whose tokens are letters and digits, so that it distinguishes texts of any words."""
    letters = [*ascii_lowercase, *digits]
    words = ["[PAD]", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    return write(folder, {"embeddings": table(rows=len(words))}, {"normalize": True},
                 {word: number for number, word in enumerate(words)})


def write(folder: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any],
          words: dict[str, int] | Tokenizer | None = None) -> Path:
    """Write a model2vec folder. words: vocabulary, or another tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (words if isinstance(words, Tokenizer) else tokenizer(words)).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", **settings}))
    return folder
