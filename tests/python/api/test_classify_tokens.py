"""mpool.classify_tokens compared with the pipelines of transformers on small seeded models; results; files; errors."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import token_labels

import rerankers
import tinymodels
from paritymodels import torch, transformers
from tokenclassifiers import FAMILIES, LABELS, make_token_classifier

TEXTS = ["A cat sat on the mat, and the Dog barked at it twice.", "", "   ", "\n\t", "a",
         "Zoë's café in Québec: naïve!", "e\u0301 o\u0308 cafe\u0301s \u1e9b\u0323 \ufb01sh",
         "日本語のテキスト and 東京都 in one", "ok 🙂👩‍👩‍👧 dog \U0001f1eb\U0001f1f7 end",
         "def main(argument):\n    return argument + 1\n",
         "İstanbul \u00adsoft\u200bzero \u0130", " two  spaces ", "[SE] [CL S] the-dog's (quick), fox_1.5%",
         "dog " * 80, "Привет ﷺ ½ ﬃ", "x" * 130]
AGGREGATIONS = ("none", "simple", "first", "average", "max")
LONG = " ".join(f"the quick {at} brown foxes, Café {at * 7} in 東京" for at in range(10))


#: Families of the default run: one for each kind of tokenizer, and the head with two layers.
USUAL = ("bert", "roberta", "xlm_roberta", "modern_bert")


class Folders(dict[str, Path]):
    """Token classifiers by family, each made when a test asks for it."""

    def __init__(self, made: pytest.TempPathFactory) -> None:
        self._made = made

    def __missing__(self, name: str) -> Path:
        self[name] = make_token_classifier(self._made.mktemp(name) / "model", name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are so small that threads of torch only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool():
    with mpool.Pool() as made:
        yield made


class Pipeline:
    """The pipeline of transformers, which computes the logits of a text once for all aggregations."""

    def __init__(self, folder: Path, side: str = "right") -> None:
        self.made = transformers.pipeline("token-classification", model=str(folder))
        self.made.tokenizer.model_max_length, self.made.tokenizer.truncation_side = 64, side
        self.seen: dict[Any, list[Any]] = {}

    def __call__(self, text: str, aggregation: str = "none", stride: int | None = None,
                 **options: Any) -> list[dict[str, Any]]:
        given = dict(aggregation_strategy=aggregation, **({} if stride is None else {"stride": stride}), **options)
        before, _, after = self.made._sanitize_parameters(**given)
        if (text, stride) not in self.seen:
            with torch.no_grad():
                self.seen[text, stride] = [self.made._forward(part) for part in self.made.preprocess(text, **before)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for vocabularies without words, it warns of its fallback
            return self.made.postprocess(self.seen[text, stride], **after)


def _theirs(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The spans of the pipeline, without the second copy of a first span without characters."""
    spans = [(one.get("entity_group", one.get("entity")), one["start"], one["end"], one["word"], one.get("index"))
             for one in found]
    return spans[1:] if len(spans) > 1 and spans[0] == spans[1] and spans[0][1] == spans[0][2] else spans


def _ours(found: Any) -> list[tuple[Any, ...]]:
    return [(one.label, one.start, one.end, one.word, one.index) for one in found]


def _compare(pool: mpool.Pool, made: Pipeline, folder: Path, texts: list[str], **options: Any) -> list[tuple[Any, ...]]:
    """Compare the spans of all texts. Returns all spans."""
    expected = [made(text, **options) for text in texts]
    found = pool.classify_tokens(texts, folder, compute="float32", **options)
    for text, ours, theirs in zip(texts, found, expected):
        assert _ours(ours) == _theirs(theirs), (text, options)
        scores = [one["score"] for one in theirs][len(theirs) - len(ours):]
        assert np.allclose([one.score for one in ours], scores, rtol=0, atol=1e-5)
    return [span for ours in found for span in _ours(ours)]


@pytest.mark.parametrize("name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow)
                                  for name in FAMILIES])
def test_spans_match_transformers(pool: mpool.Pool, folders: dict[str, Path], name: str) -> None:
    """Every aggregation, on texts whose normalisation changes their length; offsets are those of the caller's text."""
    made, seen = Pipeline(folders[name]), set()
    for aggregation in AGGREGATIONS:
        spans = _compare(pool, made, folders[name], TEXTS, aggregation=aggregation)
        seen |= {span[0] for span in spans}
        assert len(spans) > 50
    assert len(seen) > 5  # labels differ
    _compare(pool, made, folders[name], TEXTS, aggregation="none", ignore_labels=[])
    _compare(pool, made, folders[name], TEXTS, aggregation="simple", ignore_labels=["PER", "Y-Z"])


@pytest.mark.parametrize("name, stride", [("bert", 0), ("bert", 61), ("roberta", 7), ("xlm_roberta", 7)])
def test_windows_match_transformers(pool: mpool.Pool, folders: dict[str, Path], name: str, stride: int) -> None:
    for side in ("right", "left") if stride == 7 else ("right",):
        folder = folders[name]
        if side == "left":
            folder = Path(shutil.copytree(folder, folder.parent / f"left {stride}"))
            config = json.loads((folder / "tokenizer_config.json").read_text()) | {"truncation_side": "left"}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        made, long = Pipeline(folder, side), LONG if stride < 61 else LONG[:100]
        for aggregation in AGGREGATIONS[1:]:
            spans = _compare(pool, made, folder, [long, *TEXTS[:3], "dog " * 62], aggregation=aggregation,
                             stride=stride)
            assert max(span[2] for span in spans) > 62


def test_words_are_those_of_the_vocabulary(pool: mpool.Pool, tmp_path: Path) -> None:
    """Words of several tokens with different labels: strategies differ, and a cased vocabulary keeps accents."""
    folder = make_token_classifier(tmp_path / "model", "bert", seed=11)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    texts = ["zebras hexagonal quizzes", *TEXTS]
    made = Pipeline(folder)
    found = [_compare(pool, made, folder, texts, aggregation=one) for one in AGGREGATIONS]
    assert len({tuple(spans) for spans in found}) == 5


def test_the_description_states_no_embeddings(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    settings = pool.get(folders["bert"]).description.embedding
    assert settings.outputs == {"spans"} and settings.output_size == len(settings.token_labels) == len(LABELS)
    assert settings.normalize is settings.scores is False


def test_results(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    model = pool.get(folders["bert"])
    many, one = model.classify_tokens(TEXTS), model.classify_tokens(TEXTS[0])
    assert isinstance(many, mpool.TokenClassifications) and isinstance(one, mpool.results.TokenClassification)
    assert len(many) == len(TEXTS) and many[0] == one and many[-1] != one and many[1:3] == model.classify_tokens(
        TEXTS[1:3])
    assert many.labels == one.labels == LABELS and many.model == one.model == model.key and one.aggregation == "none"
    assert all(type(span) is mpool.results.LabelledSpan for span in one) and str(one[0]) == one[0].word == "a"
    assert one[:2] == one.spans[:2] and list(many)[0] == one and type(one[0].score) is float
    assert [TEXTS[0][span.start:span.end].lower() for span in one] == [span.word.removeprefix("##") for span in one]
    assert all(0 < span.score <= 1 and type(span.index) is int for span in one)
    assert len(model.classify_tokens([])) == 0 and len(many[1]) == len(many[2]) == 0
    for result in (one, many):
        assert pickle.loads(pickle.dumps(result)) == result and hash(result) == hash(pickle.loads(pickle.dumps(result)))
    near = pool.classify_tokens(TEXTS, folders["bert"], compute="bfloat16", ignore_labels=[])
    exact = pool.classify_tokens(TEXTS, folders["bert"], compute="float32", ignore_labels=[])
    assert [len(spans) for spans in near] == [len(spans) for spans in exact]
    same = [abs(a.score - b.score) for x, y in zip(near, exact) for a, b in zip(x, y) if a.label == b.label]
    assert np.median(same) < 0.02


async def _await(result: Any) -> Any:
    return await result


def test_only_tokens_that_the_model_reads_are_examined(pool: mpool.Pool, folders: dict[str, Path],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    from mpool.tasks import token_classification

    words, seen = token_classification._words, []

    def counted(plan: Any, text: str, *given: Any) -> Any:
        found = words(plan, text, *given)
        if text == long:  # requests of other tests may still end
            seen.append(len(found[0]))
        return found

    long = "dog " * 5000
    monkeypatch.setattr(token_classification, "_words", counted)
    assert len(pool.classify_tokens(long, folders["bert"], ignore_labels=[])) == 62
    assert seen == [62]


def test_progress_counts_texts(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    seen: list[tuple[int, int | None]] = []
    pool.classify_tokens([LONG] * 3, folders["bert"], stride=3, aggregation="simple",
                         progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 3)]


def test_texts_of_control_tokens_are_plain_text(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    """As in every function; ``parse_special`` reads them as transformers does."""
    for name, text in (("bert", "A [SEP] cat [MASK][CLS] é[SEP]"), ("xlm_roberta", "A </s> cat<mask> é <s>"),
                       ("roberta", "A </s> cat<mask> é <s>")):
        expected = Pipeline(folders[name])(text, ignore_labels=[])
        found = pool.classify_tokens(text, folders[name], ignore_labels=[], parse_special=True, compute="float32")
        assert _ours(found) == _theirs(expected)
        plain = pool.classify_tokens(text, folders[name], ignore_labels=[])
        assert len(plain) > len(found)
        covered = {at for span in plain for at in range(span.start, span.end)}
        assert covered == {at for at, char in enumerate(text) if char != " "} or name != "bert"
        special = {"[SEP]", "[CLS]", "[MASK]", "</s>", "<s>", "<mask>"}
        assert not special & {span.word for span in plain}


@pytest.mark.parametrize("texts, options, error, message", [
    (7, {}, mpool.InvalidArgument, "`texts` must be .*, got 7"),
    ({"a": 1}, {}, mpool.InvalidArgument, "`texts` must be .*, got dict"),
    ([7], {}, mpool.InvalidArgument, r"`texts\[0\]` must be .* got int"),
    (["a", None], {}, mpool.InvalidArgument, r"`texts\[1\]` must be .* got NoneType"),
    ([[1, 2]], {}, mpool.InvalidArgument, r"`texts\[0\]` must be .* got list"),
    ([("a", "b")], {}, mpool.InvalidArgument, r"`texts\[0\]` must be .* got tuple"),
    (["a", "b\ud800"], {}, mpool.InvalidArgument, r"`texts\[1\]` must be Unicode text"),
    ("b\ud800", {"stride": 3, "aggregation": "max"}, mpool.InvalidArgument, "surrogate"),
    (["x" * 1_000_001], {}, mpool.InvalidArgument, "got 1,000,001 characters"),
    (["a"] * 3, {"max_inputs": 2}, mpool.LimitError, "at most 2 texts, got 3"),
    ([LONG] * 3, {"max_inputs": 9, "stride": 61, "aggregation": "simple"}, mpool.LimitError, "at most 9 windows of 64"),
    (TEXTS, {"aggregation": "last"}, mpool.InvalidArgument, "`aggregation` must be one of none, simple, first"),
    (TEXTS, {"aggregation": None}, mpool.InvalidArgument, "`aggregation` must be one of none"),
    (TEXTS, {"stride": 3}, mpool.InvalidArgument, '`stride` must be None with aggregation="none", got 3'),
    (TEXTS, {"stride": -1, "aggregation": "max"}, mpool.InvalidArgument,
     "`stride` must be an integer of 0 or more tokens, or None"),
    (TEXTS, {"stride": True, "aggregation": "max"}, mpool.InvalidArgument, "`stride` must be an integer of 0 or more"),
    (TEXTS, {"stride": 62, "aggregation": "max"}, mpool.InvalidArgument, "`stride` must be less than 62, the number"),
    (TEXTS, {"stride": 2, "aggregation": "max", "truncate": False}, mpool.InvalidArgument, "`truncate` must be True"),
    (TEXTS, {"ignore_labels": "O"}, mpool.InvalidArgument, "`ignore_labels` must be a list of str, got 'O'"),
    (TEXTS, {"ignore_labels": None}, mpool.InvalidArgument, "`ignore_labels` must be a list of str, got None"),
    (TEXTS, {"ignore_labels": ["O", 3]}, mpool.InvalidArgument, r"`ignore_labels\[1\]` must be a str, got 3"),
    (TEXTS, {"ignore_labels": ["O"] * 70_000}, mpool.LimitError, "at most 65,536 labels"),
    (TEXTS, {"truncate": False}, mpool.ContextOverflow, r"`texts\[13\]` has 82 tokens, the model accepts at most 64"),
    (TEXTS, {"labels": ["a"]}, mpool.InvalidArgument, "`labels` is not an option of classify_tokens"),
    (TEXTS, {"top_k": 1}, mpool.InvalidArgument, "`top_k` is not an option of classify_tokens"),
    (TEXTS, {"progress": 1}, mpool.InvalidArgument, "`progress` must be"),
], ids=lambda value: str(value)[:40])
def test_bad_input(pool: mpool.Pool, folders: dict[str, Path], texts: Any, options: dict[str, Any],
                   error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pool.classify_tokens(texts, folders["bert"], **options)
    with pytest.raises(error, match=message):
        asyncio.run(_await(mpool.aio.classify_tokens(texts, folders["bert"], pool=pool, **options)))


def test_results_are_limited_in_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    """The logits of a slice, and the spans of a request, take at most a quarter of the memory limit."""
    folder = make_token_classifier(tmp_path / "model", "bert", tuple(f"L{at}" for at in range(900)))
    with mpool.Pool(mpool.PoolConfig(memory_bytes=60 * 10**6)) as small:
        assert len(small.classify_tokens(["dog " * 60] * 60, folder)) == 60
        with pytest.raises(mpool.LimitError, match="`texts` needs at least .* MB for its result, the limit is 15.0 MB"):
            small.classify_tokens(["dog " * 60] * 100, folder)
    spans = [mpool.results.LabelledSpan("a", 0.5, 0, 1, "dog")] * 10
    assert token_labels.size_of(spans) == 10 * (256 + 12)


def test_models_of_other_kinds_are_refused(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    encoder, tokens = tinymodels.bert(tmp_path / "encoder"), folders["bert"]
    labels = rerankers.make_classifier(tmp_path / "classifier", "bert", ("good", "bad"))
    ranker = rerankers.make_reranker(tmp_path / "ranker", "bert")
    for folder, kind, hint in ((encoder, "an embedding model", "mpool.embed"), (labels, "a classifier with 2 labels",
                               "mpool.classify"), (ranker, "a reranker", "mpool.classify|mpool.rerank")):
        with pytest.raises(mpool.WrongCapability, match=f"is {kind}, not a token classifier") as caught:
            pool.classify_tokens(TEXTS, folder)
        assert any(f"{one}(" in str(caught.value.hint) for one in hint.split("|"))
    for call in (lambda: pool.classify(TEXTS, tokens), lambda: pool.classify(TEXTS, tokens, labels=["a"]),
                 lambda: pool.embed("A text.", tokens), lambda: pool.embed_tokens("A text.", tokens),
                 lambda: pool.embed_sparse("A text.", tokens), lambda: pool.rerank("a", ["b"], tokens),
                 lambda: list(pool.embed_iter(["a"], tokens))):
        with pytest.raises(mpool.WrongCapability, match="is a token classifier with 7 labels") as caught:
            call()
        assert "mpool.classify_tokens(" in str(caught.value.hint), caught.value
    with pytest.raises(mpool.WrongCapability, match="is a token classifier with 7 labels, which computes no"):
        pool.get(tokens).dimensions
    with pytest.raises(mpool.InvalidArgument, match="`model` must be a token classifier, got None"):
        pool.classify_tokens(TEXTS, None)  # type: ignore[call-overload]


# ---- rules -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens, room, stride", [(5, 5, 2), (6, 5, 2), (9, 5, 4), (100, 7, 0), (100, 7, 6), (1, 1, 0)])
def test_windows_are_those_of_tokenizers(tokens: int, room: int, stride: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    for side in ("right", "left"):
        made.enable_truncation(room, stride=stride, direction=side)
        found = made.encode("a " * tokens)
        expected = [(part.offsets[0][0] // 2, part.offsets[-1][0] // 2 + 1) for part in (found, *found.overflowing)]
        assert token_labels.windows(tokens, room, stride, side == "left") == expected
        assert token_labels.count_windows(tokens, room, stride) == len(expected)


def test_the_regular_expressions_of_a_tokenizer_may_need_a_process(pool: mpool.Pool, folders: dict[str, Path],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers that are run in a process of their own return the same places."""
    from mpool.tokenizers import native

    expected = pool.classify_tokens(TEXTS, folders["bert"])
    monkeypatch.setattr(native.Native, "_is_bounded", lambda self, texts: False)
    with mpool.Pool() as other:
        model = other.get(folders["bert"])
        inner = model.tokenizer._native
        monkeypatch.setattr(inner, "_free", 0)
        assert model.classify_tokens(TEXTS) == expected
        assert inner._isolated is not None


# ---- files -----------------------------------------------------------------------------------------------------------
