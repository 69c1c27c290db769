"""Small cross-encoders and classifiers."""

import json
import shutil
from pathlib import Path
from typing import Any

import tinymodels
from paritymodels import randomise, transformers


def _model(name: str, vocab: int, labels: int = 1) -> Any:
    sizes = dict(vocab_size=vocab, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72,
                 num_labels=labels)
    if name == "bert":
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(**sizes, max_position_embeddings=64))
    if name == "xlm_roberta":
        return transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(
            **sizes, max_position_embeddings=66, pad_token_id=1, type_vocab_size=1))
    if name == "mpnet":
        return transformers.MPNetForSequenceClassification(transformers.MPNetConfig(
            **sizes, max_position_embeddings=66))
    if name == "gte":
        return transformers.GteForSequenceClassification(transformers.GteConfig(
            **sizes, max_position_embeddings=64, pad_token_id=0, type_vocab_size=0))
    if name == "distilbert":
        return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(
            vocab_size=vocab, dim=32, n_layers=2, n_heads=4, hidden_dim=72, num_labels=labels,
            max_position_embeddings=64))
    if name == "deberta_v3":
        return transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(
            **sizes, max_position_embeddings=64, relative_attention=True, position_buckets=12,
            max_relative_positions=-1, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p",
            position_biased_input=False, type_vocab_size=0))
    if name == "electra":
        return transformers.ElectraForSequenceClassification(transformers.ElectraConfig(
            **sizes, embedding_size=20, max_position_embeddings=64))
    if name == "albert":
        return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(
            **sizes, embedding_size=20, max_position_embeddings=64))
    if name.startswith("eurobert"):
        return transformers.EuroBertForSequenceClassification(transformers.EuroBertConfig(
            **sizes, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, mask_token_id=4,
            classifier_pooling=name.partition("_")[2]))
    return transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(
        **sizes, max_position_embeddings=64, local_attention=16, pad_token_id=0, cls_token_id=2, sep_token_id=3,
        bos_token_id=2, eos_token_id=3, classifier_pooling="mean" if name == "modern_bert_mean" else "cls",
        classifier_bias=name == "modern_bert_mean", norm_bias=name == "modern_bert_mean"))


def make_reranker(folder: Path, name: str, labels: int = 1) -> Path:
    tinymodels.bert(folder)
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    shutil.rmtree(folder / "1_Pooling")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    if name == "xlm_roberta":
        vocab = tinymodels.unigram(folder)
    model = _model(name, vocab, labels).eval()
    randomise(model, 6)
    model.save_pretrained(folder)
    return folder


def make_classifier(folder: Path, name: str, labels: tuple[str, ...], **config: Any) -> Path:
    """Save a sequence classifier; ``config``: further keys of config.json, None removes a key."""
    make_reranker(folder, name, len(labels))
    set_config(folder, id2label={str(at): label for at, label in enumerate(labels)},
               label2id={label: at for at, label in enumerate(labels)}, **config)
    return folder


def set_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
