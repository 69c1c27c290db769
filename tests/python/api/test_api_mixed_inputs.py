"""embed, embed_image and rerank with texts and images: capabilities, bad inputs, jobs, tenants."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors

import imagemodels
import tinymodels
import visionmodels
from visionmodels import image

PHOTO = image(1, 50, 70)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, found = visionmodels.randomised("qwen3_vl"), {}
    for name in ("embedder", "reranker"):
        found[name] = visionmodels.save(model, "qwen3_vl", tmp_path_factory.mktemp(name))
        visionmodels.make_embedder(found[name], name == "reranker")
    found["clip"] = imagemodels.save(imagemodels.randomised("clip", 2), "clip", tmp_path_factory.mktemp("clip"))
    found["bert"] = tmp_path_factory.mktemp("text") / "bert"
    tinymodels.bert(found["bert"])
    return found


@pytest.fixture(scope="module")
def pool(folders: dict[str, Path]) -> Any:
    with mpool.Pool() as pool:
        for name, folder in folders.items():
            pool.register(name, folder)
        yield pool


def test_capabilities(pool: mpool.Pool) -> None:
    assert pool.get("embedder").capabilities == ("text_embedding", "image_embedding")
    assert pool.get("reranker").capabilities == ("text_embedding",)
    assert pool.get("embedder", "image_embedding").embed_image(PHOTO).shape == (64,)
    assert pool.check("embedder") > 0
    for call in (lambda: pool.chat("w40", "embedder"), lambda: pool.vision(PHOTO, "w40", "embedder"),
                 lambda: pool.embed("w40", "reranker"), lambda: pool.embed_image(PHOTO, "reranker"),
                 lambda: pool.rerank("w40", ["w41"], "embedder"), lambda: pool.embed_tokens("w40", "embedder"),
                 lambda: pool.embed_sparse("w40", "embedder"), lambda: pool.classify("w40", "embedder"),
                 lambda: pool.embed_all("w40", "embedder"), lambda: pool.embed({"image": PHOTO}, "bert")):
        with pytest.raises(errors.WrongCapability):
            call()


@pytest.mark.parametrize("given, param", [
    ({}, "inputs"), ({"txt": "a"}, "inputs"), ([{"text": "w40"}, {"text": None}], "inputs[1]"),
    ([{"text": 5}], "inputs[0].text"), ([{"image": 5}], "inputs[0].image"), ({"image": "missing.png"}, "inputs.image"),
    ([{"image": [PHOTO, b"no image"]}], "inputs[0].image[1]"), ([{"text": ["w40", "\ud800"]}], "inputs[0].text[1]"),
    ([{"image": [PHOTO] * 257}], "inputs[0].image[256]"),
    ([{"image": "https://example.com/a.png"}], "inputs[0].image"), ([{"image": []}], "inputs[0]"),
    (["w40", PHOTO], "inputs[1]"), ([{"image": PHOTO}, [5, 6]], "inputs[1]")])
@pytest.mark.parametrize("model", ["embedder", "no/such-model"])
def test_bad_inputs(pool: mpool.Pool, model: str, given: Any, param: str) -> None:
    """They are refused before an unknown model is looked up."""
    with pytest.raises((errors.InvalidArgument, errors.FileError)) as caught:
        pool.embed(given, model)
    assert getattr(caught.value, "param", param) == param


def test_bad_documents(pool: mpool.Pool) -> None:
    for query, documents, param in (({"image": 5}, ["w40"], "query.image"), ("w40", [{"texts": 1}], "documents[0]"),
                                    ({}, ["w40"], "query")):
        with pytest.raises(errors.InvalidArgument) as caught:
            pool.rerank(query, documents, "reranker")
        assert caught.value.param == param
    with pytest.raises(errors.Unsupported):
        pool.rerank("w40", [{"image": PHOTO}], "bert")


def test_bad_inputs_become_rows_of_nan(pool: mpool.Pool) -> None:
    given: list[Any] = ["w40", {"image": b"no image"}, {"image": PHOTO}, "", {"image": "missing.png", "text": "w41"}]
    found = pool.embed(given, "embedder", on_error="null")
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False, True, True]
    assert np.array_equal(found[2], pool.embed_image(PHOTO, "embedder"))


@pytest.mark.parametrize("bad", [{"txt": "a"}, {"text": "w5", "image": PHOTO}, {"image": []}, {"image": b"no image"}])
def test_bad_inputs_of_two_encoders_become_rows_of_nan(pool: mpool.Pool, bad: Any) -> None:
    texts, images = pool.embed("w7", "clip"), pool.embed_image(PHOTO, "clip")
    for good, wanted in (({"image": PHOTO}, images), ({"text": "w7"}, texts)):
        found = pool.embed([bad, good], "clip", on_error="null")
        assert np.isnan(found[0]).all() and np.array_equal(found[1], wanted)


def test_texts_beyond_the_context_are_truncated(pool: mpool.Pool) -> None:
    """A text may exceed not only the limit of the embedder (300) but also the context of its decoder."""
    short, long = ({"image": PHOTO, "text": " ".join(["w40"] * count)} for count in (400, 5000))
    assert np.array_equal(pool.embed(long, "embedder"), pool.embed(short, "embedder"))


def test_errors_of_images_alone_name_images(pool: mpool.Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["embedder"], tmp_path / "small"))
    path = folder / "sentence_bert_config.json"
    path.write_text(path.read_text().replace('"max_seq_length": 300', '"max_seq_length": 10'))
    for given, param in ((PHOTO, "images"), ([PHOTO], "images[0]")):
        with pytest.raises(errors.ContextOverflow) as caught:
            pool.embed_image(given, str(folder))
        assert caught.value.param == param


def test_models_with_two_encoders(pool: mpool.Pool) -> None:
    given: list[Any] = ["w5 w6", {"image": PHOTO}, {"text": "w7"}]
    wanted = np.stack([pool.embed("w5 w6", "clip"), pool.embed_image(PHOTO, "clip"), pool.embed("w7", "clip")])
    assert np.array_equal(pool.embed(given, "clip"), wanted)
    assert np.array_equal(pool.submit("text_embedding", inputs=given, model="clip").result(), wanted)
    assert np.array_equal(pool.embed({"image": PHOTO}, "clip"), wanted[1])
    assert pool.embed(given, "clip", precision="ubinary").shape == (3, 3)
    with pytest.raises(errors.InvalidArgument) as caught:
        pool.embed([{"text": "w5", "image": PHOTO}], "clip")
    assert caught.value.param == "inputs[0]"


def test_jobs_of_several_inputs(pool: mpool.Pool) -> None:
    given: list[Any] = [f"w{at}" for at in range(10, 30)]
    job = pool.submit("text_embedding", inputs=given, model="embedder")
    assert np.array_equal(job.result(60), pool.embed(given, "embedder")) and job.position() == -1 and job.eta() == 0.0
    stopped = pool.submit("text_embedding", inputs=[{"image": image(7, 60, 60)}] * 8, model="embedder")
    if stopped.cancel():
        with pytest.raises(errors.Cancelled):
            stopped.result()
    empty = pool.submit("text_embedding", inputs=[], model="embedder")
    assert empty.result().shape == (0, 64)


@pytest.fixture(scope="module")
def short_queue(folders: dict[str, Path]) -> Any:
    with mpool.Pool(mpool.PoolConfig(batch_queue_capacity=2, prompt_queue_capacity=2, vision_queue_capacity=2)) as pool:
        pool.register("embedder", folders["embedder"])
        yield pool


def test_jobs_of_more_inputs_than_the_queue_holds(short_queue: mpool.Pool) -> None:
    """A full queue rejects the first input only."""
    given: list[Any] = [f"w{at}" for at in range(10, 40)]
    wanted = short_queue.embed(given, "embedder")
    job = short_queue.submit("text_embedding", inputs=given, model="embedder")
    assert np.array_equal(job.result(60), wanted) and job.done()

    async def awaited() -> Any:
        return await short_queue.submit("text_embedding", inputs=given, model="embedder")

    assert np.array_equal(asyncio.run(awaited()), wanted)
    polled = short_queue.submit("text_embedding", inputs=given, model="embedder")
    while not polled.done():
        time.sleep(0.001)
    assert len(polled._started) == 30 and np.array_equal(polled.result(0), wanted)


def test_a_cancelled_task_cancels_all_inputs_of_its_job(short_queue: mpool.Pool) -> None:
    given = [{"text": " ".join(f"w{at}" for _ in range(250))} for at in range(10, 40)]

    async def cancelled() -> Any:
        job = short_queue.submit("text_embedding", inputs=given, model="embedder")
        tasks = [asyncio.ensure_future(job._wait_async()) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert not job._stopped  # another task waits for it
        tasks[1].cancel()
        assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == \
            [asyncio.CancelledError] * 2
        return job

    job = asyncio.run(cancelled())
    with pytest.raises(errors.Cancelled):
        job.result(60)
    with pytest.raises(errors.Cancelled):
        job._started[-1].wait()
        job._started[-1].check()
    assert len(job._started) < 30


def test_token_ids(pool: mpool.Pool) -> None:
    """They are the whole prompt."""
    with pytest.raises(errors.InvalidArgument) as caught:
        pool.embed([[40, visionmodels.IMAGE]], "embedder")
    assert caught.value.param == "inputs[0]"
    assert pool.embed([[40, 41], [42]], "embedder").shape == (2, 64)


def test_prompts_of_one_tenant_are_kept_from_others(pool: mpool.Pool) -> None:
    """The beginning of a prompt, with its image, is computed again for another tenant."""
    given = [{"image": image(11, 60, 60), "text": " ".join(["w40"] * 100)}]

    def cached(tenant: str) -> int:
        job = pool.submit("text_embedding", inputs=given, model="embedder", tenant=tenant)
        assert np.array_equal(job.result(), wanted)
        return job._ticket.usage()[2]

    wanted = pool.embed(given, "embedder", tenant="a")
    assert cached("b") == 0 and cached("a") >= 64


def test_sentence_transformers_interface(pool: mpool.Pool, folders: dict[str, Path]) -> None:
    from PIL import Image

    from mpool.integrations.sentence_transformers import SentenceTransformer

    model = SentenceTransformer(pool.get("embedder"))
    photo = Image.fromarray(PHOTO)
    found = model.encode(["w40", photo, {"image": photo, "text": "w41"}], prompt="w30")
    wanted = pool.embed(["w40", {"image": PHOTO}, {"image": PHOTO, "text": "w41"}], "embedder", prompt="w30",
                        compute="float32")
    assert np.array_equal(found, wanted)
    assert model.encode(photo).shape == (64,)
