"""Small models with random weights, used in place of the model folders that the documents mention."""

import json
import shutil
from pathlib import Path

import tinymodels
import toolmodels


def cross_encoder(folder: Path, labels: tuple[str, ...] = ("LABEL_0",)) -> Path:
    """Save a sequence classifier as transformers does: BERT with two layers; with one label, a cross-encoder."""
    import torch
    import transformers

    tinymodels.bert(folder)
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    shutil.rmtree(folder / "1_Pooling")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(3)
    transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72,
        id2label=dict(enumerate(labels)), label2id={label: at for at, label in enumerate(labels)},
        max_position_embeddings=64)).eval().save_pretrained(folder)
    return folder


def chat_model(folder: Path) -> Path:
    """Save a Qwen2 with two layers whose chat template declares tools in the Hermes format."""
    tinymodels.qwen2(folder, context=4096)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = toolmodels.HERMES
    path.write_text(json.dumps(config))
    return folder
