"""Small models with seeded random weights in place of the published ones that the tests of sentence-transformers load.

Each has the width and the labels that those tests assert, and no trained weights: tests that compare scores with
recorded numbers, or sentences by meaning, cannot pass.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import tinymodels
from paritymodels import randomise, torch, transformers

#: Mean of each vector of a text before it is normalised: above the 0.01 that `test_encode_multi_process` compares with.
MEAN = 0.05
#: Names of embedding models in those tests, and the width of their vectors.
ENCODERS = {"sentence-transformers-testing/stsb-bert-tiny-safetensors": 128, "paraphrase-distilroberta-base-v1": 768}
#: Names of cross-encoders, and the number of their labels.
CROSS_ENCODERS = {"cross-encoder-testing/reranker-bert-tiny-gooaq-bce": 1, "cross-encoder/nli-MiniLM2-L6-H768": 3}
_SIZES: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                              max_position_embeddings=512)


def _files(folder: Path) -> int:
    """Write a model of two layers, whose weights the callers replace. Returns the size of its vocabulary."""
    tinymodels.bert(folder, normalize=False)
    for name in ("tokenizer_config.json", "sentence_bert_config.json"):
        text = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: 512 if value == 64 else value for key, value in text.items()}))
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def encoder(folder: Path, width: int) -> Path:
    """Write a BERT with mean pooling."""
    config = transformers.BertConfig(vocab_size=_files(folder), hidden_size=width, **_SIZES)
    model = transformers.BertModel(config).eval()
    randomise(model, 5)
    last = model.encoder.layer[-1].output.LayerNorm
    torch.nn.init.ones_(last.weight)  # with a weight of 1, the mean of a vector is the mean of the bias
    last.bias.data += MEAN - last.bias.data.mean()
    model.save_pretrained(folder)
    (folder / "1_Pooling/config.json").write_text(json.dumps(
        {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}))
    return folder


def cross_encoder(folder: Path, labels: int) -> Path:
    """Write a BERT that scores pairs of texts."""
    vocab = _files(folder)
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_Pooling")
    config = transformers.BertConfig(vocab_size=vocab, hidden_size=128, num_labels=labels, **_SIZES)
    model = transformers.BertForSequenceClassification(config).eval()
    randomise(model, 6)
    model.save_pretrained(folder)
    return folder


def make(folder: Path) -> dict[str, str]:
    """Write all models below a folder. Returns their paths by name."""
    found = {name: encoder(folder / f"encoder-{at}", width) for at, (name, width) in enumerate(ENCODERS.items())}
    found |= {name: cross_encoder(folder / f"cross-encoder-{at}", labels)
              for at, (name, labels) in enumerate(CROSS_ENCODERS.items())}
    return {name: str(path) for name, path in found.items()}
