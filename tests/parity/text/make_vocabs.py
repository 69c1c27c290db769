"""Small synthetic vocabularies for every kind of GGUF tokenizer; writes ``goldens/vocabs.json.xz``.

Needs HF ``tokenizers``, which finds the merges. The result is committed, so that tests train nothing:

    python tests/parity/text/make_vocabs.py
"""

import base64
import json
import lzma
import math
import struct
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[2]))  # at the end: the sources must not hide what is installed

from make_lines import lines  # noqa: E402

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def _train(texts: list[str], alphabet: list[str], size: int, characters: int = 1 << 20) -> list[tuple[str, str]]:
    """Train BPE merges over whole texts. Without words as limits, the merges cross every boundary of a
    pre-tokenizer.
    """
    from tokenizers import Tokenizer, models, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False,
                                                             initial_alphabet=alphabet, max_token_length=12,
                                                             limit_alphabet=characters))
    model = json.loads(tokenizer.to_str())["model"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]


def bpe() -> dict:
    """Byte-level BPE whose merges cross word boundaries, digits, contractions and lines: a missing cut changes the
    ids.
    """
    from mpool.models.formats.byte_pairs import byte_alphabet
    alphabet = byte_alphabet()
    texts = ["".join(alphabet[byte] for byte in line.encode()) for line in lines(6000)]
    merges = _train(texts, list(alphabet.values()), 5000)
    tokens = ["<|end|>", *(alphabet[byte] for byte in range(256))]
    known = set(tokens)
    for left, right in merges:
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
    tokens += ["<|user|>", "@user defined@", "<dummy>"]
    types = [CONTROL] + [NORMAL] * (len(tokens) - 4) + [CONTROL, USER_DEFINED, UNUSED]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0}


def spm() -> dict:
    """SentencePiece BPE: scores instead of merges, byte tokens, user-defined and unused tokens."""
    texts = [line.replace(" ", "▁") for line in lines(6000)]
    characters = [char for char, count in Counter("".join(texts)).most_common(700)]
    merges = _train(texts, [], 3000, 700)
    tokens, types, scores = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL], [0.0, 0.0, 0.0]
    for byte in range(256):
        tokens.append(f"<0x{byte:02X}>"), types.append(BYTE), scores.append(0.0)
    tokens += ["<user>", "\n\n", "[ a b ]"]
    types += [USER_DEFINED, USER_DEFINED, USER_DEFINED]
    scores += [0.0, 0.0, 0.0]
    known = set(tokens)
    for rank, (left, right) in enumerate(merges):
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right), types.append(NORMAL), scores.append(float(-rank))
    for char in characters:
        if char not in known:
            known.add(char)
            tokens.append(char), types.append(NORMAL), scores.append(float(-len(merges) - len(tokens)))
    types[300], types[301] = UNUSED, UNUSED
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0}


def unigram() -> dict:
    """Unigram with log probabilities and a character map."""
    counts: Counter[str] = Counter()
    for line in lines(3000):
        text = "▁" + "▁".join(line.split())
        for start in range(len(text)):
            for end in range(start + 1, min(start + 7, len(text) + 1)):
                if "▁" not in text[start + 1:end]:
                    counts[text[start:end]] += 1
    total = sum(counts.values())
    tokens = ["<pad>", "</s>", "<unk>"]
    types, scores = [CONTROL, CONTROL, UNKNOWN], [0.0, 0.0, 0.0]
    wanted = [piece for piece, count in sorted(counts.items(), key=lambda item: (-item[1] * len(item[0]), item[0]))
              if count > 1 and piece not in ("<pad>", "</s>", "<unk>", "@@x@@", "zzzz")][:4000]
    for piece in wanted:
        # float32, as the file stores it; minus a fraction of the rank, so that no two scores are equal
        score = math.log(counts[piece] / total) - len(tokens) * 1e-4
        tokens.append(piece), types.append(NORMAL), scores.append(round(score, 4))
    tokens += ["<extra_id_0>", "@@x@@", "zzzz"]
    types += [CONTROL, USER_DEFINED, UNUSED]
    scores += [0.0, 0.0, -9.5]
    return {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2,
            "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_space_prefix": True,
            "tokenizer.ggml.remove_extra_whitespaces": True,
            "tokenizer.ggml.precompiled_charsmap": base64.b64encode(charsmap(CHARSMAP)).decode()}


#: Rows of the synthetic map: single characters, sequences, rows that are prefixes of other rows, removals.
CHARSMAP = {
    "\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u2028": " ", "\u200b": "", "\u00ad": "",
    "\ufeff": "",
    "ﬁ": "fi", "ﬂ": "fl", "①": "1", "②": "2", "½": "1⁄2", "㎏": "kg", "ｱ": "ア", "ｶ": "カ", "ｶﾞ": "ガ",
    "Ａ": "A", "Ｂ": "B",
    "…": "...", "™": "TM", "²": "2", "a\u0301": "á", "e\u0301": "é", "e\u0302": "ê", "e\u0302\u0301": "ế",
    "E\u0301": "É",
    "n\u0303": "ñ", "A\u030a": "Å", "\u1112\u1161": "하", "\u1112\u1161\u11ab": "한", "İ": "I", "\u0340": "\u0300",
}


def charsmap(rows: dict[str, str]) -> bytes:
    """Encode the rows as SentencePiece stores them: a double-array trie with a block of 256 units for every state."""
    strings, starts = bytearray(), {}
    for value in rows.values():
        if value not in starts:
            starts[value] = len(strings)
            strings += value.encode() + b"\0"
    trie: dict = {}
    for key, value in rows.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node["value"] = starts[value]
    units = [0] * 256

    def fill(node: dict, index: int) -> None:
        block = len(units)
        units.extend([0] * 256)
        units[index] |= (index ^ block) << 10
        if "value" in node:
            units[index] |= 1 << 8
            units[block] = node["value"] | 1 << 31
        for byte, child in node.items():
            if byte != "value":
                units[block ^ byte] |= byte
                fill(child, block ^ byte)

    fill(trie, 0)
    blob = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(blob).to_bytes(4, "little") + blob + bytes(strings)


def wordpiece() -> dict:
    """WordPiece as GGUF stores it: a phantom space marks the start of a word."""
    starts: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    for line in lines(3000):
        for word in "".join(char if char.isalnum() else " " for char in line.lower()).split():
            for end in range(1, min(len(word), 8) + 1):
                starts[word[:end]] += 1
            for start in range(1, len(word)):
                for end in range(start + 1, min(start + 5, len(word)) + 1):
                    inner[word[start:end]] += 1
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]"]
    types = [CONTROL] * 5 + [NORMAL]
    known = set(tokens)
    pieces = [*("▁" + char for char in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")]
    pieces += ["▁" + word for word, count in sorted(starts.items(), key=lambda item: (-item[1], item[0]))[:2500]]
    pieces += [piece for piece, count in sorted(inner.items(), key=lambda item: (-item[1], item[0]))[:1500]]
    for piece in pieces:
        if piece not in known:
            known.add(piece)
            tokens.append(piece), types.append(NORMAL)
    return {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 1,
            "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.cls_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.mask_token_id": 4}


def load() -> dict[str, dict]:
    """Return the stored vocabularies by name, as keys and values of a GGUF file."""
    with lzma.open(HERE / "goldens" / "vocabs.json.xz") as stream:
        vocabs = json.load(stream)
    for kv in vocabs.values():
        if "tokenizer.ggml.scores" in kv:  # a file holds float32
            kv["tokenizer.ggml.scores"] = [struct.unpack("<f", struct.pack("<f", score))[0]
                                           for score in kv["tokenizer.ggml.scores"]]
        if "tokenizer.ggml.precompiled_charsmap" in kv:
            kv["tokenizer.ggml.precompiled_charsmap"] = list(
                base64.b64decode(kv["tokenizer.ggml.precompiled_charsmap"]))
    return vocabs


if __name__ == "__main__":
    made = {"bpe": bpe(), "spm": spm(), "unigram": unigram(), "wordpiece": wordpiece()}
    (HERE / "goldens").mkdir(exist_ok=True)
    data = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
    target = HERE / "goldens" / "vocabs.json.xz"
    target.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    for name, kv in made.items():
        print(name, len(kv["tokenizer.ggml.tokens"]), "tokens")
    print(target.stat().st_size, "bytes")
