"""Texts and images in ``/v1/embeddings`` and ``/v1/rerank`` in the shapes of several APIs, against the library."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import imagemodels
import visionmodels
from servers import ask, limits, serving
from visionmodels import image

PHOTO = image(1, 50, 70)
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def png(pixels: np.ndarray) -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


RAW = png(PHOTO)
URL = f"data:image/png;base64,{RAW}"
PART = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = visionmodels.randomised("qwen3_vl")
    folders = {}
    for name, scores in (("embedder", False), ("reranker", True)):
        folders[name] = visionmodels.save(model, "qwen3_vl", tmp_path_factory.mktemp(name))
        visionmodels.make_embedder(folders[name], scores)
    folders["gemma"] = tmp_path_factory.mktemp("gemma")
    visionmodels.embedding_gemma2(folders["gemma"])
    folders["chat"] = visionmodels.save(model, "qwen3_vl", tmp_path_factory.mktemp("chat"))
    path = folders["chat"] / "chat_template.json"
    (folders["chat"] / "video_preprocessor_config.json").write_text(json.dumps(
        {"do_resize": False, "image_mean": _MEAN, "image_std": _STD}))
    path.write_text(path.read_text().replace(
        "{% if add_generation_prompt %}", "{% for part in messages[0]['content'] %}{% if part['type'] == 'video' %}"
        "{{ 'w156 ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"))
    for name in ("clip", "dinov2"):
        folders[name] = imagemodels.save(imagemodels.randomised(name, 2), name, tmp_path_factory.mktemp(name))
    folders["unlike"] = visionmodels.save(model, "qwen3_vl", tmp_path_factory.mktemp("unlike"))
    (folders["unlike"] / "chat_template.json").write_text((folders["chat"] / "chat_template.json").read_text())
    (folders["unlike"] / "video_preprocessor_config.json").write_text('{"image_std": [0.4, 0.4, 0.4]}')
    with serving([f"{name}={folder}" for name, folder in folders.items()]) as made:
        yield made


def rows(server: Any, body: dict[str, Any]) -> np.ndarray:
    status, found = ask(server, "/v1/embeddings", {"model": "embedder", **body})
    assert status == 200, found
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    return np.array([one["embedding"] for one in found["data"]], np.float32)


def test_shapes_of_embeddings(server: Any) -> None:
    pool = server.state.pool
    wanted = pool.embed([{"image": PHOTO}, "w40", {"image": PHOTO, "text": "w41"}], "embedder")
    jina = [{"image": RAW}, {"text": "w40"}, {"text": "w41", "image": URL}]
    parts = [PART, {"type": "text", "text": "w40"}, {"content": [PART, {"type": "text", "text": "w41"}]}]
    for inputs in (jina, parts):
        assert np.array_equal(rows(server, {"input": inputs}), wanted)
        assert np.array_equal(rows(server, {"input": inputs[2]}), wanted[2:])
    asked = pool.embed({"image": PHOTO, "text": "w41"}, "embedder", prompt="w50 w51")
    turns = [{"role": "system", "content": "w50 w51"},
             {"role": "user", "content": [PART, {"type": "text", "text": "w41"}]}]
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    for messages in (turns, [*turns, empty]):
        body = {"messages": messages, "continue_final_message": len(messages) == 3, "add_special_tokens": True}
        assert np.array_equal(rows(server, body)[0], asked)
    assert np.array_equal(rows(server, {"messages": turns[1:]}), wanted[2:])
    found = ask(server, "/v1/embeddings", {"model": "embedder", "input": jina[2]})[1]
    assert found["usage"]["prompt_tokens"] > 20


def test_a_model_whose_vectors_are_means(server: Any) -> None:
    pool, body = server.state.pool, {"model": "gemma", "dimensions": 20}
    given = [{"image": PHOTO}, "w40", {"image": PHOTO, "text": "w41"}]
    found = rows(server, {**body, "input": [{"image": RAW}, {"text": "w40"}, {"image": URL, "text": "w41"}]})
    assert np.array_equal(found, pool.embed(given, "gemma", dimensions=20))
    messages = [{"role": "system", "content": "w30 w31 "}, {"role": "user", "content": [PART]}]
    asked = pool.embed({"image": PHOTO}, "gemma", task="query", dimensions=20)
    assert np.array_equal(rows(server, {**body, "messages": messages})[0], asked)
    for bad in ({"audio": RAW}, {"content": [{"type": "input_audio", "input_audio": {"data": RAW, "format": "wav"}}]},
                {"content": [{"type": "video_url", "video_url": {"url": URL}}]}):
        assert ask(server, "/v1/embeddings", {**body, "input": [bad]})[0] == 400


@pytest.mark.parametrize("model", ["clip", "dinov2"])
def test_models_with_an_encoder_of_images(server: Any, model: str) -> None:
    pool = server.state.pool
    seen = pool.embed_image(PHOTO, model)
    assert np.array_equal(rows(server, {"model": model, "input": [{"image": URL}]})[0], seen)
    if model == "clip":
        both = rows(server, {"model": model, "input": ["w5 w6", {"image": URL}, {"text": "w7"}]})
        assert np.array_equal(both, [pool.embed("w5 w6", model), seen, pool.embed("w7", model)])
        status, found = ask(server, "/v1/embeddings", {"model": model, "input": {"image": URL, "text": "w5"}})
        assert status == 400 and found["error"]["param"] == "input"


def test_shapes_of_rankings(server: Any) -> None:
    pool = server.state.pool
    wanted = pool.rerank({"image": PHOTO}, ["w40", {"image": PHOTO}, {"image": PHOTO, "text": "w41"}], "reranker")
    documents = ["w40", {"image": RAW}, {"content": [PART, {"type": "text", "text": "w41"}]}]
    for query in ({"image": URL}, {"content": [PART]}):
        status, found = ask(server, "/v1/rerank", {"model": "reranker", "query": query, "documents": documents,
                                                   "return_documents": True})
        assert status == 200, found
        assert [(one["index"], one["document"]["text"]) for one in found["results"]] == \
            [(one.index, one.text) for one in wanted]
        assert [one["relevance_score"] for one in found["results"]] == [one.score for one in wanted]


def test_scores_of_images(server: Any) -> None:
    """In the shapes of vLLM: with a reranker, one query for all documents or one each; cosines with an embedder."""
    pool = server.state.pool
    photo, other = {"image": PHOTO}, {"image": image(2, 50, 70), "text": "w41"}
    document = {"content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(other['image'])}"}},
                            {"type": "text", "text": "w41"}]}

    def scores(model: str, **body: Any) -> list[float]:
        status, found = ask(server, "/v1/score", {"model": model, **body})
        assert status == 200, found
        return [one["score"] for one in found["data"]]

    def ranked(query: Any, documents: list[Any], **options: Any) -> list[float]:
        found = pool.rerank(query, documents, "reranker", **options)
        return [score for _, score in sorted((one.index, one.score) for one in found.results)]

    query = {"content": [PART]}
    for one, two in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        assert scores("reranker", **{one: query, two: ["w40", document]}) == ranked(photo, ["w40", other])
    assert scores("reranker", text_1="w40", text_2=document) == ranked("w40", [other])
    pairs = scores("reranker", text_1=[query, "w40", document], text_2=["w40", document, "w42"])
    assert pairs == [*ranked(photo, ["w40"]), *ranked("w40", [other]), *ranked(other, ["w42"])]
    asked = scores("reranker", text_1=query, text_2="w40", instruction="w50 w51")
    assert asked == ranked(photo, ["w40"], prompt="w50 w51") != ranked(photo, ["w40"])
    left, right = pool.embed([photo, other], "embedder")
    cosine = left @ right / np.linalg.norm(left) / np.linalg.norm(right)
    assert scores("embedder", data_1=query, data_2=document) == pytest.approx([cosine], abs=1e-5)


@pytest.mark.parametrize("model", ["reranker", "embedder"])
@pytest.mark.parametrize("one, two", [("text_1", "text_2"), ("queries", "items")])
def test_errors_of_pairs_name_the_field(server: Any, model: str, one: str, two: str) -> None:
    """A reranker scores each query with the list of its documents, of another order."""
    bad = {"content": [PART] * 12}  # truncation removes no images
    for first, second, param, place in (
            (["w40", "w41", "w40"], ["w50", "w51", bad], two, f"{two}[2]"),
            (["w40", "w41", "w40"], ["w50", bad, "w52"], two, f"{two}[1]"),
            ("w40", ["w50", bad, "w52"], two, f"{two}[1]"), ("w40", bad, two, two), ("w40", [bad], two, f"{two}[0]"),
            *(((bad, ["w50"], one, one), ([bad], ["w50"], one, f"{one}[0]")) if model == "embedder" else ())):
        status, found = ask(server, "/v1/score", {"model": model, one: first, two: second})
        assert (status, found["error"]["param"]) == (400, param) and f"`{place}`" in found["error"]["message"], found


@pytest.mark.parametrize("path, body, param", [
    ("score", {"text_1": {"content": [{}]}, "text_2": "w40"}, "text_1.content[0]"),
    ("score", {"text_1": "w40", "text_2": ["w40", {"image": "no image"}]}, "text_2[1].image"),
    ("score", {"text_1": "w40", "data_1": "w41", "text_2": "w40"}, "text_1"), ("score", {"data_1": "w40"}, "text_2"),
    ("score", {"data_1": ["w40", {"image": URL}], "data_2": ["w40"] * 3}, "data_1"),
    ("score", {"queries": "w40", "items": "w41", "prompt": "w50", "instruction": "w50"}, "instruction"),
    ("embeddings", {"input": [{"image": "no image"}]}, "input[0].image"),
    ("embeddings", {"input": ["w40", {"image_url": {"url": "/etc/passwd"}}]}, "input[1].image_url"),
    ("embeddings", {"input": {"image": "https://example.com/a.png"}}, "input.image"),
    ("embeddings", {"input": [{"image": base64.b64encode(b"GIF89a" + bytes(60)).decode()}]}, "input[0].image"),
    ("embeddings", {"input": [{}]}, "input[0]"),
    ("embeddings", {"input": [[5, 6], {"text": "w40", "image": URL}]}, "input"),
    ("embeddings", {}, "input"),
    ("embeddings", {"input": "w40", "messages": [{"role": "user", "content": "w40"}]}, "messages"),
    ("embeddings", {"messages": [{"role": "user", "content": "w40"}] * 2}, "messages"),
    ("embeddings", {"messages": [{"role": "system", "content": [PART]}, {"role": "user", "content": "w40"}]},
     "messages[0]"),
    ("embeddings", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "w40"}, {"type": "video", "video": [URL, URL], "fps": 1}]}]},
     "messages[0].content[1]"),
    ("embeddings", {"messages": [{"role": "user", "content": "w40"}], "return_multivector": True}, "messages"),
    ("embeddings", {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "w40 " * 300}]}],
                    "truncate": False}, "messages"),
    ("embeddings", {"input": [{"image": URL}], "return_multivector": True}, "input"),
    ("multi-vector", {"input": [{"image": URL}]}, "input"),
    ("rerank", {"query": {"image": "no image"}, "documents": ["w40"]}, "query.image"),
    ("rerank", {"query": "w40", "documents": [{"image_url": URL, "text": "w41"}, {"content": [{}]}]},
     "documents[1].content[0]")])
def test_bad_inputs_are_refused(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    model = "reranker" if path in ("rerank", "score") else "embedder"
    status, found = ask(server, f"/v1/{path}", {"model": model, **body})
    assert (status, found["error"]["param"]) == (400, param), found


def test_files_are_decoded_off_the_event_loop(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mpool.server.operations as operations

    threads, decode = set(), operations._file_of

    def watched(text: str, name: str) -> bytes:
        threads.add(threading.current_thread().name)
        return decode(text, name)

    monkeypatch.setattr(operations, "_file_of", watched)
    large = f"data:image/png;base64,{png(image(3, 90, 90))}"
    assert len(large) > operations.LONG
    part = {"type": "image_url", "image_url": {"url": large}}
    for body in ({"input": [{"image": large}]}, {"messages": [{"role": "user", "content": [part]}]}):
        rows(server, body)
    ask(server, "/v1/rerank", {"model": "reranker", "query": {"image": large}, "documents": ["w40"]})
    assert threads and "server" not in threads


def test_urls_of_a_query_and_its_documents_have_one_limit(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("mpool.server.image_urls.fetch", lambda url, *more: asked.append(url) or base64.b64decode(RAW))
    url, body = "https://images.example/a.png", {"model": "reranker"}
    with limits(server, allow_image_urls=True):
        status, found = ask(server, "/v1/rerank", {**body, "query": {"image": url}, "documents": [{"image": url}] * 16})
        assert status == 400 and found["error"]["param"] == "query.image" and not asked
        assert ask(server, "/v1/rerank", {**body, "query": {"image": url}, "documents": [{"image": url}]})[0] == 200
    assert asked == [url] * 2


def test_frames_of_a_video_in_a_chat(server: Any) -> None:
    pool = server.state.pool
    frames = [image(seed, 48, 40) for seed in range(3)]
    shown = [f"data:image/png;base64,{png(frame)}" for frame in frames]
    text = {"type": "text", "text": "w40"}
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    wanted = pool.chat([{"role": "user", "content": [{"type": "video", "video": frames, "fps": 2}, text]}], "chat",
                       **options)

    def asked(part: dict[str, Any], model: str = "chat") -> tuple[int, Any]:
        return ask(server, "/v1/chat/completions", {
            "model": model, "messages": [{"role": "user", "content": [part, text]}], **options})

    for times in ({"fps": 2}, {"timestamps": [0, 0.5, 1]}):
        status, found = asked({"type": "video", "video": shown, **times})
        assert status == 200 and found["choices"][0]["message"]["content"] == wanted.text, found
        assert found["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    for part, param in (({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, ""),
                        ({"type": "video", "video": shown}, ""),
                        ({"type": "video", "video": ["a"], "fps": 1}, ".video[0]"),
                        ({"type": "video", "video": shown, "fps": -1}, ".fps")):
        status, found = asked(part)
        assert status == 400 and found["error"]["param"] in ("messages", f"messages[0].content[0]{param}"), found
    status, found = asked({"type": "video", "video": shown, "fps": 2}, "unlike")  # the client learns no folder
    assert status == 400 and "video_preprocessor_config.json" in found["error"]["message"], found
    assert "/" not in found["error"]["message"], found


def test_models_without_images_refuse_them(server: Any) -> None:
    status, found = ask(server, "/v1/embeddings", {"model": "reranker", "input": [{"image": URL}]})
    assert status == 400 and found["error"]["param"] == "model"
    status, _ = ask(server, "/v1/chat/completions", {"model": "embedder", "messages": [
        {"role": "user", "content": "w40"}]})
    assert status == 400
