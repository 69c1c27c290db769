"""vision, describe_image and chat with images: message formats, streams, asyncio, jobs, the image cache, errors, and
concurrent callers."""

from __future__ import annotations

import os
import asyncio
import base64
import io
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors

import visionmodels
from visionmodels import image, text

GREEDY = {"temperature": 0, "max_tokens": 6, "compute": "float32", "ignore_eos": True}
PHOTO, OTHER = image(1, 50, 70), image(2, 40, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path_factory.mktemp("llava")))


@pytest.fixture
def pool() -> Any:
    with mpool.Pool() as pool:
        yield pool


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


# ---- message formats -----------------------------------------------------------------------------------------------

def test_all_message_formats_give_the_same_prompt(pool: mpool.Pool, model: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(png(PHOTO))
    encoded = base64.b64encode(png(PHOTO)).decode()
    question = text(1, 9)
    wanted = pool.vision(PHOTO, question, model, **GREEDY)
    assert wanted.usage.prompt_tokens == 2 + 25 + 9 + 2 and len(wanted.token_ids) == 6
    says = {"type": "text", "text": question}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    shapes: list[dict[str, Any]] = [
        {"content": [url, says]}, {"content": [says, url]},
        {"content": [{"type": "input_image", "image_url": url["image_url"]["url"]}, says]},  # type: ignore[index]
        {"content": [{"type": "image", "image": PHOTO}, says]}, {"content": [{"type": "image", "path": path}, says]},
        {"content": [{"type": "image", "base64": encoded}, question]},
        {"content": [{"type": "image", "source": {"type": "base64", "data": encoded}}, says]},
        {"content": question, "images": [str(path)]}, {"content": question, "images": [encoded]},
        {"content": question, "images": [png(PHOTO)]},
    ]
    for shape in shapes:
        done = pool.chat([{"role": "user", **shape}], model, **GREEDY)
        assert done.token_ids == wanted.token_ids, shape
    assert pool.describe_image(path, question, model, **GREEDY) == wanted.text
    assert pool.get(model).vision(path, question, **GREEDY).token_ids == wanted.token_ids


def test_several_images_and_turns(pool: mpool.Pool, model: str) -> None:
    both = pool.vision([PHOTO, OTHER], text(1, 9), model, **GREEDY)
    turned = pool.vision([OTHER, PHOTO], text(1, 9), model, **GREEDY)
    one = pool.vision(PHOTO, text(1, 9), model, **GREEDY)
    assert both.usage.prompt_tokens == one.usage.prompt_tokens + 25
    assert len({both.token_ids, turned.token_ids, one.token_ids}) == 3
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(1, 9), "images": [PHOTO]}]
    first = pool.chat(messages, model, **GREEDY)
    messages += [first.message, {"role": "user", "content": [{"type": "image", "image": OTHER}, text(2, 5)]}]
    second = pool.chat(messages, model, **GREEDY)
    assert first.token_ids == one.token_ids and second.usage.prompt_tokens > 50 + 14


def test_without_images(pool: mpool.Pool, model: str) -> None:
    """A vision model also serves chats and completions without images."""
    assert pool.chat([{"role": "user", "content": text(1, 9)}], model, **GREEDY).usage.prompt_tokens == 2 + 9 + 2
    assert pool.generate(text(1, 9), model, **GREEDY).usage.prompt_tokens == 9
    assert pool.get(model).capabilities == ("vision", "text_to_text") and pool.get(model).capability == "vision"


def test_a_template_for_texts(tmp_path: Path, pool: mpool.Pool) -> None:
    """If the template only accepts text content, image placeholders are inserted into the text."""
    folder = visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path)
    plain = "{% for message in messages %}{{ message.role + ' : ' + message.content + ' ' }}{% endfor %}assistant : "
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": plain}))
    done = pool.vision([PHOTO, OTHER], text(1, 9), folder, **GREEDY)
    assert done.usage.prompt_tokens == 2 + 50 + 9 + 2


# ---- streams, asyncio, jobs ----------------------------------------------------------------------------------------

def test_streams_and_jobs_give_the_same_text(pool: mpool.Pool, model: str) -> None:
    question = text(4, 12)
    whole = pool.vision(PHOTO, question, model, **GREEDY)
    stream = pool.vision(PHOTO, question, model, stream=True, **GREEDY)
    assert "".join(chunk.text for chunk in stream) == whole.text == stream.result().text
    job = pool.submit("vision", images=PHOTO, prompt=question, model=model, **GREEDY)
    assert job.capability == "vision" and job.result(timeout=60).text == whole.text
    messages = [{"role": "user", "content": question, "images": [PHOTO]}]
    job = pool.submit("vision", messages=messages, model=model, **GREEDY)
    assert "".join(chunk.text for chunk in job) == whole.text

    async def both() -> tuple[str, str, str]:
        chunks = []
        async for chunk in mpool.aio.vision(PHOTO, question, model, stream=True, pool=pool, **GREEDY):
            chunks.append(chunk.text)
        done = await mpool.aio.vision(PHOTO, question, model, pool=pool, **GREEDY)
        chatted = await mpool.aio.chat(messages, model, pool=pool, **GREEDY)
        return "".join(chunks), done.text, chatted.text

    assert asyncio.run(both()) == (whole.text,) * 3


@pytest.mark.parametrize("name", ["describe_image", "describe_url"])
def test_descriptions_stream(name: str, pool: mpool.Pool, model: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(png(PHOTO))
    question, handle = text(4, 12), pool.get(model)
    wanted = pool.vision(PHOTO, question, model, **GREEDY).text
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = str(path) if name == "describe_image" else f"http://127.0.0.1:{server.server_address[1]}/photo.png"
        assert getattr(pool, name)(place, question, model, **GREEDY) == wanted
        for stream in (getattr(pool, name)(place, question, model, stream=True, **GREEDY),
                       getattr(handle, name)(place, question, stream=True, **GREEDY),
                       getattr(mpool, name)(place, question, handle, stream=True, **GREEDY)):
            assert isinstance(stream, mpool.Stream)
            assert "".join(chunk.text for chunk in stream) == wanted == stream.result().text

        async def both() -> tuple[str, str]:
            described = getattr(mpool.aio, name)
            chunks = [chunk.text async for chunk in described(place, question, handle, stream=True, **GREEDY)]
            return "".join(chunks), await described(place, question, handle, stream=False, **GREEDY)

        assert asyncio.run(both()) == (wanted, wanted)
        with pytest.raises(mpool.InvalidArgument) as caught:
            getattr(pool, name)(place, question, model, stream="yes")
        assert caught.value.param == "stream"
        server.shutdown()


def test_float32_results_do_not_depend_on_models_loaded_before(model: str) -> None:
    """On CPUs with bfloat16 products, images are encoded in bfloat16 by default, even for a float32 decoder."""
    call = {**GREEDY, "max_tokens": 50, "temperature": 1.2, "seed": 3}
    with mpool.Pool() as fresh, mpool.Pool() as pool:
        pool.load(model)
        assert pool.vision(PHOTO, text(1, 9), model, **call).token_ids == fresh.vision(PHOTO, text(1, 9), model,
                                                                                       **call).token_ids


# ---- the image cache -----------------------------------------------------------------------------------------------

def test_a_repeated_image_is_found_in_the_cache(pool: mpool.Pool, model: str) -> None:
    """The cache compares pixels, so the source does not matter. Another image with the same text is a miss."""
    images = [image(seed, 40, 40) for seed in range(6)]
    first = pool.vision(images[:4], text(1, 9), model, **GREEDY)
    again = pool.vision([png(one) for one in images[:4]], text(2, 30), model, **GREEDY)
    assert first.usage.cached_tokens == 0 and again.usage.cached_tokens == 64  # 64 of 102: one whole block
    other = pool.vision([images[5], *images[1:4]], text(1, 9), model, **GREEDY)
    assert other.usage.cached_tokens == 0 and other.token_ids != first.token_ids
    last = pool.vision([*images[:3], images[5]], text(1, 9), model, **GREEDY)
    assert last.usage.cached_tokens == 64 and last.token_ids != first.token_ids
    with mpool.Pool() as fresh:
        for given, found in ((images[:4], first), ([*images[:3], images[5]], last)):
            assert fresh.vision(given, text(1, 9), model, **GREEDY).token_ids == found.token_ids


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "pixtral"])
def test_a_second_turn_takes_the_rows_of_the_first(tmp_path: Path, family: str) -> None:
    """Image rows with taps, before layers with states, and in lines with a token after each have the bits of a fresh
    pool. Another image is a miss."""
    folder = str(visionmodels.save(visionmodels.randomised(family), family, tmp_path))
    images = [image(seed, 63, 90) for seed in range(3)]

    def turns(first: int) -> list[list[dict[str, Any]]]:
        asked = [{"role": "user", "content": [{"type": "image", "image": images[at]},
                                              {"type": "text", "text": text(at, words)}]}
                 for at, words in ((first, 150), (2, 30))]
        return [asked[:1], [asked[0], {"role": "assistant", "content": text(7, 20)}, asked[1]]]

    def result(done: Any) -> Any:
        return done.token_ids, [token.logprob for token in done.logprobs]

    asked = [*turns(0), *turns(1), turns(0)[1]]
    with mpool.Pool() as pool:
        found = [pool.chat(messages, folder, logprobs=1, **GREEDY) for messages in asked]
    cached = [done.usage.cached_tokens for done in found]
    assert cached[0] == cached[2] == 0 and cached[1] >= 64 and cached[3] >= 64 and cached[4] > 256
    for messages, done in zip(asked[:4], found):
        with mpool.Pool() as fresh:
            assert result(fresh.chat(messages, folder, logprobs=1, **GREEDY)) == result(done)
    assert result(found[4]) == result(found[1]) != result(found[3])


def test_concurrent_requests_give_the_same_results_as_single_ones(model: str) -> None:
    """Different requests, some with common images: the bits do not depend on the batch, the slices or the prefixes."""
    images = [image(seed, 40, 40 + seed) for seed in range(5)]
    asked = [(images[i % 5:i % 5 + 1 + i % 3], text(i % 7, 5 + 40 * (i % 4))) for i in range(24)]
    with mpool.Pool() as pool:
        wanted = [pool.vision(given, question, model, **GREEDY).token_ids for given, question in asked]
    got: list[Any] = [None] * len(asked)
    with mpool.Pool() as pool:

        def work(start: int) -> None:
            for i in range(start, len(asked), 6):
                got[i] = pool.vision(*asked[i], model, **GREEDY).token_ids

        threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == wanted


# ---- errors --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given, words", [
    (b"no image", "must be a PNG, JPEG, WebP, GIF or BMP image"), (np.zeros((1, 0, 3), np.uint8), "pixels"),
    (np.zeros((4, 2000, 3), np.uint8), "an aspect ratio of at most 200"), (png(PHOTO)[:200], "truncated or corrupted"),
    ("data:image/png;base64,!!!", "base64"), ("https://example.org/a.png", "fetching is not allowed"),
    (np.zeros((3, 40, 40), np.float64) - 1, "an array of shape"),
    ([], "`images` must be an image or a list of images, got an empty list"),
    (17, "`images` must be .*, got int")])
def test_bad_images(pool: mpool.Pool, model: str, given: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        pool.vision(given, "w10", model, **GREEDY)
    assert pool.vision(PHOTO, "w10", model, **GREEDY).finish_reason == "length"


@pytest.mark.parametrize("part, words", [
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "a data: URL"),
    ({"type": "image_url"}, "a data: URL"), ({"type": "image"}, "0 images"),
    ({"type": "image", "image": PHOTO, "path": "a"}, "2 images"), ({"type": "word"}, "must be a string"),
    ({"type": "image", "path": "/nowhere.png"}, "nowhere")])
def test_bad_parts(pool: mpool.Pool, model: str, part: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.MpoolError, match=words):
        pool.chat([{"role": "user", "content": [part, "w10"]}], model, **GREEDY)


def test_a_prompt_before_its_image_names_the_order(pool: mpool.Pool, model: str, tmp_path: Path) -> None:
    file = tmp_path / "a cat.png"
    file.write_bytes(png(PHOTO))
    with pytest.raises(errors.InvalidArgument, match="got a text, and the file .*a cat.png as the prompt") as found:
        pool.vision("What is this?", str(file), model)
    assert found.value.param == "images" and found.value.hint == "Use vision(images, prompt, model)"
    assert pool.vision(str(file), str(file), model, **GREEDY).finish_reason == "length"  # a prompt may name a file
    with pytest.raises(errors.FileError, match="was read as a path"):
        pool.vision("no cat.png", "What is this?", model)


def test_other_faults(pool: mpool.Pool, model: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.WrongCapability, match="capability is text_to_text, not vision"):
        pool.vision(PHOTO, "Hello", llama)
    with pytest.raises(errors.Unsupported, match="supports text only"):
        pool.chat([{"role": "user", "content": "Hello", "images": [PHOTO]}], llama)
    with pytest.raises(errors.InvalidArgument, match="`prompt` must be a text of .*, got ''") as found:
        pool.vision(PHOTO, "", model)
    assert found.value.param == "prompt"
    with mpool.Pool(mpool.PoolConfig(offline=True)) as offline, \
            pytest.raises(errors.OfflineError, match="mpool pull .*SmolVLM-256M-Instruct"):
        offline.vision(PHOTO, "Hello")
    with pytest.raises(errors.ContextOverflow, match="1000 of them for 40 images") as caught:
        pool.vision([PHOTO] * 40, text(1, 100), model)
    assert caught.value.limit == 1023
    for prompt, more in (([5, visionmodels.IMAGE, 9], {}), ("w5 <image> w9", {"parse_special": True})):
        with pytest.raises(errors.InvalidArgument, match="must not have image tokens, got <image> at index 1") as found:
            pool.generate(prompt, model, **more)
        assert found.value.param == "prompt" and "mpool.vision(images, prompt, model)" in str(found.value)
    with pytest.raises(errors.InvalidArgument, match="`prompt` is required"):
        pool.submit("vision", images=PHOTO, model=model)
    with pytest.raises(errors.InvalidArgument, match="an http or https URL"):
        pool.describe_url("file:///etc/passwd", model=model)
    folder = visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "assistant : "}))
    with pytest.raises(errors.InvalidArgument, match="number of image tokens .*, got 1 images and 0 tokens"):
        pool.vision(PHOTO, "w10", folder)


def test_a_placeholder_in_the_users_text_is_plain_text(pool: mpool.Pool, model: str) -> None:
    """`<image>` in a user's text is not an image."""
    done = pool.vision(PHOTO, "w10 <image> w11", model, **GREEDY)
    assert done.usage.prompt_tokens == 2 + 25 + 4 + 2  # `<image>` is split into two words


def test_rotary_embedding_of_qwens_image_encoder(tmp_path: Path, pool: mpool.Pool) -> None:
    """`rope_parameters` of the vision config; older files lack the key."""
    folder = visionmodels.save(visionmodels.randomised("qwen2_5_vl"), "qwen2_5_vl", tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def base(**changed: Any) -> float:
        vision = {name: value for name, value in config["vision_config"].items() if name != "rope_parameters"}
        (folder / "config.json").write_text(json.dumps({**config, "vision_config": {**vision, **changed}}))
        return pool.get(str(folder)).description.spec.kv["mpool.image.rope_base"]

    assert base() == base(rope_parameters={}) == 10000.0
    assert base(rope_parameters={"rope_type": "axial", "rope_theta": 500.0}) == 500.0
    for wrong, name in (({"rope_type": "linear"}, "rope_type"), ({"rope_theta": 0.0}, "rope_theta")):
        with pytest.raises(errors.FormatError, match=name):
            base(rope_parameters=wrong)
    with pytest.raises(errors.MpoolError, match="factor"):
        base(rope_parameters={"factor": 2.0})


def test_the_command(pool: mpool.Pool, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpool.cli import main

    for name, pixels in (("a.png", PHOTO), ("b.png", OTHER)):
        (tmp_path / name).write_bytes(png(pixels))
    wanted = pool.vision([PHOTO, OTHER], text(1, 9), model, **GREEDY)
    given = ["vision", text(1, 9), "--image", str(tmp_path / "a.png"), "-i", str(tmp_path / "b.png"), "-m", model,
             "--compute", "float32", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    assert main(given) == 0 and capsys.readouterr().out == wanted.text + "\n"
    assert main([*given, "--json"]) == 0 and json.loads(capsys.readouterr().out)["text"] == wanted.text
    assert main(["show", model, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["capability"] == "vision" and shown["image_size"] == 40 and shown["context_length"] == 1024


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", visionmodels.FAMILIES)
def test_a_prompt_of_run_names_images(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in the prompt is an image of the message; the reply is that of ``chat``."""
    from mpool.cli import main

    folder, photo = visionmodels.save(visionmodels.randomised(family), family, tmp_path / "model"), tmp_path / "a.png"
    photo.write_bytes(png(PHOTO))
    with mpool.Pool() as pool:
        wanted = pool.chat([{"role": "user", "content": text(1, 9), "images": [str(photo)]}], str(folder),
                           temperature=0, max_tokens=6, compute="float32")
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
    assert main(["run", str(folder), f"{text(1, 9)} {photo}", "--temperature", "0", "--max-tokens", "6", "--compute",
                 "float32", "--stats"]) == 0
    found = capsys.readouterr()
    assert found.out == wanted.text + "\n" and f"{wanted.usage.prompt_tokens} prompt tokens" in found.err
