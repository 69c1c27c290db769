"""Routes of text-embeddings-inference and vLLM's ``/pooling``, compared with the library, with schemas in the form of
text-embeddings-inference's OpenAPI document, and driven by ``huggingface_hub.InferenceClient``."""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from rerankers import make_classifier, make_reranker
from tokenclassifiers import make_token_classifier
from retrievalmodels import TEXTS, write_bge_m3

import mpool
from mpool.tasks.running import run
from mpool.tasks.verbs import TOKEN_SCORES
from servers import Raw, ask, server_idle, serving
from waiting import until

NUMBER = {"type": "number"}
#: Route -> schema of a response, as in docs/openapi.json of text-embeddings-inference.
SCHEMAS: dict[str, Any] = {
    "/embed": {"type": "array", "items": {"type": "array", "items": NUMBER}},
    "/embed_all": {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": NUMBER}}},
    "/embed_sparse": {"type": "array", "items": {"type": "array", "items": {
        "type": "object", "required": ["index", "value"], "additionalProperties": False,
        "properties": {"index": {"type": "integer", "minimum": 0}, "value": NUMBER}}}},
    "/rerank": {"type": "array", "items": {
        "type": "object", "required": ["index", "score"], "additionalProperties": False,
        "properties": {"index": {"type": "integer", "minimum": 0}, "score": NUMBER, "text": {"type": "string"}}}},
    "/similarity": {"type": "array", "items": NUMBER}}
ERROR = {"type": "object", "required": ["error", "error_type"], "additionalProperties": False, "properties": {
    "error": {"type": "string"},
    "error_type": {"enum": ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("inference")
    return {"m3": write_bge_m3(parent / "m3"), "rank": make_reranker(parent / "rank", "bert"),
            "nli": make_classifier(parent / "nli", "bert", ("no", "maybe", "yes")),
            "ner": make_token_classifier(parent / "ner", "bert")}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Any]:
    """A server with one model for each route, so that no request has to name it."""
    with serving([f"{name}={folder}" for name, folder in folders.items()]) as made:
        yield made


@pytest.fixture(scope="module")
def several(prompted: Path, bert: Path) -> Iterator[Any]:
    with serving([f"prompted={prompted}", f"bert={bert}"]) as made:
        yield made


def fetched(server: Any, path: str, body: dict[str, Any]) -> Any:
    """Return a response that matches the schema of its route."""
    status, found = ask(server, path, body)
    assert status == 200, found
    pytest.importorskip("jsonschema").validate(found, SCHEMAS[path])
    return found


def refused(server: Any, path: str, body: Any) -> tuple[int, str, str]:
    """Return status, type and message of an error in the form of text-embeddings-inference."""
    status, found = ask(server, path, body)
    pytest.importorskip("jsonschema").validate(found, ERROR)
    return status, found["error_type"], found["error"]


def test_embed(server: Any) -> None:
    pool = server.state.pool
    ids = pool.get("m3").tokenize(TEXTS[0])
    for given in (TEXTS[0], TEXTS, TEXTS[:1], ids, [ids, ids[:3]]):
        inputs = given if isinstance(given, list) else [given]
        want = pool.embed([inputs] if isinstance(inputs[0], int) else inputs, "m3", normalize=True)
        for named in ({}, {"model": "m3"}):
            assert fetched(server, "/embed", {"inputs": given, **named}) == want.tolist()
    raw = fetched(server, "/embed", {"inputs": TEXTS, "normalize": False})
    assert raw == pool.embed(TEXTS, "m3", normalize=False).tolist()
    short = np.array(fetched(server, "/embed", {"inputs": TEXTS, "dimensions": 8}))
    assert short.shape == (len(TEXTS), 8) and np.allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    assert short.tolist() == pool.embed(TEXTS, "m3", dimensions=8, normalize=True).tolist()


def test_prompts_and_tasks(several: Any) -> None:
    pool = several.state.pool
    for name in pool.get("prompted").description.embedding.prompts:
        found = fetched(several, "/embed", {"inputs": "A dog", "model": "prompted", "prompt_name": name})
        assert found == pool.embed(["A dog"], "prompted", prompt_name=name, normalize=True).tolist()
    found = fetched(several, "/embed", {"inputs": "A dog", "model": "prompted", "task": "query"})
    assert found == pool.embed(["A dog"], "prompted", task="query", normalize=True).tolist()
    status, kind, text = refused(several, "/embed", {"inputs": "A dog", "model": "prompted", "prompt_name": "none"})
    assert (status, kind) == (422, "Validation") and "prompt_name" in text
    found = fetched(several, "/similarity", {"model": "prompted", "inputs": {
        "source_sentence": "A dog", "sentences": ["A cat", "A dog"]}, "parameters": {"prompt_name": "query"}})
    rows = pool.embed(["A dog", "A cat", "A dog"], "prompted", prompt_name="query")
    assert found == [mpool.similarity(rows[:1], rows[at:at + 1], pairwise=True)[0] for at in range(1, len(rows))]
    status, kind, text = refused(several, "/embed", {"inputs": "x"})
    assert (status, kind) == (422, "Validation") and "the server has 2 models of this kind" in text


def test_embed_sparse(server: Any) -> None:
    pool = server.state.pool
    for given in (TEXTS, TEXTS[0], [[5, 20, 30]]):
        want = pool.embed_sparse(given, "m3")
        assert len(want.values) and fetched(server, "/embed_sparse", {"inputs": given}) == [
            [{"index": at, "value": value} for at, value in zip(ids.tolist(), values.tolist())] for ids, values in want]


def test_embed_all(server: Any) -> None:
    want = server.state.pool.embed_tokens(TEXTS, "m3")
    assert fetched(server, "/embed_all", {"inputs": TEXTS}) == [rows.tolist() for rows in want]


def test_rerank(server: Any) -> None:
    pool = server.state.pool
    texts = ["A cat sat.", "The dog barked.", "Numbers 1 2 3.", "A cat sat."]
    logits = pool.rerank("A cat", texts, "rank", function_to_apply="none")
    for raw in (False, True):
        found = fetched(server, "/rerank", {"query": "A cat", "texts": texts, "raw_scores": raw, "return_text": True})
        want = np.array([one.score for one in logits], np.float64)
        want = want if raw else 1 / (1 + np.exp(-want))
        assert [one["index"] for one in found] == [one.index for one in logits]
        assert np.allclose([one["score"] for one in found], want, atol=1e-6)
        assert [one["text"] for one in found] == [texts[one["index"]] for one in found]
        assert sorted(found, key=lambda one: -one["score"]) == found
    assert "text" not in fetched(server, "/rerank", {"query": "A cat", "texts": texts})[0]


@pytest.mark.parametrize("function", (None, "sigmoid", "none"))
def test_function_of_rerank(server: Any, function: str | None) -> None:
    pool = server.state.pool
    logits = np.array(pool.rerank("a", ["b", "c"], "rank", function_to_apply="none").scores)
    want = logits if function == "none" else 1 / (1 + np.exp(-logits))
    assert np.allclose(pool.rerank("a", ["b", "c"], "rank", function_to_apply=function).scores, want, atol=1e-6)
    with pytest.raises(mpool.InvalidArgument, match="function_to_apply"):
        pool.rerank("a", ["b"], "rank", function_to_apply="softmax")


def test_similarity(server: Any) -> None:
    rows = server.state.pool.embed(TEXTS, "m3")
    found = fetched(server, "/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    assert found == [mpool.similarity(rows[:1], rows[at:at + 1], pairwise=True)[0] for at in range(1, len(rows))]


def test_truncation(server: Any) -> None:
    """By default, long texts lose their end. Without truncation they are refused."""
    head = "w1 w2 w3 cat dog " * 40
    for path in ("/embed", "/embed_sparse", "/embed_all"):
        for more in ({}, {"truncate": True}, {"truncate": None}, {"truncation_direction": "right"}):
            found = fetched(server, path, {"inputs": [head, head + "w5 w6", "w5 w6 " + head], **more})
            assert found[0] == found[1] != found[2]
        assert refused(server, path, {"inputs": ["a", head], "truncate": False})[:2] == (422, "Validation")
    found = fetched(server, "/rerank", {"query": "cat", "texts": [head, head + "w5 w6"]})
    assert found[0]["score"] == found[1]["score"]
    body: dict[str, Any] = {"query": "cat", "texts": ["a", head]}
    assert len(fetched(server, "/rerank", {**body, "truncate": True})) == 2
    assert refused(server, "/rerank", {**body, "truncate": False})[:2] == (422, "Validation")
    pairs: dict[str, Any] = {"inputs": {"source_sentence": head, "sentences": [head + "w5 w6", "w5"]}}
    assert fetched(server, "/similarity", pairs)[0] == pytest.approx(1, abs=1e-6)
    assert len(fetched(server, "/similarity", {**pairs, "parameters": {"truncate": True}})) == 2
    assert refused(server, "/similarity", {**pairs, "parameters": {"truncate": False}})[:2] == (422, "Validation")


LONG = "w1 " * 100
SIMILAR: dict[str, Any] = {"source_sentence": "a", "sentences": ["b"]}


@pytest.mark.parametrize(("path", "body", "status", "kind", "word"), [
    ("/embed", {}, 422, "Validation", "`inputs` is required"), ("/embed", {"inputs": []}, 400, "Empty", "`inputs`"),
    ("/embed", {"inputs": ""}, 400, "Empty", "`inputs`"), ("/embed", {"inputs": ["a", ""]}, 400, "Empty", "`inputs`"),
    ("/embed", {"inputs": [[]]}, 400, "Empty", "`inputs`"),
    ("/embed", {"inputs": ["a", [5]]}, 422, "Validation", "both"),
    ("/embed", {"inputs": [[5], [-1]]}, 422, "Validation", "inputs[1]"),
    ("/embed", {"inputs": [10**6]}, 422, "Validation", "inputs[0][0]"),
    ("/embed", {"inputs": [5], "prompt_name": "x"}, 422, "Validation", "require texts"),
    ("/embed", {"inputs": LONG, "truncate": False}, 422, "Validation", "tokens"),
    ("/embed", {"inputs": "a", "truncation_direction": "Left"}, 422, "Validation", "must be Right"),
    ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "Validation", "truncation_direction"),
    ("/embed", {"inputs": "a", "normalize": 1}, 422, "Validation", "normalize"),
    ("/embed", {"inputs": "a", "dimensions": 1000}, 422, "Validation", "dimensions"),
    ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation", "dimensions"),
    ("/embed", {"inputs": "a", "model": "rank"}, 424, "Backend", "capability"),
    ("/embed", {"inputs": "a", "model": "none"}, 404, "Validation", "not found"),
    ("/embed", b"{", 400, "Validation", "JSON"), ("/embed", {"inputs": "a" * 2_000_000}, 413, "Validation", "at most"),
    ("/embed_sparse", {"inputs": "a", "model": "nli"}, 424, "Backend", "capability"),
    ("/embed_sparse", {"inputs": {}}, 422, "Validation", "`inputs`"),
    ("/embed_all", {"inputs": "a", "model": "rank"}, 424, "Backend", "capability"),
    ("/embed_all", {"inputs": []}, 400, "Empty", "`inputs`"),
    ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "`texts`"),
    ("/rerank", {"query": "", "texts": ["a"]}, 400, "Empty", "`query`"),
    ("/rerank", {"query": "a", "texts": ["a", ""]}, 400, "Empty", "`texts`"),
    ("/rerank", {"query": "a", "texts": ["a"], "model": "m3"}, 424, "Backend", "capability"),
    ("/rerank", {"query": "a", "texts": ["a"] * 20_000}, 413, "Validation", "at most"),
    ("/rerank", {"query": "a", "texts": ["a"], "truncation_direction": "left"}, 422, "Validation", "must be Right"),
    ("/similarity", {"inputs": {**SIMILAR, "sentences": []}}, 400, "Empty", "sentences"),
    ("/similarity", {"inputs": {**SIMILAR, "source_sentence": ""}}, 400, "Empty", "source_sentence"),
    ("/similarity", {"inputs": ["a", "b"]}, 422, "Validation", "`inputs`"),
    ("/similarity", {"inputs": SIMILAR, "parameters": {"truncation_direction": "Left"}}, 422, "Validation", "Right"),
    ("/similarity", {"inputs": SIMILAR, "parameters": {"prompt_name": "x"}}, 422, "Validation", "prompt_name"),
    ("/predict", {"inputs": "a", "truncation_direction": "Left"}, 422, "Validation", "must be Right"),
], ids=lambda value: str(value)[:60])
def test_errors(server: Any, path: str, body: Any, status: int, kind: str, word: str) -> None:
    found = refused(server, path, body)
    assert found[:2] == (status, kind) and word in found[2], found


def test_results_are_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("text_embeddings_inference", "operations"):
        monkeypatch.setattr(f"mpool.server.{module}.MAX_RESPONSE", 48 * 22 * 2)
    monkeypatch.setattr("mpool.server.computing.MAX_NUMBERS", 48 * 2 * 4)
    assert len(fetched(server, "/embed", {"inputs": ["a"] * 2})) == 2
    for path, many in (("/embed", ["a"] * 3), ("/embed_sparse", TEXTS * 20), ("/embed_all", TEXTS)):
        found = refused(server, path, {"inputs": many})
        assert found[:2] == (413, "Validation"), found
    for task in ("embed", "token_embed"):
        status, found = ask(server, "/pooling", {"model": "m3", "input": TEXTS, "task": task})
        assert status == 413 and found["error"]["code"] == "request_too_large", found


@pytest.mark.parametrize("path", ("/embed", "/embed_sparse", "/embed_all", "/pooling"))
@pytest.mark.parametrize("how", ("cancelled", "disconnected"))
def test_requests_without_a_model_are_listed(server: Any, path: str, how: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of running requests and the history have the name of the model that the server chose. A request ends
    when it is cancelled, and when its client disconnects."""
    # The request ends for no other reason than the one that the test is about.
    monkeypatch.setattr("mpool.server.text_embeddings_inference.MAX_RESPONSE", 1 << 40)
    monkeypatch.setattr("mpool.server.computing.MAX_NUMBERS", 1 << 40)
    server_idle(server)
    texts = [f"w{i % 9} w{i // 9 % 9} w{i // 81 % 9} w{i // 729} " * 15 for i in range(4500)]  # no duplicates
    with Raw(server) as raw:
        raw.request(path, json.dumps({"inputs": texts, "input": texts}).encode())
        found = until(lambda: next((one for one in list(server.state.running.values())
                                    if (one.path, one.model) == (path, "m3")), None), 20)
        if how == "cancelled":
            ask(server, "/api/mpool/cancel", {"id": found.id})
            assert raw.answer()[0] == 499
        else:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    server_idle(server)
    last = next(one for one in reversed(server.state.history) if one.path == path)
    assert (last.model, last.outcome) == ("m3", how)


# ---- vLLM ------------------------------------------------------------------------------------------------------------

def pooled(server: Any, **body: Any) -> Any:
    status, found = ask(server, "/pooling", body)
    assert status == 200, found
    assert found["object"] == "list" and found["id"].startswith("pool-") and found["created"] > 1e9
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    assert [(one["index"], one["object"]) for one in found["data"]] == [
        (at, "pooling") for at in range(len(found["data"]))]
    return [one["data"] for one in found["data"]]


def test_pooling(server: Any) -> None:
    pool = server.state.pool
    tokens = [rows.tolist() for rows in pool.embed_tokens(TEXTS, "m3")]
    assert pooled(server, model="m3", input=TEXTS) == pooled(server, input=TEXTS, task="token_embed") == tokens
    assert pooled(server, model="m3", input=TEXTS[0]) == tokens[:1]
    assert pooled(server, model="m3", input=TEXTS, task="embed") == pool.embed(TEXTS, "m3").tolist()
    assert pooled(server, model="m3", input=TEXTS, task="embed", dimensions=8, use_activation=False) == pool.embed(
        TEXTS, "m3", dimensions=8, normalize=False).tolist()
    scores = pool.classify(TEXTS, "nli")
    assert pooled(server, input=TEXTS, task="classify") == [one.scores.tolist() for one in scores]
    logits = pool.classify(TEXTS, "nli", function_to_apply="none")
    assert pooled(server, input=TEXTS, task="classify", use_activation=False) == [
        one.scores.tolist() for one in logits]
    for task, want in (("token_embed", pool.embed_tokens(TEXTS, "m3")), ("embed", pool.embed(TEXTS, "m3"))):
        coded = pooled(server, input=TEXTS, task=task, encoding_format="base64", truncate_prompt_tokens=-1)
        assert [base64.b64decode(one) for one in coded] == [rows.tobytes() for rows in want]
    ids = [[2, 20, 3], [2, 30, 31, 3]]
    assert pooled(server, input=ids, allow_token_ids=True) == [
        rows.tolist() for rows in pool.embed_tokens(ids, "m3")]


def test_scores_of_labels_of_tokens(server: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are those of transformers, for every token of the prompt, with the same bytes alone and in a batch."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folders["ner"]).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folders["ner"]))
    texts = ["A cat sat.", "The dog barked at Alice in Paris.", "Numbers 1 2 3. " * 40]
    pool = server.state.pool
    exact, raw = (run(TOKEN_SCORES, pool, {"inputs": texts, "model": "ner", "compute": "float32",
                                           "function_to_apply": function}) for function in ("softmax", "none"))
    wanted = [run(TOKEN_SCORES, pool, {"inputs": texts, "model": "ner", "function_to_apply": function})
              for function in ("softmax", "none")]
    found = pooled(server, input=texts, task="token_classify", encoding_format="base64")
    plain = pooled(server, input=texts, task="token_classify", use_activation=True)
    assert [base64.b64decode(one) for one in found] == [rows.tobytes() for rows in wanted[0]]
    assert plain == [rows.tolist() for rows in wanted[0]]
    assert pooled(server, input=texts, model="ner", task="token_classify", use_activation=False) == [
        rows.tolist() for rows in wanted[1]]
    for at, text in enumerate(texts):
        with torch.no_grad():
            want = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=64)).logits[0]
        assert np.allclose(raw[at], want.numpy(), atol=1e-4)
        assert np.allclose(exact[at], torch.softmax(want, -1).numpy(), atol=1e-5)
        assert pooled(server, input=text, task="token_classify") == [plain[at]]
    monkeypatch.setattr("mpool.server.pooling.MAX_NUMBERS", 100)
    status, answer = ask(server, "/pooling", {"input": texts, "task": "token_classify"})
    assert status == 413 and "`input`" in answer["error"]["message"]


# ---- Hugging Face's client -------------------------------------------------------------------------------------------

def test_inference_client(server: Any) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pool = server.state.pool

    def client(path: str) -> Any:
        return hub.InferenceClient(model=f"{server.url}{path}", timeout=30)

    for options in ({}, {"normalize": False}, {"truncate": True, "truncation_direction": "Right"}):
        found = client("/embed").feature_extraction(TEXTS[0], **options)
        want = pool.embed(TEXTS[:1], "m3", normalize=options.get("normalize", True))
        assert found.dtype == np.float32 and (found == want).all()
    found = client("/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    rows = pool.embed(TEXTS, "m3")
    assert found == [mpool.similarity(rows[:1], rows[at:at + 1], pairwise=True)[0] for at in range(1, len(rows))]
    best = pool.classify(TEXTS[0], "nli")
    found = client("/predict").text_classification(TEXTS[0])
    first = found[0] if isinstance(found, list) else found
    assert (first.label, first.score) == (best.label, best.score)
    with pytest.raises(hub.errors.HfHubHTTPError) as caught:
        client("/embed").feature_extraction("")
    assert caught.value.response.status_code == 400 and "no empty text" in caught.value.response.text


# ---- Jina ------------------------------------------------------------------------------------------------------------

def embedded(server: Any, path: str = "/v1/embeddings", **body: Any) -> list[Any]:
    """Return the embeddings of a response of Jina's API."""
    status, found = ask(server, path, {"model": "m3", **body})
    assert status == 200, found
    assert found["object"] == "list" and found["model"] == body.get("model", "m3")
    assert found["usage"]["total_tokens"] > 0
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    return [one["embeddings"] if one["object"] == "embeddings" else one["embedding"] for one in found["data"]]


def test_texts_as_objects(server: Any) -> None:
    want = server.state.pool.embed(TEXTS, "m3").tolist()
    for given in (TEXTS, [{"text": text} for text in TEXTS], [TEXTS[0], *({"text": text} for text in TEXTS[1:])]):
        assert embedded(server, input=given, truncate=True, late_chunking=False) == want
    assert embedded(server, input={"text": TEXTS[0]}) == want[:1]


def test_types_of_embeddings(server: Any) -> None:
    pool = server.state.pool
    rows = pool.embed(TEXTS, "m3")
    for kind in ("float", ["float"]):
        assert embedded(server, input=TEXTS, embedding_type=kind) == rows.tolist()
    coded = embedded(server, input=TEXTS, embedding_type="base64")
    assert [base64.b64decode(one) for one in coded] == [row.tobytes() for row in rows]
    for kind in ("binary", "ubinary"):
        assert embedded(server, input=TEXTS, embedding_type=kind) == pool.embed(TEXTS, "m3", precision=kind).tolist()
    assert embedded(server, input=TEXTS, normalized=False) == pool.embed(TEXTS, "m3", normalize=False).tolist()


def test_several_vectors_of_a_text(server: Any) -> None:
    tokens = server.state.pool.embed_tokens(TEXTS, "m3")
    want = [rows.tolist() for rows in tokens]
    assert embedded(server, input=TEXTS, return_multivector=True) == want
    assert embedded(server, input=[{"text": text} for text in TEXTS], return_multivector=True,
                    task="retrieval.passage") == want
    for path, more in (("/v1/embeddings", {"return_multivector": True}), ("/v1/multi-vector", {})):
        coded = embedded(server, path, input=TEXTS, embedding_type="base64", **more)
        assert [[base64.b64decode(one) for one in rows] for rows in coded] == [
            [row.tobytes() for row in rows] for rows in tokens]
        bits = embedded(server, path, input=TEXTS, embedding_type="ubinary", **more)
        assert bits == [np.packbits(rows > 0, axis=-1).tolist() for rows in tokens]
    assert embedded(server, "/v1/multi-vector", input=TEXTS, dimensions=48, input_type="query") == want


def test_tasks_of_jina(several: Any) -> None:
    pool = several.state.pool
    for given, task in (("retrieval.query", "query"), ("retrieval.passage", "document"), ("query", "query")):
        found = embedded(several, model="prompted", input=["A dog"], task=given)
        assert found == pool.embed(["A dog"], "prompted", task=task).tolist()
    sides = {}
    for side in ("query", "document"):
        want = [rows.tolist() for rows in pool.embed_tokens(["A dog"], "prompted", task=side)]
        sides[side] = embedded(several, "/v1/multi-vector", model="prompted", input=["A dog"], input_type=side)
        assert sides[side] == want
        task = {"query": "retrieval.query", "document": "retrieval.passage"}[side]
        assert embedded(several, model="prompted", input="A dog", task=task, return_multivector=True) == want
    assert sides["query"] != sides["document"]
    status, found = ask(several, "/v1/embeddings", {"model": "prompted", "input": "A dog", "task": "separation"})
    assert status == 400 and found["error"]["param"] == "task" and "`task` must be" in found["error"]["message"]


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/v1/embeddings", {"late_chunking": True}, "late_chunking"),
    ("/v1/embeddings", {"input": [{"image": "https://x"}]}, "`input[0].image`"),
    ("/v1/embeddings", {"input": [{}]}, "`input[0]`"),
    ("/v1/embeddings", {"input": [{"text": ""}]}, "input[0].text"),
    ("/v1/embeddings", {"input": [{"text": "a"}, [5]]}, "both"),
    ("/v1/embeddings", {"embedding_type": ["float", "binary"]}, "embedding_type"),
    ("/v1/embeddings", {"embedding_type": "int8"}, "embedding_type"), ("/v1/embeddings", {"task": "none"}, "task"),
    ("/v1/embeddings", {"input": LONG, "truncate": False}, "tokens"),
    ("/v1/embeddings", {"return_multivector": True, "dimensions": 8}, "`dimensions` must be absent"),
    ("/v1/embeddings", {"return_multivector": True, "normalized": True}, "`normalized` must be absent"),
    ("/v1/embeddings", {"return_multivector": True, "input": [5]}, "must be texts"),
    ("/v1/multi-vector", {"dimensions": 8}, "`dimensions` must be 48"), ("/v1/multi-vector", {"input": []}, "input"),
    ("/v1/multi-vector", {"input": [5]}, "input"), ("/v1/multi-vector", {"input_type": "other"}, "input_type"),
    ("/v1/multi-vector", {"model": "rank"}, "capability")], ids=str)
def test_errors_of_jinas_fields(server: Any, path: str, body: dict[str, Any], word: str) -> None:
    status, found = ask(server, path, {"model": "m3", "input": "a", **body})
    assert status == 400 and word in found["error"]["message"], found
