"""``python -m benchmarks static``: static embeddings: the core alone, end to end, the tokenizer's own batch rate, and
model2vec if it is installed.

A seeded WordPiece vocabulary of 30,000 words, a float32 table of 256 components, 20,000 texts of 10 words. Every turn
runs each engine once, in an order that alternates; a line gives the best and the median rate in texts per second.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import __version__ as tokenizers_version

import mpool

from .options import add_json, parser_of
from .record import Recorder

WORDS, DIM, TEXTS, LENGTH = 30_000, 256, 20_000, 10


def write(folder: Path) -> list[str]:
    """Write the model; return the texts."""
    random = np.random.default_rng(0)
    words = sorted({"".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), random.integers(3, 9)))
                    for _ in range(WORDS)})
    vocabulary = {text: number for number, text in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"embeddings": random.standard_normal((len(vocabulary), DIM)).astype(np.float32)},
              folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    return [" ".join(text) for text in random.choice(np.array(words), (TEXTS, LENGTH))]


def main() -> int:
    """Run the command line."""
    parser = parser_of("static", __doc__)
    parser.add_argument("--turns", type=int, default=10, help="number of turns (default: %(default)s)")
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        texts = write(Path(name))
        tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")
        pool = mpool.Pool(mpool.PoolConfig(max_embed_inputs=TEXTS))
        ids = np.array([encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)],
                       np.int32)
        offsets = np.arange(TEXTS + 1, dtype=np.int64) * LENGTH
        pool.embed(texts, name)
        key = pool.load(name)._entry.core_key()
        calls: dict[str, Callable[[], object]] = {
            "tokenizer": lambda: tokenizer.encode_batch_fast(texts, add_special_tokens=False),
            "mpool": lambda: pool.embed(texts, name)}
        calls["mpool:core"] = lambda: pool.registry.embed(key, ids.reshape(-1), offsets)
        recorder = Recorder("static", len(os.sched_getaffinity(0)), texts=TEXTS, words=LENGTH, components=DIM)
        recorder.versions["tokenizer"] = tokenizers_version
        try:
            from model2vec import StaticModel
            from model2vec import __version__ as model2vec_version
        except ImportError:
            pass
        else:
            other = StaticModel.from_pretrained(name)
            np.testing.assert_allclose(other.encode(texts[:50]), pool.embed(texts[:50], name), atol=1e-5)
            calls["model2vec"] = lambda: other.encode(texts)
            recorder.versions["model2vec"] = model2vec_version
        print(f"n = {args.turns}, load {os.getloadavg()}")
        rates = recorder.rotate("static", "texts/s", lambda seconds: TEXTS / seconds, calls, args.turns)
        for engine, found in rates.items():
            print(f"{engine:10} {max(found):10,.0f} texts/s at best, {statistics.median(found):10,.0f} median")
        print(f"load {os.getloadavg()}")
        if args.json:
            recorder.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
