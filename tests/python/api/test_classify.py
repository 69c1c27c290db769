"""mpool.classify compared with the pipelines of transformers on small seeded models; results; files; errors."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import tinymodels
from paritymodels import torch, transformers
from rerankers import make_classifier, make_reranker, set_config

TEXTS = ["A cat sat on the mat, and the dog barked at it twice.", "Numbers 0 1 2 3 4 5", "The quick brown fox.",
         "def main(argument):\n    return argument + 1\n", "dog " * 80, "The quick brown fox.", "a"]
PAIRS = [(text, other) for text, other in zip(TEXTS, ["The dog sleeps.", "x " * 90, *TEXTS[:5]])]
NAMES = ["bert", "xlm_roberta", "mpnet", "gte", "modern_bert", "modern_bert_mean", "distilbert", "electra", "albert",
         "deberta_v3", "eurobert_mean"]
NLI = ("contradiction", "neutral", "Entailment")
LABELS = ["cats", "dogs and foxes", "finance"]
CUT = dict(truncation=True, max_length=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_classifier(tmp_path_factory.mktemp(name) / "model", name, NLI) for name in NAMES}


@pytest.fixture(scope="module")
def pool():
    with mpool.Pool() as made:
        yield made


def _pipeline(task: str, folder: Path, **options: Any) -> Any:
    made = transformers.pipeline(task, model=str(folder), **options)
    made.tokenizer.model_max_length = 64
    return made


def _rows(found: list[list[dict[str, Any]]], labels: tuple[str, ...]) -> np.ndarray:
    return np.array([[next(one["score"] for one in row if one["label"] == label) for label in labels] for row in found])


def _expected(folder: Path, texts: list[Any], labels: tuple[str, ...] = NLI, **options: Any) -> np.ndarray:
    made = _pipeline("text-classification", folder, top_k=None)
    given = [{"text": one[0], "text_pair": one[1]} if isinstance(one, tuple) else one for one in texts]
    return _rows(made(given, **CUT, **options), labels)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [TEXTS, PAIRS], ids=["texts", "pairs"])
def test_scores_match_transformers(pool: mpool.Pool, folders: dict[str, Path], name: str, inputs: list[Any]) -> None:
    expected = _expected(folders[name], inputs)
    found = pool.classify(inputs, folders[name], compute="float32")
    assert np.ptp(expected, axis=0).max() > 0.01  # the scores of the texts differ
    assert found.scores.shape == (len(inputs), 3) and np.abs(found.scores - expected).max() <= 1e-5
    assert found.labels == NLI and [one.label for one in found] == [NLI[at] for at in expected.argmax(axis=1)]
    # bfloat16 has 8 bits of precision: the scores of these models are up to 0.017 from those in float32
    near = pool.classify(inputs, folders[name], compute="bfloat16")
    assert np.abs(near.scores - expected).max() <= 0.03


@pytest.mark.sample(3)
@pytest.mark.parametrize("family, labels, problem, function", [
    ("bert", ("a", "b", "c"), None, "softmax"), ("bert", ("a", "b"), "single_label_classification", "softmax"),
    ("bert", ("a", "b", "c"), "regression", "none"), ("bert", ("a",), "regression", "none"),
    ("bert", ("a",), None, "sigmoid"), ("bert", ("a",), "multi_label_classification", "sigmoid"),
    *((family, ("a", "b", "c"), "multi_label_classification", "sigmoid")
      for family in ("bert", "distilbert", "modern_bert", "deberta_v3", "xlm_roberta"))])
def test_the_problem_type_chooses_the_function(pool: mpool.Pool, tmp_path: Path, family: str, labels: tuple[str, ...],
                                               problem: str | None, function: str) -> None:
    folder = make_classifier(tmp_path / "model", family, labels, problem_type=problem)
    texts = TEXTS[:3]
    expected = _expected(folder, texts, labels)
    found = pool.classify(texts, folder, compute="float32")
    assert np.abs(found.scores - expected).max() <= 1e-5
    assert np.array_equal(found.scores, pool.classify(texts, folder, compute="float32",
                                                      function_to_apply=function).scores)
    for other in ("softmax", "sigmoid", "none"):
        expected = _expected(folder, texts, labels, function_to_apply=other)
        given = pool.classify(texts, folder, compute="float32", function_to_apply=other)
        assert np.abs(given.scores - expected).max() <= 1e-5, other
    pool.unload(folder)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family, names", [
    ("bert", NLI), ("bert", ("ENTAIL", "not")), ("bert", ("x", "entailment", "y", "z")), ("modern_bert", NLI),
    ("deberta_v3", ("entailment", "neutral", "contradiction")), ("xlm_roberta", NLI)], ids=str)
def test_zero_shot_matches_transformers(pool: mpool.Pool, tmp_path: Path, family: str, names: tuple[str, ...]) -> None:
    """The entailment is the first, a middle or the last label. A text that is too long loses its end, also if the
    hypothesis is longer."""
    folder = make_classifier(tmp_path / "model", family, names)
    made = _pipeline("zero-shot-classification", folder)
    for options in ({}, {"multi_label": True}, {"labels": ["cats"]}, {"template": "It is about {}!"},
                    {"labels": ["dog " * 30 + "fox", "cats"]}):
        wanted = options.get("labels", LABELS)
        given = {"candidate_labels": wanted, "multi_label": "multi_label" in options,
                 "hypothesis_template": options.get("template", "This example is {}.")}
        expected = np.array([[row["scores"][row["labels"].index(label)] for label in wanted]
                             for row in (made(text, **given) for text in TEXTS)])
        found = pool.classify(TEXTS, folder, compute="float32", **{"labels": LABELS, **options})
        assert np.abs(found.scores - expected).max() <= 1e-5 and found.labels == tuple(wanted), options
        assert np.ptp(expected, axis=0).max() > 1e-3
        single = pool.classify(TEXTS[0], folder, compute="float32", top_k=2, **{"labels": LABELS, **options})
        assert np.array_equal(single.scores, found.scores[0]) and len(single) == min(2, len(wanted))
    pool.unload(folder)


def test_the_description_states_no_embeddings(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    settings = pool.get(folders["bert"]).description.embedding
    assert settings.outputs == {"labels"} and settings.output_size == len(NLI)
    assert settings.normalize is settings.scores is False


def test_results(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    model = pool.get(folders["bert"])
    many, one = model.classify(TEXTS), model.classify(TEXTS[0])
    assert isinstance(many, mpool.Classifications) and isinstance(one, mpool.results.Classification)
    assert len(many) == len(TEXTS) and many[0] == one and hash(many[0]) == hash(one) and many[-1] != one
    assert many.model == one.model == model.key and many[1:3] == model.classify(TEXTS[1:3]) and many != many[1:]
    assert [type(result) for result in one] == [mpool.results.LabelScore] * 3
    assert len(one) == 3 and str(one) == one.label
    assert [result.score for result in one] == sorted(one.scores.tolist(), reverse=True)
    assert one[0].label == one.label == NLI[one[0].index] and one[0].score == one.score == one.scores.max()
    best = model.classify(TEXTS[0], top_k=1)
    assert best.results == one.results[:1] and len(best) == 1 and best.scores.shape == (3,)
    assert len(model.classify(TEXTS[0], top_k=9)) == 9 - 6
    assert len(model.classify([])) == 0 and model.classify([]).scores.shape == (0, 3)
    assert model.classify([], labels=["a", "b"]).scores.shape == (0, 2)
    for result in (one, many):
        assert pickle.loads(pickle.dumps(result)) == result
        with pytest.raises(ValueError, match="read-only"):
            result.scores[0] = 0
    equal = mpool.results.Classification(np.float32([0.25, 0.5, 0.5]), ("a", "b", "c"), "m")
    assert equal.label == "b" and [result.label for result in equal] == ["b", "c", "a"]  # ties keep their order


def test_progress_counts_texts_and_pairs(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    seen: list[tuple[int, int | None]] = []
    pool.classify(TEXTS, folders["bert"], progress=lambda done, total: seen.append((done, total)))
    pool.classify(TEXTS, folders["bert"], labels=["a", "b"], progress=lambda done, total: seen.append((done, total)))
    pool.classify(TEXTS[0], folders["bert"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(7, 7), (14, 14), (1, 1)]


@pytest.mark.parametrize("texts, options, error, message", [
    (7, {}, mpool.InvalidArgument, "`texts` must be .*, got 7"),
    ({"a": 1}, {}, mpool.InvalidArgument, "`texts` must be .*, got dict"),
    ([7], {}, mpool.InvalidArgument, r"`texts\[0\]` must be .* got int"),
    (["a", "b\ud800"], {}, mpool.InvalidArgument, "surrogate"),
    (["x" * 1_000_001], {}, mpool.InvalidArgument, "got 1,000,001 characters"),
    (["a"] * 3, {"max_inputs": 2}, mpool.LimitError, "at most 2 texts, got 3"),
    ([("a", "b"), "c"], {}, mpool.InvalidArgument, r"`texts\[1\]` must be a pair of texts, as the first one, got str"),
    ([("a", "b", "c")], {}, mpool.InvalidArgument, r"`texts\[0\]` must be a pair of texts.*, got 3 texts"),
    ([("a", 1)], {}, mpool.InvalidArgument, r"`texts\[0\]\[1\]` must be .*, got int"),
    ([("a", "b\ud800")], {}, mpool.InvalidArgument, r"`texts\[0\]\[1\]` must be Unicode text"),
    ([[1, 2]], {}, mpool.InvalidArgument, r"`texts\[0\]\[0\]` must be .*, got int"),
    (TEXTS, {"top_k": 0}, mpool.InvalidArgument, "`top_k` must be an integer of 1 or more.*, got 0"),
    (TEXTS, {"top_k": True}, mpool.InvalidArgument, "`top_k` must be an integer of 1 or more.*, got True"),
    (TEXTS, {"function_to_apply": "relu"}, mpool.InvalidArgument, "`function_to_apply` must be one of None, softmax"),
    (TEXTS, {"truncate": False}, mpool.ContextOverflow, r"`texts\[4\]` has 82 tokens, the model accepts at most 64"),
    (PAIRS, {"truncate": False}, mpool.ContextOverflow, r"`texts\[0\]` has \d+ tokens|`texts\[1\]` has"),
    (TEXTS, {"normalize": True}, mpool.InvalidArgument, "`normalize` is not an option of classify"),
    (TEXTS, {"template": "{}"}, mpool.InvalidArgument, "`template` must be 'This example is {}.' without labels"),
    (TEXTS, {"multi_label": True}, mpool.InvalidArgument, "`multi_label` must be False without labels"),
    (TEXTS, {"labels": []}, mpool.InvalidArgument, "`labels` must be a list of at least one str, got"),
    (TEXTS, {"labels": "a,b"}, mpool.InvalidArgument, "`labels` must be a list of at least one str, got 'a,b'"),
    (TEXTS, {"labels": {"a": 1}}, mpool.InvalidArgument, "`labels` must be a list"),
    (TEXTS, {"labels": 3}, mpool.InvalidArgument, "`labels` must be a list"),
    (TEXTS, {"labels": ["a", 3]}, mpool.InvalidArgument, r"`labels\[1\]` must be .*, got int"),
    (TEXTS, {"labels": ["a", ""]}, mpool.InvalidArgument, r"`labels\[1\]` must be .*, got an empty str"),
    (TEXTS, {"labels": ["a\udc00"]}, mpool.InvalidArgument, r"`labels\[0\]` must be Unicode text"),
    (TEXTS, {"labels": ["a", "b", "a"]}, mpool.InvalidArgument, r"`labels\[2\]` must be a label that is not in the"),
    (TEXTS, {"labels": ["a"], "multi_label": 1}, mpool.InvalidArgument, "`multi_label` must be one of True, False"),
    (TEXTS, {"labels": ["a"], "function_to_apply": "none"}, mpool.InvalidArgument, "must be None with labels"),
    (TEXTS, {"labels": ["a"], "template": "It is."}, mpool.InvalidArgument, "`template` must be a text with {} once"),
    (TEXTS, {"labels": ["a"], "template": "{} {}"}, mpool.InvalidArgument, "`template` must be a text with {} once"),
    (TEXTS, {"labels": ["a"], "template": "{0} {}"}, mpool.InvalidArgument, "without other braces"),
    (TEXTS, {"labels": ["a"], "template": "{0.__class__}"}, mpool.InvalidArgument, "without other braces"),
    (TEXTS, {"labels": ["a"], "template": "{:>1000000000}"}, mpool.InvalidArgument, "without other braces"),
    (TEXTS, {"labels": ["a"], "template": None}, mpool.InvalidArgument, "`template` must be a str of 1 to"),
    (TEXTS, {"labels": ["a"], "template": "{}\ud800"}, mpool.InvalidArgument, "`template` must be Unicode text"),
    (TEXTS, {"labels": [str(at) for at in range(1000)], "template": "x" * 999_998 + "{}"}, mpool.LimitError,
     "`template` with all labels must have at most 1,000,000 characters, got 1,000,000,890|got 1,000,000,"),
    (["a"] * 5, {"labels": ["a", "b", "c"], "max_inputs": 10}, mpool.LimitError,
     "at most 10 pairs with the texts, got 5 texts times 3"),
    (PAIRS, {"labels": ["a"]}, mpool.InvalidArgument, "`texts` must be single texts with labels"),
    ([3], {"labels": ["a"]}, mpool.InvalidArgument, r"`texts\[0\]` must be .*, got int"),
    (TEXTS, {"labels": ["dog " * 70]}, mpool.ContextOverflow, r"`labels\[0\]` has a hypothesis of 83 tokens"),
    (TEXTS, {"labels": ["a"], "truncate": False}, mpool.ContextOverflow, r"`texts\[\d\]` with its hypothesis has"),
    (TEXTS, {"progress": 1}, mpool.InvalidArgument, "`progress` must be"),
], ids=lambda value: str(value)[:40])
def test_bad_input(pool: mpool.Pool, folders: dict[str, Path], texts: Any, options: dict[str, Any],
                   error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pool.classify(texts, folders["bert"], **options)


def test_models_of_other_kinds_are_refused(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    encoder, classifier = tinymodels.bert(tmp_path / "encoder"), folders["bert"]
    with pytest.raises(mpool.WrongCapability, match="is an embedding model, not a classifier"):
        pool.classify(TEXTS, encoder)
    with pytest.raises(mpool.WrongCapability, match="with 3 labels, which scores labels and returns no vectors"):
        pool.embed("A text.", classifier)
    with pytest.raises(mpool.WrongCapability, match="is a classifier with 3 labels, which computes no embeddings"):
        pool.get(classifier).dimensions
    with pytest.raises(mpool.WrongCapability, match="is a classifier with 3 labels, not a reranker") as caught:
        pool.rerank("a", ["b"], classifier)
    assert "mpool.classify" in str(caught.value.hint)
    plain = make_classifier(tmp_path / "plain", "bert", ("good", "bad"))
    with pytest.raises(mpool.WrongCapability, match='has no label whose name begins with "entail"'):
        pool.classify(TEXTS, plain, labels=["a"])
    with pytest.raises(mpool.InvalidArgument, match="`model` must be a sequence classifier, got None"):
        pool.classify(TEXTS, None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="missing the argument 'model'"):
        pool.classify(TEXTS)  # type: ignore[call-overload]
    for wrong, message in (({"inputs": "c"}, "exclude each other"), ({"query": "a"}, "exclude each other"),
                           ({"topk": 1}, "did you mean `top_k`")):
        with pytest.raises(mpool.InvalidArgument, match=message):
            pool.submit("text_embedding", texts=TEXTS, model=classifier, **wrong)


def test_a_reranker_is_a_classifier_with_one_label(pool: mpool.Pool, tmp_path: Path) -> None:
    """The score of a reranking has the activation that the folder names; that of the label, transformers' function."""
    folder = make_reranker(tmp_path / "ranker", "bert")
    set_config(folder, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    pairs = [("cats", text) for text in TEXTS]
    logits = pool.rerank("cats", TEXTS, folder, compute="float32").scores
    found = pool.classify(pairs, folder, compute="float32")
    assert found.labels == ("LABEL_0",) and np.abs(found.scores - _expected(folder, pairs, ("LABEL_0",))).max() <= 1e-5
    assert np.array_equal(pool.classify(pairs, folder, compute="float32", function_to_apply="none").scores[:, 0],
                          np.float32(logits))
    with pytest.raises(mpool.WrongCapability, match="entail"):
        pool.classify("a", folder, labels=["b"])


def test_cross_encoder_returns_a_row_per_pair(folders: dict[str, Path], tmp_path: Path) -> None:
    """Classifiers with several labels, as sentence-transformers' CrossEncoder reads and saves them."""
    theirs_class = pytest.importorskip("sentence_transformers").CrossEncoder
    from mpool.integrations.sentence_transformers import CrossEncoder, SentenceTransformer

    theirs = theirs_class(str(folders["bert"]))
    theirs.save_pretrained(str(tmp_path / "saved"))
    for folder in (folders["bert"], tmp_path / "saved"):
        ours = CrossEncoder(str(folder))
        for options in ({}, {"apply_softmax": True}):
            with torch.no_grad():
                expected = theirs.predict(PAIRS, convert_to_numpy=True, **options)
            found = ours.predict(PAIRS, **options)
            assert found.shape == expected.shape == (7, 3) and np.abs(found - expected).max() <= 1e-4
        assert ours.predict(PAIRS[0]).shape == theirs.predict(PAIRS[0]).shape == (3,)
        with pytest.raises(mpool.WrongCapability, match="do not say which label means relevance"):
            ours.rank("a", ["b"])
        with pytest.raises(mpool.WrongCapability, match="SentenceTransformer|returns no vectors"):
            SentenceTransformer(str(folder))
        with pytest.raises(mpool.InvalidArgument, match="prompt"):
            ours.predict(PAIRS, prompt="x")


# ---- files -----------------------------------------------------------------------------------------------------------

def test_missing_labels_have_the_names_of_transformers(pool: mpool.Pool, folders: dict[str, Path],
                                                       tmp_path: Path) -> None:
    folder = shutil.copytree(folders["bert"], tmp_path / "model")
    set_config(folder, id2label=None, label2id=None)
    assert pool.classify("a", folder).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    set_config(folder, label2id={"entailment": 1})
    expected = pool.classify("a", folder, function_to_apply="none").scores
    with mpool.Pool() as other:  # label2id decides which label is the entailment, as in transformers
        found = other.classify("a", folder, labels=["x"], compute="float32")
    assert found.labels == ("x",) and expected.shape == (3,)


def test_show_names_the_labels(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from mpool.cli import main

    assert main(["show", str(folders["bert"]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["purpose"] == "classifies texts (classify)" and facts["labels"] == 3
    assert facts["label_names"] == list(NLI) and facts["activation"] == "softmax"


def test_labels_whose_scores_are_equal_are_ordered_by_logits(tmp_path: Path) -> None:
    """The sigmoid of each logit is 1."""
    from safetensors.numpy import load_file, save_file

    folder = make_classifier(tmp_path / "model", "bert", NLI)
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.bias"] = tensors["classifier.bias"] + np.float32([40, 41, 42])
    save_file(tensors, folder / "model.safetensors")
    logits = mpool.classify(TEXTS, folder, function_to_apply="none")
    options: dict[str, Any] = {"function_to_apply": "sigmoid"}
    found = mpool.classify(TEXTS, folder, **options)
    for one, other in zip((found, list(mpool.embed_iter(TEXTS, folder, output="labels", **options))), (logits, logits)):
        for at, result in enumerate(one):
            assert set(result.scores.tolist()) == {1.0}
            assert [label.index for label in result] == np.argsort(-other.scores[at], kind="stable").tolist()
            assert result.label == result[0].label == NLI[int(other.scores[at].argmax())]
    assert [one.label for one in pickle.loads(pickle.dumps(found))] == [one.label for one in logits]
