"""Small tokenizers in standard files, trained on the captions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(texts: Iterable[str], positions: int, pad: str = END) -> Any:
    """Train a transformers ``CLIPTokenizer``. Its vocabulary has all bytes, alone and at the end of a word, and one
    token for each word of the texts. Other words are encoded letter by letter.
    """
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learnt = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learnt.normalizer = normalizers.Lowercase()
    learnt.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(),
                                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = sorted({word for text in texts for word in text.split()})
    learnt.train_from_iterator(words, trainers.BpeTrainer(vocab_size=4096, min_frequency=1, show_progress=False,
                                                          end_of_word_suffix="</w>", initial_alphabet=letters))
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *dict.fromkeys("".join(pair) for pair in merges)]
    vocab = {token: number for number, token in enumerate([*tokens, START, END])}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=positions)


def t5_tokenizer(texts: Iterable[str]) -> Any:
    """Build a ``T5Tokenizer``: a unigram model with the words of the texts, ASCII letters and punctuation. Other
    characters are unknown.
    """
    import transformers

    words = sorted({"\u2581" + word for text in texts for word in text.replace(",", " ").split()})
    letters = ["\u2581", *map(chr, range(33, 127))]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0)]
    vocabulary += [(word, -3.0) for word in words] + [(letter, -6.0) for letter in letters if letter not in words]
    return transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


IMAGE, STOP, PAD = "<image>", "</s>", "<pad>"


def chat_tokenizer(texts: Iterable[str]) -> Any:
    """Train a byte-level BPE tokenizer with one token for each word of the texts, as language models have it. It adds
    no special tokens.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    learnt.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, show_progress=False, special_tokens=[PAD, STOP, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learnt, eos_token=STOP, pad_token=PAD,
                                                extra_special_tokens={"image_token": IMAGE}, model_max_length=512)
