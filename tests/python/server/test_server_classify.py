"""``/classify`` as in vLLM and ``/predict`` as in text-embeddings-inference, compared with ``mpool.classify``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rerankers import make_classifier

from servers import ask, serving

NLI = ("contradiction", "neutral", "entailment")
TEXTS = ["A cat sat.", "The dog barked.", "Numbers 1 2 3."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("nli") / "nli", "bert", NLI)


@pytest.fixture(scope="module")
def server(folder: Path, bert: Path) -> Iterator[Any]:
    with serving([f"nli={folder}", f"bert={bert}"]) as made:
        yield made


def rows(result: Any) -> list[dict[str, Any]]:
    return [{"score": one.score, "label": one.label} for one in result]


def test_classify_has_the_shape_of_vllm(server: Any) -> None:
    pool = server.state.pool
    for given, options in ((TEXTS, {}), (TEXTS[0], {}), (TEXTS, {"use_activation": False}),
                           (TEXTS, {"activation": False}), (TEXTS, {"use_activation": True})):
        function = "none" if False in options.values() else None
        want = pool.classify(given if isinstance(given, list) else [given], "nli", function_to_apply=function)
        status, found = ask(server, "/classify", {"model": "nli", "input": given, **options})
        assert status == 200 and found["object"] == "list" and found["model"] == "nli", found
        assert found["id"].startswith("classify-") and found["created"] > 1e9
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 2
        assert found["data"] == [{"index": at, "label": one.label, "probs": one.scores.tolist(), "num_classes": 3}
                                 for at, one in enumerate(want)]


def test_predict_has_the_shape_of_tei(server: Any) -> None:
    pool = server.state.pool
    alone = rows(pool.classify(TEXTS[0], "nli"))
    pair = rows(pool.classify([tuple(TEXTS[:2])], "nli")[0])
    many = [rows(one) for one in pool.classify(TEXTS, "nli")]
    for given, want in ((TEXTS[0], alone), (TEXTS[:1], alone), (TEXTS[:2], pair), ([TEXTS[:1]], [alone]),
                        ([[text] for text in TEXTS], many),
                        ([TEXTS[:1], TEXTS[:2], TEXTS[1:2]], [alone, pair, many[1]])):
        for model in ({"model": "nli"}, {}):  # without a name: the only classifier
            status, found = ask(server, "/predict", {"inputs": given, **model})
            assert status == 200 and found == want, given
    raw = rows(pool.classify(TEXTS[0], "nli", function_to_apply="none"))
    assert ask(server, "/predict", {"inputs": TEXTS[0], "raw_scores": True}) == (200, raw) and raw != alone
    long = {"inputs": "dog " * 80}
    assert ask(server, "/predict", long)[0] == ask(server, "/predict", {**long, "truncate": None})[0] == 200
    status, found = ask(server, "/predict", {**long, "truncate": False})
    assert status == 422 and "tokens" in found["error"] and found["error_type"] == "Validation"


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/classify", {"model": "bert", "input": "x"}, "capability"),
    ("/classify", {"model": "nli"}, "`input` is required"),
    ("/classify", {"model": "nli", "input": []}, "`input`"),
    ("/classify", {"model": "nli", "input": ["a", ""]}, "input"),
    ("/classify", {"model": "nli", "input": [["a", "b"]]}, "input"),
    ("/predict", {"model": "bert", "inputs": "x"}, "capability"), ("/predict", {}, "`inputs` is required"),
    ("/predict", {"inputs": []}, "`inputs`"), ("/predict", {"inputs": ["a", "b", "c"]}, "a pair [text, text]"),
    ("/predict", {"inputs": [["a"], "b"]}, "`inputs[1]` must be a list"),
    ("/predict", {"inputs": ["a", ["b"]]}, "pair"),
    ("/predict", {"inputs": [[]]}, "inputs"), ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs"),
    ("/predict", {"inputs": [[1]]}, "inputs"), ("/predict", {"inputs": 1}, "inputs"),
    ("/predict", {"inputs": "a", "raw_scores": "yes"}, "raw_scores")], ids=str)
def test_refused_requests(server: Any, path: str, body: dict[str, Any], word: str) -> None:
    status, found = ask(server, path, body)
    if path == "/predict":  # as in text-embeddings-inference
        backend = word == "capability"
        assert (status, found["error_type"]) == ((424, "Backend") if backend else (422, "Validation")), found
        assert word in found["error"]
    else:
        assert status == 400 and word in found["error"]["message"], found


def test_responses_are_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpool.server.classifying.MAX_RESPONSE", 340)
    assert ask(server, "/predict", {"inputs": [["a"], ["b"]]})[0] == 200
    for path, body in (("/predict", {"inputs": [["a"]] * 3}), ("/classify", {"model": "nli", "input": ["a"] * 3})):
        status, found = ask(server, path, body)
        message = found["error"] if path == "/predict" else found["error"]["message"]
        assert status == 413 and "for 3 inputs and 3 labels" in message
        if path == "/classify":
            assert found["error"]["param"] == "input"


def test_a_model_must_be_named_if_there_are_several(folder: Path, bert: Path) -> None:
    for models, words in (([f"a={folder}", f"b={folder}"], "the server has 2 models of this kind (classifier)"),
                          ([f"bert={bert}"], "This server serves no classifier: start it with one")):
        with serving(models) as made:
            status, found = ask(made, "/predict", {"inputs": "x"})
            assert status == 422 and words in found["error"]
