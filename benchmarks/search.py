"""``python -m benchmarks search``: nDCG@10 of mpool and of sentence-transformers on the same weights.

The collection is in Python's standard library. ``pydoc_data.topics`` holds the documents: topics of the language
reference. The index of ``help()`` (``pydoc.Helper``) holds the queries: keywords, symbols and names of topics. The
topic that ``help(query)`` shows has grade 2, and those that it lists as related have grade 1. Texts and index change
between versions of Python, so figures are comparable within one version only.

Dense vectors come from the weights of ``--model``. The sparse encoder and the cross-encoder are seeded with random
weights: their nDCG says nothing about quality, only whether both libraries rank alike. Every engine runs in a process
of its own. Nothing here measures speed.
"""

import argparse
import json
import math
import multiprocessing
import os
import pydoc
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import compare, report
from . import record as records
from .options import add_json, add_threads, found_here, parser_of
from .own_process import rss
from .probe import Probe

#: Ranks that count, and documents that are reranked.
BEST, CANDIDATES = 10, 20
#: Ranks of a ranking that are fused, and the constant of reciprocal rank fusion, as in docs/guides/search.md.
DEPTH, CONSTANT = 100, 60
#: Words of a passage, and those that it shares with the one before, as in docs/guides/search.md.
WORDS, OVERLAP = 120, 30
ENGINES = ("mpool:float32", "sentence-transformers")
#: Vocabulary and maximum length of the seeded models.
VOCABULARY, LENGTH = 1000, 64
UNIT = f"nDCG@{BEST}"


@dataclass(frozen=True)
class Collection:
    """Documents, queries and judgements.

    Attributes:
        names: names of the documents.
        texts: their texts, all different.
        queries: texts of the queries.
        grades: for each query, the number of every relevant document and its grade, 1 or 2.
    """

    names: list[str]
    texts: list[str]
    queries: list[str]
    grades: list[dict[int, int]]


def collection() -> Collection:
    """Return the collection of the running Python. Topics with equal texts are one document."""
    from pydoc_data.topics import topics

    labels: dict[str, list[str]] = {}
    for label, text in sorted(topics.items()):
        labels.setdefault(text, []).append(label)
    number = {label: at for at, group in enumerate(labels.values()) for label in group}
    queries, grades = [], []
    index: dict[str, Any] = {**pydoc.Helper.keywords, **pydoc.Helper.topics, **pydoc.Helper.symbols}
    for query in index:
        shown, related = _entry(query)
        if shown in number:
            queries.append(query)
            found = {number[label]: 1 for name in related if (label := _entry(name)[0]) in number}
            grades.append({**found, number[shown]: 2})
    return Collection([group[0] for group in labels.values()], list(labels), queries, grades)


def _entry(name: str) -> tuple[str, list[str]]:
    """Return the label of the topic that ``help(name)`` shows, "" for none, and the names that it lists as related."""
    more: list[str] = []
    found: Any = name
    if name in pydoc.Helper.symbols:
        found, *more = pydoc.Helper.symbols[name].split()
    while isinstance(found, str):
        following = pydoc.Helper.topics.get(found, pydoc.Helper.keywords.get(found))
        if not following:
            return "", []
        found = following
    label, related = found
    return label, [*related.split(), *more]


def ndcg(ranking: Sequence[int], grades: dict[int, int], k: int = BEST) -> float:
    """Return the normalised discounted cumulative gain of the first ``k`` documents of a ranking.

    The gain is the grade, and the discount of rank r, counted from 1, is log2(r + 1), as in trec_eval's ``ndcg_cut``.
    """
    def gain(row: Sequence[int]) -> float:
        return sum(grade / math.log2(rank + 2) for rank, grade in enumerate(row[:k]))

    ideal = gain(sorted(grades.values(), reverse=True))
    return gain([grades.get(int(document), 0) for document in ranking[:k]]) / ideal


def mean_ndcg(rankings: Sequence[Sequence[int]], grades: list[dict[int, int]]) -> float:
    """Return the mean of :func:`ndcg` over the queries."""
    return sum(ndcg(ranking, judged) for ranking, judged in zip(rankings, grades, strict=True)) / len(grades)


def passages(texts: list[str]) -> tuple[list[str], list[list[int]]]:
    """Cut texts into passages. Returns the different passages and, for each, the numbers of the texts that have it."""
    owners: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        words = text.split()
        for start in range(0, max(1, len(words) - OVERLAP), WORDS - OVERLAP):
            owners.setdefault(" ".join(words[start:start + WORDS]), []).append(number)
    return list(owners), list(owners.values())


def by_document(rankings: Sequence[Sequence[int]], owners: list[list[int]]) -> list[list[int]]:
    """Return rankings of documents from rankings of their passages: a document has the rank of its best passage."""
    return [list(dict.fromkeys(number for passage in ranking for number in owners[passage])) for ranking in rankings]


def fuse(count: int, *given: Sequence[int]) -> list[int]:
    """Return the ranking of ``count`` documents by reciprocal rank fusion, as in docs/guides/search.md."""
    points = np.zeros(count)
    for ranking in given:
        best = np.asarray(ranking[:DEPTH], np.int64)
        points[best] += 1 / (CONSTANT + np.arange(1, len(best) + 1))
    return [int(at) for at in np.argsort(-points, kind="stable")]


# ---- the engines: each method returns rankings, one row of numbers per query -----------------------------------------

class Mpool:
    """mpool in float32."""

    def __init__(self, threads: int) -> None:
        import mpool

        self.mpool, self.pool = mpool, mpool.Pool(mpool.PoolConfig(threads=threads))

    def dense(self, model: str, queries: list[str], texts: list[str]) -> Any:
        """Rank all texts by the cosine of their vectors to the query's."""
        index = self.pool.embed(texts, model, compute="float32", task="document")
        wanted = self.pool.embed(queries, model, compute="float32", task="query")
        return self.mpool.semantic_search(wanted, index, top_k=len(texts)).indices

    def sparse(self, model: str, queries: list[str], texts: list[str]) -> Any:
        """Rank all texts by the dot product of their sparse vectors with the query's."""
        index = self.pool.embed_sparse(texts, model, compute="float32", task="document")
        scores = self.pool.embed_sparse(queries, model, compute="float32", task="query").dot(index)
        return np.argsort(-scores, axis=1, kind="stable")

    def rerank(self, model: str, queries: list[str], texts: list[str], candidates: Any) -> Any:
        """Rank the candidates of each query with a cross-encoder."""
        return [[int(given[found.index]) for found in self.pool.rerank(
            query, [texts[at] for at in given], model, compute="float32")] for query, given in zip(queries, candidates)]


class Reference:
    """sentence-transformers."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)

    def dense(self, model: str, queries: list[str], texts: list[str]) -> Any:
        """As :meth:`Mpool.dense`."""
        from sentence_transformers import SentenceTransformer, util

        encoder = SentenceTransformer(model, device="cpu")
        found = util.semantic_search(encoder.encode_query(queries, convert_to_tensor=True),
                                     encoder.encode_document(texts, convert_to_tensor=True), top_k=len(texts))
        return [[hit["corpus_id"] for hit in hits] for hits in found]

    def sparse(self, model: str, queries: list[str], texts: list[str]) -> Any:
        """As :meth:`Mpool.sparse`."""
        from sentence_transformers import SparseEncoder

        encoder = SparseEncoder(model, device="cpu")
        scores = encoder.similarity(encoder.encode_query(queries), encoder.encode_document(texts))
        return np.argsort(-scores.numpy(), axis=1, kind="stable")

    def rerank(self, model: str, queries: list[str], texts: list[str], candidates: Any) -> Any:
        """As :meth:`Mpool.rerank`."""
        from sentence_transformers import CrossEncoder

        encoder = CrossEncoder(model, device="cpu")
        return [[int(given[hit["corpus_id"]]) for hit in encoder.rank(query, [texts[at] for at in given])]
                for query, given in zip(queries, candidates)]


# ---- the seeded models -----------------------------------------------------------------------------------------------

def write_seeded(folder: Path, texts: list[str]) -> tuple[str, str]:
    """Write a sparse encoder and a cross-encoder with random weights: BERT, two layers, the texts' words.

    Returns:
        The folders of both.
    """
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    sizes = dict(vocab_size=VOCABULARY, hidden_size=48, num_attention_heads=3, intermediate_size=90,
                 num_hidden_layers=2, max_position_embeddings=LENGTH)
    folders = [folder / name for name in ("masked", "sparse", "cross-encoder")]
    for kind, seed, target in ((transformers.BertForMaskedLM, 1, folders[0]),
                               (transformers.BertForSequenceClassification, 2, folders[2])):
        model = kind(transformers.BertConfig(**sizes, num_labels=1)).eval()
        _randomise(model, seed)
        model.tie_weights()
        model.save_pretrained(target)
        _write_tokenizer(target, texts)
    SparseEncoder(modules=[Transformer(str(folders[0]), transformer_task="fill-mask"), SpladePooling("max")],
                  device="cpu").save_pretrained(str(folders[1]))
    return str(folders[1]), str(folders[2])


def _randomise(model: Any, seed: int) -> None:
    """Fill the weights so that texts differ clearly: near ties would make the ranking depend on the last bit."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        noise = torch.randn(weights.shape, generator=generator)
        weights.data = 1 + 0.3 * noise if weights.dim() == 1 and name.endswith("LayerNorm.weight") else \
            noise * (0.3 if weights.dim() == 1 else 0.5 if "embeddings" in name else 1.5 / weights.shape[-1] ** 0.5)


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    words = [*special, *sorted(counts, key=lambda word: (-counts[word], word))][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LENGTH, "pad_token": "[PAD]",
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}))


# ---- the measurement -------------------------------------------------------------------------------------------------

def rankings(engine: str, threads: int, model: str, seeded: tuple[str, str], every: int = 1) -> dict[str, Any]:
    """Rank the collection with one engine.

    Args:
        engine: one of ``ENGINES``.
        threads: compute threads.
        model: folder of the dense encoder.
        seeded: folders of the sparse encoder and of the cross-encoder.
        every: take every n-th passage only, for a check that the command works.

    Returns:
        ``rankings`` (measure -> the first ten documents of each query) and ``rss MB``.
    """
    given = collection()
    run: Any = Mpool(threads) if engine.startswith("mpool") else Reference(threads)
    parts, owners = (found[::every] for found in passages(given.texts))
    sparse = run.sparse(seeded[0], given.queries, given.texts)
    dense = run.dense(model, given.queries, given.texts)
    fused = [fuse(len(given.texts), *rows) for rows in zip(dense, sparse, strict=True)]
    found = {"dense, whole topics": dense,
             "dense, passages": by_document(run.dense(model, given.queries, parts), owners),
             "sparse, seeded": sparse,
             "reranked, seeded": run.rerank(seeded[1], given.queries, given.texts, [
                 row[:CANDIDATES] for row in sparse]),
             "dense and sparse, fused": fused,
             "fused, reranked": run.rerank(seeded[1], given.queries, given.texts, [row[:CANDIDATES] for row in fused])}
    return {"rankings": {name: [[int(at) for at in row[:BEST]] for row in rows] for name, rows in found.items()},
            "rss MB": rss()}


def measure(engine: str, arguments: argparse.Namespace, probe: Probe, model: str, seeded: tuple[str, str],
            grades: list[dict[int, int]]) -> tuple[records.Turn, dict[str, Any]]:
    """Run an engine in its own process. Returns its turn and its rankings."""
    def run() -> dict[str, Any]:
        with multiprocessing.get_context("spawn").Pool(1) as child:
            found: dict[str, Any] = child.apply(rankings, (engine, arguments.threads, model, seeded,
                                                           20 if arguments.quick else 1))
            child.close()
            child.join()  # its CPU time counts as ours only after it was waited for
        return found

    found, frame = probe.around(run)
    ranked = found.pop("rankings")
    result = {**found, "compute": "float32", "counts": {"queries": len(grades)},
              "measures": {f"{name}, {UNIT}": mean_ndcg(rows, grades) for name, rows in ranked.items()}}
    return records.Turn("search", engine, 0, result, frame), ranked


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = parser_of("search", __doc__)
    parser.add_argument("--model", type=found_here, metavar="REF",
                        help="dense encoder, a sentence-transformers folder (default: mpool's default model)")
    add_threads(parser, min(2, len(os.sched_getaffinity(0))))
    add_json(parser)
    parser.add_argument("--quick", action="store_true", help="few passages: shows that the command runs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure both engines, print the table, write the record. Returns 1 if a figure differs in its third digit."""
    arguments = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    given, model = collection(), compare.weights(arguments.model, "text_embedding")
    probe, turns, ranked = Probe(), [], {}
    with tempfile.TemporaryDirectory() as name:
        seeded = write_seeded(Path(name), given.texts)
        for engine in ENGINES:
            turn, ranked[engine] = measure(engine, arguments, probe, model, seeded, given.grades)
            turns.append(turn)
    ours, theirs = (ranked[engine] for engine in ENGINES)
    record = records.build(
        "search", arguments.threads,
        {"queries": len(given.queries), "documents": len(given.texts), "passages": len(passages(given.texts)[0]),
         "judgements": sum(map(len, given.grades)), "quick": arguments.quick}, turns,
        weights={"embed": {"name": compare.name_of(model), "path": Path(model).name, "sha256": compare.hashed(model)}},
        versions=_versions(), summary=report.summary(turns), failures=[],
        agreement={"queries with the same first ten documents": {
            name: sum(a == b for a, b in zip(rows, theirs[name], strict=True)) for name, rows in ours.items()}})
    if arguments.json:
        records.write(record, arguments.json)
    print(f"{len(given.queries)} queries, {len(given.texts)} documents, {record['options']['passages']} passages")
    figures = [turn.result["measures"] for turn in turns]
    for name, value in figures[0].items():
        print(f"{name:30} mpool {value:.4f}   sentence-transformers {figures[1][name]:.4f}")
    return int(any(abs(value - figures[1][name]) >= 5e-4 for name, value in figures[0].items()))


def _versions() -> dict[str, str]:
    import sentence_transformers
    import torch

    import mpool

    return dict(zip(ENGINES, (mpool.__version__, f"{sentence_transformers.__version__} (torch {torch.__version__})")))


if __name__ == "__main__":
    sys.exit(main())
