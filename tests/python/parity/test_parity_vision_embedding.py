"""Vectors and scores of vision models for texts, images and both, compared with transformers in float32."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import visionmodels
from paritymodels import torch
from visionmodels import EOS, IMAGE, image

TOLERANCE = 1e-4
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")
PHOTO, LONG, SMALL = image(1, 63, 90), image(2, 24, 120), image(3, 40, 40)
#: Inputs of a request, and the words and images of each in the order of the template: images first.
INPUTS: list[tuple[Any, str, list[np.ndarray]]] = [
    ("w40 w41", "w40 w41", []), ({"image": PHOTO}, "", [PHOTO]), ({"text": "w42", "image": LONG}, "w42", [LONG]),
    ({"image": [SMALL, PHOTO], "text": ["w43", "w44"]}, "w43 w44", [SMALL, PHOTO]), ({"text": "w45"}, "w45", [])]


def encoded(folder: Path, model: Any, text: str, images: list[np.ndarray]) -> list[int]:
    """Return token ids: ``<image>`` becomes the placeholders of the next image."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = text.split("<image>")
    assert len(parts) == len(images) + 1
    shown = parts[0]
    for pixels, part in zip(images, parts[1:]):
        down, across = visionmodels.processed(model.mpool_family, pixels)["image_grid_thw"][0, 1:].tolist()
        shown += " w20 " + "<image> " * (down * across // 4) + "w21 " + part
    return tokenizer.encode(shown, add_special_tokens=False).ids


def last_state(model: Any, ids: list[int], images: list[np.ndarray]) -> Any:
    with torch.no_grad():
        if not images:
            return model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return model.model(**visionmodels.inputs(model, ids, images)).last_hidden_state[0, -1]


def turn(role: str, words: str, images: list[np.ndarray]) -> str:
    return f"{role} : " + "<image> " * len(images) + (words + " " if words else "")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = visionmodels.randomised(request.param)
    folder = visionmodels.save(model, request.param, tmp_path_factory.mktemp(request.param))
    visionmodels.make_embedder(folder)
    with mpool.Pool() as pool:
        yield model, folder, pool


def wanted(family: Any, system: str = "") -> np.ndarray:
    model, folder, _ = family
    rows = []
    for _, words, images in INPUTS:
        text = (turn("system", system, []) if system else "") + turn("user", words, images) + "assistant : "
        rows.append(last_state(model, encoded(folder, model, text, images), images))
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def test_vectors_of_texts_images_and_both(family: Any) -> None:
    _, folder, pool = family
    given = [one for one, _, _ in INPUTS]
    found = pool.embed(given, folder, compute="float32")
    assert found.shape == (5, 64) and np.abs(found - wanted(family)).max() <= TOLERANCE
    queries = pool.embed(given, folder, compute="float32", task="query")
    assert np.abs(queries - wanted(family, "w30 w31")).max() <= TOLERANCE
    assert np.array_equal(queries, pool.embed(given, folder, compute="float32", prompt="w30 w31"))
    # one input, images alone, iterators, jobs and asyncio give the same bytes
    assert np.array_equal(pool.embed(given[2], folder, compute="float32"), found[2])
    assert np.array_equal(pool.embed_image([PHOTO], folder, compute="float32"), found[1:2])
    assert np.array_equal(pool.embed_image(PHOTO, folder, compute="float32"), found[1])
    assert np.array_equal(np.stack(list(pool.embed_iter(iter(given), folder, compute="float32"))), found)
    job = pool.submit("text_embedding", inputs=given, model=folder, compute="float32")
    assert np.array_equal(job.result(), found) and job.done()
    assert np.array_equal(asyncio.run(_several(pool, given, folder)), np.stack([found] * 3))


async def _several(pool: mpool.Pool, given: list[Any], folder: Path) -> Any:
    async def waited() -> Any:
        return await pool.submit("text_embedding", inputs=given, model=folder, compute="float32")

    return await asyncio.gather(mpool.aio.embed(given, folder, pool=pool, compute="float32"), waited(),
                                mpool.aio.embed(given, folder, pool=pool, compute="float32", tenant="other"))


def test_sizes_and_truncation(family: Any) -> None:
    model, folder, pool = family
    given = [one for one, _, _ in INPUTS]
    whole = pool.embed(given, folder, compute="float32", normalize=False)
    cut = pool.embed(given, folder, compute="float32", dimensions=20)
    assert np.abs(cut - whole[:, :20] / np.linalg.norm(whole[:, :20], axis=1, keepdims=True)).max() <= 1e-6
    words = [f"w{20 + at % 100}" for at in range(400)]
    text = turn("user", " ".join(words), []) + "assistant : "
    ids = encoded(folder, model, text, [])
    state = last_state(model, ids[:298] + ids[-2:], [])
    found = pool.embed(" ".join(words), folder, compute="float32", normalize=False)
    assert np.abs(found - state.numpy()).max() <= TOLERANCE * max(1, float(state.abs().max()))
    with pytest.raises(mpool.errors.ContextOverflow) as caught:
        pool.embed([" ".join(words)], folder, truncate=False)
    assert (caught.value.tokens, caught.value.limit, caught.value.param) == (404, 300, "inputs[0]")
    with pytest.raises(mpool.errors.ContextOverflow) as caught:
        pool.embed({"image": [image(9, 63, 90)] * 5}, folder)
    assert caught.value.limit == 300


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = visionmodels.randomised("qwen3_vl")
    folder = visionmodels.save(model, "qwen3_vl", tmp_path_factory.mktemp("reranker"))
    visionmodels.make_embedder(folder, scores=True)
    with mpool.Pool() as pool:
        yield model, folder, pool


@pytest.mark.parametrize("at", range(3))
def test_scores_of_texts_and_images(reranker: Any, at: int) -> None:
    model, folder, pool = reranker
    query, words, seen = INPUTS[at]
    logits = []
    for _, more, images in INPUTS:
        text = turn("query", words, seen) + turn("document", more, images) + "assistant : "
        state = last_state(model, encoded(folder, model, text, [*seen, *images]), [*seen, *images])
        row = model.lm_head(state)
        logits.append(float(row[50] - row[60]))
    given = [one for one, _, _ in INPUTS]
    found = pool.rerank(query, given, folder, compute="float32", function_to_apply="none")
    assert np.abs(np.array(found.scores) - logits).max() <= TOLERANCE * max(1, np.abs(logits).max())
    assert [one.index for one in found] == np.argsort(-np.array(logits), kind="stable").tolist()
    assert [one.text for one in sorted(found, key=lambda one: one.index)] == ["w40 w41", "", "w42", "w43w44", "w45"]
    scores = pool.rerank(query, given, folder, compute="float32", top_k=2)
    assert len(scores) == 2 and np.abs(np.array(scores.scores) - 1 / (1 + np.exp(-np.array(logits)))).max() <= 1e-4


def test_pixels_of_the_processor_are_replaced(tmp_path: Path) -> None:
    """``processing_kwargs`` of sentence-transformers go to the processor."""
    model = visionmodels.randomised("qwen3_vl")
    folder = visionmodels.save(model, "qwen3_vl", tmp_path)
    visionmodels.make_embedder(folder, image={"min_pixels": 100, "max_pixels": 1500})
    with mpool.Pool() as pool:
        found = pool.embed({"image": PHOTO}, folder, compute="float32", normalize=False)
    visionmodels.PROCESSORS["qwen3_vl"], usual = {
        **visionmodels.PROCESSORS["qwen3_vl"], "size": {"shortest_edge": 100, "longest_edge": 1500}}, \
        visionmodels.PROCESSORS["qwen3_vl"]
    try:
        ids = encoded(folder, model, turn("user", "", [PHOTO]) + "assistant : ", [PHOTO])
        state = last_state(model, ids, [PHOTO]).numpy()
    finally:
        visionmodels.PROCESSORS["qwen3_vl"] = usual
    assert EOS not in ids and IMAGE in ids
    assert np.abs(found - state).max() <= TOLERANCE * max(1, np.abs(state).max())


@pytest.mark.parametrize("scores", [False, True])
def test_original_files_of_published_repositories(tmp_path: Path, scores: bool) -> None:
    """They have no modules: prompts, sizes and limits are those of the code that the authors publish, which renders
    with Qwen3-VL's own template and puts images first."""
    from mpool.conversation.template import ChatTemplate
    from mpool.models.formats.hf_folder import describe_folder

    folder = visionmodels.save(visionmodels.make("qwen3_vl", 1, 1), "qwen3_vl", tmp_path)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w50"', '"yes"').replace('"w60"', '"no"'))
    kind = "Reranker" if scores else "Embedding"
    found = describe_folder(str(folder), key="k", ref="r", repository=f"Qwen/Qwen3-VL-{kind}-2B")
    assert describe_folder(str(folder), key="k", ref="r").capability == "vision"
    assert found.embedding is not None and found.vision is not None and found.chat_template is not None
    assert found.embedding.score_tokens == ((50, 60) if scores else ())
    assert found.vision.pixels == (4096, min(1800 * 1024, 16384 * 16))
    assert found.embedding.max_tokens == 1023  # that of the small model is below the published limit
    template, seen = ChatTemplate(found.chat_template), "<|vision_start|><|image_pad|><|vision_end|>"
    both = [{"type": "text", "text": "T"}, {"type": "image"}]
    begin, end = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n"
    if not scores:
        for system, said in (([], "Represent the user's input."), (
                [{"role": "system", "content": [{"type": "text", "text": "S."}]}], "S.")):
            assert template.render([*system, {"role": "user", "content": both}], add_generation_prompt=True) == \
                f"{begin}{said}<|im_end|>\n<|im_start|>user\n{seen}T{end}"
        return
    shown = template.render([{"role": "query", "content": both[:1]}, {"role": "document", "content": both}],
                            add_generation_prompt=True)
    assert shown == (
        f"{begin}Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
        "that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a search query, "
        f"retrieve relevant candidates that answer the query.<Query>:T\n<Document>:{seen}T{end}")
