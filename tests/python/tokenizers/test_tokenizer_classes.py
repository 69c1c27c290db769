"""Settings of tokenizer_config.json that contradict tokenizer.json, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from mpool.models.spec import TokenizerSource
from mpool.tokenizers import open_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["The CAT Café 中文", "cat", " the  cat", "ÅNGSTRÖM the中cat"]
BERT = ("BertTokenizer", "DistilBertTokenizerFast", "ElectraTokenizer", "MPNetTokenizer", "FunnelTokenizer",
        "MobileBertTokenizer", "LayoutLMTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
BYTES = ("RobertaTokenizer", "RobertaTokenizerFast", "GPT2Tokenizer", "BartTokenizer", "LongformerTokenizerFast",
         "DebertaTokenizer", "BlenderbotTokenizer", "PreTrainedTokenizerFast")
SETTINGS: list[dict[str, Any]] = [
    {}, {"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False}, {"strip_accents": True},
    {"do_lower_case": False, "strip_accents": True}, {"strip_accents": None}, {"tokenize_chinese_chars": False},
    {"tokenize_chinese_chars": True, "do_lower_case": False}]


def wordpiece(lowercase: bool, strip: bool | None, chinese: bool) -> Any:
    parts = ["the", "cat", "cafe", "café", "The", "CAT", "Cafe", "Café", "中", "文", "中文", "angstrom", "ångström",
             "##中cat", "the中cat"]
    vocab = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *parts])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(True, chinese, strip, lowercase)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def byte_level(prefix: bool) -> Any:
    vocab = {token: at for at, token in enumerate(["<s>", "</s>", "<unk>", "<pad>", "<mask>", *sorted(
        tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ca", "cat", "Ġcat"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("c", "a"), ("ca", "t"), ("Ġ", "cat")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 1), ("<s>", 0), True, prefix)
    return made


def same(folder: Path, made: Any, config: dict[str, Any]) -> None:
    """Write the files and compare token ids and the places of tokens."""
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), clean_up_tokenization_spaces=False)
    ours = open_tokenizer(TokenizerSource(json_path=str(folder / "tokenizer.json"), config=config))
    for text in TEXTS:
        wanted = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
        assert ours.encode(text, add_special=False).tolist() == wanted["input_ids"], text
        if config["tokenizer_class"] in ("BlenderbotTokenizer", "DebertaTokenizer"):
            continue  # version 5 replaces the post-processor, which trims the places; version 4 keeps it
        spans = ours._encode_spans([text], False)[0]
        assert [tuple(place) for place in spans.offsets] == [tuple(place) for place in wanted["offset_mapping"]], text


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", BERT)
def test_settings_of_wordpiece_tokenizers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    for stored in ((True, None, True), (False, None, True), (True, False, False), (False, True, True)):
        same(tmp_path, wordpiece(*stored), {
            "tokenizer_class": name, "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
            "pad_token": "[PAD]", "mask_token": "[MASK]", **settings})


@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"add_prefix_space": False},
                                      {"trim_offsets": False}, {"trim_offsets": False, "add_prefix_space": True}],
                         ids=str)
@pytest.mark.parametrize("name", BYTES)
def test_settings_of_byte_level_tokenizers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    for stored in (False, True):
        same(tmp_path, byte_level(stored), {
            "tokenizer_class": name, "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
            "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", **settings})
