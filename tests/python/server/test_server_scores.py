"""``/v1/score`` as in vLLM, with rerankers and embedding models, and ``prompt`` of ``/v1/rerank``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import answerrankers
import numpy as np
import pytest
from rerankers import make_reranker

import mpool
from servers import ask, limits, serving

FIRST, SECOND = ["cats", "dogs", "cats"], ["A cat sat.", "The dog barked.", "Numbers 1 2 3."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, bert: Path, llama: Path) -> Iterator[Any]:
    ranker = make_reranker(tmp_path_factory.mktemp("ranker") / "ranker", "bert")
    with serving([f"ranker={ranker}", f"org/ranker={ranker}", f"bert={bert}", f"llama={llama}"]) as made:
        yield made


def scores(server: Any, **body: Any) -> list[float]:
    status, found = ask(server, "/v1/score", body)
    assert status == 200 and found["object"] == "list" and found["model"] == body["model"], found
    assert [row["index"] for row in found["data"]] == list(range(len(found["data"])))
    assert {row["object"] for row in found["data"]} == {"score"} and found["id"].startswith("score-")
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 2
    return [row["score"] for row in found["data"]]


def test_a_reranker_scores_pairs(server: Any) -> None:
    pool = server.state.pool
    pairs = [pool.rerank(query, [text], "ranker").results[0].score for query, text in zip(FIRST, SECOND)]
    assert scores(server, model="ranker", text_1=FIRST, text_2=SECOND) == pairs
    one_to_many = [pool.rerank("cats", [text], "ranker").results[0].score for text in SECOND]
    assert scores(server, model="ranker", text_1="cats", text_2=SECOND) == one_to_many
    assert scores(server, model="ranker", text_1=["cats"], text_2=SECOND) == one_to_many
    assert scores(server, model="ranker", text_1="cats", text_2=SECOND[0]) == one_to_many[:1]
    many = [f"query {at}" for at in range(40)]  # more than are scored at the same time
    assert scores(server, model="ranker", text_1=many, text_2=["A cat sat."] * 40) == [
        pool.rerank(query, ["A cat sat."], "ranker").results[0].score for query in many]


def test_an_embedding_model_gives_cosines(server: Any) -> None:
    left, right = (np.stack([row / np.linalg.norm(row) for row in server.state.pool.embed(texts, "bert")])
                   for texts in (FIRST, SECOND))
    found = scores(server, model="bert", text_1=FIRST, text_2=SECOND)
    np.testing.assert_allclose(found, (left * right).sum(axis=1), atol=1e-5)
    found = scores(server, model="bert", text_1="cats", text_2=SECOND)
    np.testing.assert_allclose(found, right @ left[0], atol=1e-5)


def test_a_pair_has_one_score(server: Any) -> None:
    """A pair has the same score alone, in a list of pairs, and as one text with many."""
    second = [f"text {at} {'word ' * (at % 7)}" for at in range(61)]
    alone = [scores(server, model="bert", text_1="cats", text_2=text)[0] for text in second]
    assert scores(server, model="bert", text_1="cats", text_2=second) == alone
    assert scores(server, model="bert", text_1=["cats"] * 61, text_2=second) == alone


@pytest.mark.parametrize(("change", "word"), [
    ({"text_1": FIRST[:2]}, "`text_1` must have one text or as many as `text_2`, got 2 and 3."),
    ({"text_2": "x"}, "got 3 and 1."), ({"text_1": []}, "`text_1`"), ({"text_1": ["x", "", "y"]}, "`text_1[1]`"),
    ({"text_2": None}, "`documents` and `items` is required"), ({"text_1": [5, 6, 7]}, "`text_1[0]`"),
    ({"model": "bert", "prompt": "x"}, "`prompt` requires a reranker"), ({"prompt": "x"}, "prompt"),
    ({"model": "llama"}, "capability")], ids=str)
def test_refused_scores(server: Any, change: dict[str, Any], word: str) -> None:
    status, found = ask(server, "/v1/score", {"model": "ranker", "text_1": FIRST, "text_2": SECOND, **change})
    assert status == 400 and word in found["error"]["message"], found


def test_one_text_that_is_too_long(server: Any) -> None:
    with limits(server, max_text=20):
        for text, param in (("x" * 21, "text_2"), (["x" * 21], "text_2[0]")):
            status, found = ask(server, "/v1/score", {"model": "bert", "text_1": "cats", "text_2": text})
            assert (status, found["error"]["param"]) == (413, param), found


def test_the_number_of_inputs_is_limited_on_each_side(bert: Path) -> None:
    with serving([f"bert={bert}"], mpool.PoolConfig(offline=True, max_embed_inputs=3)) as made:
        for body, wanted in (({"text_1": "cats", "text_2": SECOND}, 200), ({"text_1": FIRST, "text_2": SECOND}, 200),
                             ({"text_1": "cats", "text_2": [*SECOND, "x"]}, 413)):
            status, found = ask(made, "/v1/score", {"model": "bert", **body})
            assert status == wanted, found
    assert found["error"]["param"] == "text_2"


def test_a_cross_encoder_refuses_a_prompt(server: Any) -> None:
    body = {"model": "ranker", "query": "cats", "documents": SECOND}
    status, found = ask(server, "/v1/rerank", {**body, "prompt": "Find pets."})
    assert status == 400 and "prompt" in found["error"]["message"], found
    assert ask(server, "/v1/rerank", {**body, "prompt": None})[0] == 200


def test_prompt_of_reranking(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The prompt replaces the instruction of a language model: scores are those of the library with this prompt."""
    with serving([f"judge={answerrankers.make(tmp_path_factory)}"]) as made:
        pool, body = made.state.pool, {"model": "judge", "query": "Which animal barked?", "documents": SECOND}
        found = []
        for options in ({}, {"prompt": "Find pets."}, {"prompt": "Find numbers."}):
            status, reply = ask(made, "/v1/rerank", {**body, **options})
            assert status == 200, reply
            scores = {row["index"]: row["relevance_score"] for row in reply["results"]}
            wanted = pool.rerank(body["query"], SECOND, "judge", **options)
            assert [scores[at] for at in range(len(SECOND))] == pytest.approx(list(wanted.scores), abs=1e-6)
            found.append(scores)
        assert len({tuple(sorted(one.items())) for one in found}) == 3


def test_other_names_of_fields_and_models(server: Any) -> None:
    """``queries`` and ``documents`` of newer clients of vLLM, ``documents`` of clients of Cohere, and ``org/name``."""
    wanted = scores(server, model="ranker", text_1="cats", text_2=SECOND)
    assert scores(server, model="org/ranker", queries="cats", documents=SECOND) == wanted
    for body in ({"queries": "cats"}, {"text_1": "a", "queries": "b", "documents": SECOND}):
        status, found = ask(server, "/v1/score", {"model": "ranker", **body})
        assert status == 400 and found["error"]["code"] == "invalid_value", found
    body = {"model": "org/ranker", "query": "cats"}
    status, found = ask(server, "/rerank", {**body, "documents": SECOND})
    assert status == 200 and found == ask(server, "/rerank", {**body, "texts": SECOND})[1]
    assert ask(server, "/rerank", body)[0] == 422  # the status of text-embeddings-inference
    assert ask(server, "/v1/models/org/ranker")[1]["id"] == "org/ranker"
    assert ask(server, "/v1/models/org/../ranker")[0] == 404
