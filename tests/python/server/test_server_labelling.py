"""``/classify_tokens`` in the format of Hugging Face's inference API, compared with ``mpool.classify_tokens``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import ask, serving

TEXTS = ["Zoë's cat in Québec 🙂", "  ", "a dog runs far " * 9]


@pytest.fixture(scope="module")
def server(tagger: Path, bert: Path) -> Iterator[Any]:
    with serving([f"ner={tagger}", f"bert={bert}"]) as made:
        yield made


def rows(result: Any, field: str) -> list[dict[str, Any]]:
    index = [{"index": one.index} if field == "entity" else {} for one in result]
    return [{"score": one.score, "word": one.word, "start": one.start, "end": one.end, field: one.label, **more}
            for one, more in zip(result, index)]


def test_spans_are_those_of_the_library(server: Any) -> None:
    pool = server.state.pool
    for parameters in ({}, {"aggregation_strategy": "none", "ignore_labels": []},
                       {"aggregation_strategy": "max", "stride": 7, "ignore_labels": ["PER"]}):
        given = {"aggregation_strategy": "simple", **parameters}
        field = "entity" if given["aggregation_strategy"] == "none" else "entity_group"
        options = {"aggregation" if name == "aggregation_strategy" else name: value for name, value in given.items()}
        want = [rows(one, field) for one in pool.classify_tokens(TEXTS, "ner", **options)]
        assert want[1] == [] and len(want[0]) > 2
        for model in ({"model": "ner"}, {}):  # without a name: the only token classifier
            body = {"parameters": parameters, **model} if parameters else model
            assert ask(server, "/classify_tokens", {"inputs": TEXTS, **body}) == (200, want)
            assert ask(server, "/classify_tokens", {"inputs": TEXTS[0], **body}) == (200, want[0])


def test_the_client_of_hugging_face(server: Any) -> None:
    client = pytest.importorskip("huggingface_hub").InferenceClient()
    found = client.token_classification(TEXTS[0], model=f"http://127.0.0.1:{server.port}/classify_tokens",
                                        aggregation_strategy="average")
    want = server.state.pool.classify_tokens(TEXTS[0], "ner", aggregation="average")
    assert [(one.entity_group, one.start, one.end, one.word) for one in found] == [
        (one.label, one.start, one.end, one.word) for one in want]


@pytest.mark.parametrize("body, status, part", [
    ({"inputs": []}, 400, "inputs"), ({"inputs": 7}, 400, "inputs"), ({"inputs": [["a"]]}, 400, "inputs"),
    ({"inputs": [""]}, 400, "inputs"), ({}, 400, "inputs"),
    ({"inputs": "a", "parameters": {"stride": 7, "aggregation_strategy": "none"}}, 400, "stride"),
    ({"inputs": "a", "parameters": {"stride": 62}}, 400, "less than 62"),
    ({"inputs": "a", "parameters": {"stride": -1}}, 400, "stride"),
    ({"inputs": "a", "parameters": {"aggregation_strategy": "last"}}, 400, "aggregation_strategy"),
    ({"inputs": TEXTS, "truncate": False}, 400, "the model accepts at most 64"),
    ({"inputs": "a", "model": "bert"}, 400, "does not have this capability"),
    ({"inputs": "a", "model": "none"}, 404, "Model not found")], ids=lambda value: str(value)[:50])
def test_bad_requests(server: Any, body: dict[str, Any], status: int, part: str) -> None:
    code, found = ask(server, "/classify_tokens", body)
    assert code == status and part in found["error"]["message"], found


def test_errors_name_the_field_of_the_route(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpool.server.labelling.MAX_RESPONSE", 200)
    for body, words in (({"inputs": TEXTS}, "`inputs` needs at least"),
                        ({"inputs": TEXTS, "truncate": False}, "inputs[")):
        status, found = ask(server, "/classify_tokens", body)
        assert status in (400, 413) and words in found["error"]["message"] and "texts" not in found["error"]["message"]


def test_the_size_of_a_response_is_limited(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpool.server.operations.MAX_RESPONSE", 500)
    assert ask(server, "/classify_tokens", {"inputs": "a"})[0] == 200
    status, found = ask(server, "/classify_tokens", {"inputs": TEXTS})
    assert status == 413 and found["error"]["param"] == "inputs"
