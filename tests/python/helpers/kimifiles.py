"""Files of Kimi K2's tokenizer, as its repository has them."""

import base64
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "text"))

from make_lines import lines  # noqa: E402

#: The expression in Kimi's tokenization_kimi.py.
WORDS = "|".join((
    r"[\p{Han}]+", *(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + upper
                     + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + lower + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                     for upper, lower in (("*", "+"), ("+", "*"))),
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
BYTES = [bytes((byte,)) for byte in range(256)]
#: Places and texts of named special tokens, as in Kimi K2's tokenizer_config.json, and whether they are special.
NAMED = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 3: ("<|im_user|>", True),
         4: ("<|im_assistant|>", True), 10: ("<|im_system|>", True), 11: ("<|tool_calls_section_begin|>", False),
         17: ("<|im_middle|>", True), 254: ("[UNK]", True), 255: ("[PAD]", True)}
TEMPLATE = ("{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}")


def rank_file(tokens: Sequence[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def settings(first: int, **changes: Any) -> dict[str, Any]:
    decoder = {str(first + at): {"content": text, "special": special, "lstrip": False, "rstrip": False,
                                 "normalized": False, "single_word": False} for at, (text, special) in NAMED.items()}
    return {"added_tokens_decoder": decoder, "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]",
            "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]", "chat_template": TEMPLATE,
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, **changes}


def write(folder: Path, tokens: Sequence[bytes], **changes: Any) -> Path:
    (folder / "tiktoken.model").write_text(rank_file(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(len(tokens), **changes)))
    return folder


@cache
def trained() -> tuple[bytes, ...]:
    """A vocabulary that byte-pair encoding makes out of text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"),
                                                       pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.train_from_iterator(lines(1500), trainers.BpeTrainer(vocab_size=3000, show_progress=False))
    chars = [*map(chr, (*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)))]
    missing = [byte for byte in range(256) if chr(byte) not in chars]
    values = {char: ord(char) for char in chars} | {chr(0x100 + at): byte for at, byte in enumerate(missing)}
    made = [bytes(map(values.__getitem__, text))
            for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return (*BYTES, *(token for token in made if len(token) > 1))
