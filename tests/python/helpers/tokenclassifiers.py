"""Small token classifiers."""

import json
import shutil
from pathlib import Path
from typing import Any

import rerankers
import tinymodels
from paritymodels import randomise, torch, transformers

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "X-Y-Z")
#: Names of :func:`make_token_classifier`.
FAMILIES = ("bert", "roberta", "xlm_roberta", "distilbert", "electra", "albert", "deberta_v3", "modern_bert", "mpnet",
            "gte", "eurobert_mean")


def byte_level(folder: Path) -> int:
    """Write a tokenizer like RoBERTa's, byte-level BPE, whose offsets leave out leading spaces. Returns the size of its
    vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(tinymodels.TEXTS, trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True,
                                                            add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "bos_token": "<s>", "eos_token": "</s>",
        "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
        "model_input_names": ["input_ids", "attention_mask"]}))
    return tokenizer.get_vocab_size()


def make_token_classifier(folder: Path, name: str, labels: tuple[str, ...] = LABELS, seed: int = 6) -> Path:
    """Save a token classifier of a family, with random weights and the given labels."""
    tinymodels.bert(folder)
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    shutil.rmtree(folder / "1_Pooling")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    if name != "bert":  # transformers adds the decoder of BERT's tokenizers; those of others are in their files
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if name in ("xlm_roberta", "mpnet"):  # id 1, which MPNet takes for padding, must not be that of unknown tokens
        vocab = tinymodels.unigram(folder)
    if name == "roberta":
        vocab = byte_level(folder)
        config: Any = transformers.RobertaConfig(
            vocab_size=vocab, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
            max_position_embeddings=66, pad_token_id=1, type_vocab_size=1)
    else:
        config = rerankers._model(name, vocab).config
    config.id2label, config.label2id = dict(enumerate(labels)), {label: at for at, label in enumerate(labels)}
    model = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    with torch.no_grad():  # no label is the best one for most tokens
        ids = torch.randint(5, vocab, (8, 40), generator=torch.Generator().manual_seed(seed))
        model.classifier.bias -= model(ids).logits.mean(dim=(0, 1))
        model.classifier.weight *= 2
        model.classifier.bias *= 2
    model.save_pretrained(folder)
    return folder
