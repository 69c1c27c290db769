"""Images in messages of all protocols, compared with the library, and invalid images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servers import ask, limits, serving

imagemodels = pytest.importorskip("imagemodels")
visionmodels = pytest.importorskip("visionmodels")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
ollama = pytest.importorskip("ollama")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Any]:
    folders = {family: visionmodels.save(visionmodels.randomised(family), family, tmp_path_factory.mktemp(family))
               for family in visionmodels.FAMILIES}
    clip = imagemodels.save(imagemodels.randomised("clip", 2), "clip", tmp_path_factory.mktemp("clip"))
    models = [f"{family}={folder}" for family, folder in folders.items()]
    with serving([*models, f"llama={llama}", f"clip={clip}"]) as made:
        yield made


@pytest.fixture(scope="module")
def photo() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(visionmodels.image(7, 50, 60)).save(out, format="PNG")
    return out.getvalue()


@pytest.mark.parametrize("family", visionmodels.FAMILIES)
def test_all_protocols_agree_with_the_library(server: Any, photo: bytes, family: str) -> None:
    text = visionmodels.text(3, 6)
    wanted = server.state.pool.chat([{"role": "user", "content": text, "images": [photo]}], family, temperature=0,
                                    max_tokens=8).text
    encoded = base64.b64encode(photo).decode()
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded}},
             {"type": "text", "text": text}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.create(model=family, messages=[{"role": "user", "content": parts}],
                                              temperature=0, max_tokens=8)
    assert done.choices[0].message.content == wanted
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    question = {"type": "text", "text": text}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        turns = [{"role": "user", "content": [block, question]}]
        message = client.messages.create(model=family, messages=turns, max_tokens=8, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(model=family, messages=turns)
    assert "".join(part.text for part in message.content) == wanted
    assert counted.input_tokens == done.usage.prompt_tokens
    client = ollama.Client(host=server.url)
    options = {"temperature": 0, "num_predict": 8}
    chat = client.chat(family, [{"role": "user", "content": text, "images": [photo]}], options=options)
    assert chat.message.content == wanted
    assert client.generate(family, text, images=[photo], options=options).response == wanted
    assert "vision" in client.show(family).capabilities
    assert client.chat(family, [{"role": "user", "content": text}], options=options).done  # without an image


def test_number_of_tokens_of_an_image(server: Any, photo: bytes) -> None:
    """Every protocol states it, and OpenAI's ``detail`` is per image. Models without a choice ignore the field, which
    a strict server refuses."""
    data = base64.b64encode(photo).decode()

    def counted(model: str, path: str, tokens: Any, name: str | None = None, detail: str | None = None
                ) -> tuple[int, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": detail}}
        text = {"type": "text", "text": "w10"}
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": [image, text]}],
                                "max_tokens": 1}
        if path.startswith("/v1/messages"):
            body["messages"][0]["content"][0] = {"type": "image", "source": {"type": "base64", "data": data}}
        elif path == "/v1/responses":
            body |= {"max_output_tokens": 1, "input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": image["image_url"]["url"], "detail": detail},
                {"type": "input_text", "text": "w10"}]}]}
            del body["messages"], body["max_tokens"]
        elif path.startswith("/api"):
            turn = {"role": "user", "content": "w10", "images": [data]}
            body = {"model": model, "stream": False, "options": {"num_predict": 1, "image_tokens": tokens},
                    **({"messages": [turn]} if path == "/api/chat" else {"prompt": "w10", "images": [data]})}
            tokens = None
        if tokens is not None:
            field, _, key = (name or "image_tokens").partition(".")
            body[field] = {key: tokens} if key else tokens
        status, found = ask(server, path, body)
        if status != 200:
            return status, found
        usage = found.get("usage", found)
        return status, sum(usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "prompt_eval_count",
                                                           "cache_read_input_tokens"))

    few = counted("gemma4", "/v1/chat/completions", 70)
    usual = counted("gemma4", "/v1/chat/completions", 140)
    assert few[0] == usual[0] == 200 and usual[1] - few[1] > 50
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat", "/api/generate"):
        assert (counted("gemma4", path, 70), counted("gemma4", path, 140)) == (few, usual), path
        fields = ("options.image_tokens",) if path.startswith("/api") else ("image_tokens",)
        status, found = counted("gemma4", path, 71)
        error = found["error"]
        place = error if isinstance(error, str) else error.get("param") or error["message"]
        assert status == 400 and fields[0] in place, found
        assert counted("gemma3", path, 71) == counted("gemma3", path, None)
    assert counted("gemma4", "/v1/chat/completions", 140, "mm_processor_kwargs.max_soft_tokens") == usual
    for path in ("/v1/chat/completions", "/v1/responses"):
        assert counted("gemma4", path, None, detail="low") == few
        assert counted("gemma4", path, 140, detail="low") == usual
        assert counted("gemma4", path, None, detail="auto") == counted("gemma4", path, None)
    assert counted("llama", "/api/chat", 70)[0] == 400  # because of the image
    with limits(server, strict=True):
        for model, path, name in (("gemma3", "/v1/chat/completions", "image_tokens"),
                                  ("gemma3", "/v1/responses", "image_tokens"),
                                  ("gemma4", "/v1/chat/completions", "mm_processor_kwargs.do_resize")):
            status, found = counted(model, path, 70, name)
            assert status == 400 and found["error"]["param"] == name.partition(".")[0], found


@pytest.mark.parametrize("body, param", [
    ({"image_tokens": 0}, "image_tokens"), ({"image_tokens": 71}, "image_tokens"),
    ({"mm_processor_kwargs": {"max_soft_tokens": "70"}}, "mm_processor_kwargs.max_soft_tokens"),
    ({"mm_processor_kwargs": {"max_soft_tokens": 71}}, "mm_processor_kwargs.max_soft_tokens"),
    ({"mm_processor_kwargs": {"max_soft_tokens": 70}, "image_tokens": 70}, "image_tokens")])
def test_numbers_of_tokens_that_are_refused(server: Any, body: dict[str, Any], param: str) -> None:
    status, found = ask(server, "/v1/chat/completions", {"model": "gemma4", "messages": "w10", **body})
    assert (status, found["error"]["param"]) == (400, param), found


@pytest.mark.parametrize("more", [{"raw": True}, {"suffix": "w11"}])
def test_requests_without_images_have_no_number_of_tokens(server: Any, more: dict[str, Any]) -> None:
    body = {"model": "gemma4", "prompt": "w10", "stream": False, "options": {"image_tokens": 140}, **more}
    with limits(server, strict=True):
        status, found = ask(server, "/api/generate", body)
    assert status == 400 and "options.image_tokens" in found["error"], found
    status, found = ask(server, "/tokenize", {"model": "gemma4", "prompt": "w10", "image_tokens": 140})
    assert (status, found["error"]["param"]) == (400, "image_tokens"), found


def test_an_alias_has_a_number_of_tokens(server: Any, photo: bytes) -> None:
    status, _ = ask(server, "/api/create", {"model": "sharp", "from": "gemma4", "stream": False,
                                            "parameters": {"image_tokens": 140}})
    assert status == 200
    url = {"url": f"data:image/png;base64,{base64.b64encode(photo).decode()}"}
    turn: dict[str, Any] = {"role": "user", "content": [{"type": "image_url", "image_url": url},
                                                        {"type": "text", "text": "w10"}]}

    def counted(model: str, *details: str, **more: Any) -> int:
        for at, part in enumerate(turn["content"][:-1]):
            part["image_url"] = {**url, "detail": details[at]} if at < len(details) else url
        body = {"model": model, "messages": [turn], **more}
        count = int(ask(server, "/v1/chat/completions", {**body, "max_tokens": 1})[1]["usage"]["prompt_tokens"])
        assert ask(server, "/tokenize", body)[1]["count"] == count
        return count

    # the models of the tests have 70 by default
    usual = counted("sharp")
    assert usual == counted("gemma4", image_tokens=140) > counted("gemma4")
    assert usual == counted("gemma4", mm_processor_kwargs={"max_soft_tokens": 140}) == counted("sharp", "auto")
    # the client's `detail` wins over the number of the alias, and its number over both
    few = counted("sharp", "low")
    assert few == counted("gemma4", "low") == counted("sharp", image_tokens=70)
    assert usual == counted("sharp", "low", image_tokens=140)
    turn["content"].insert(0, dict(turn["content"][0]))
    assert counted("sharp", "low") == counted("sharp", "auto", "low") == counted("gemma4", "low", "high")
    image = {"type": "input_image", "image_url": url["url"]}
    low, auto = (ask(server, "/v1/responses", {"model": "sharp", "max_output_tokens": 1, "input": [
        {"role": "user", "content": [{**image, "detail": detail}]}]})[1]["usage"]["input_tokens"]
        for detail in ("low", "auto"))
    assert auto - low == usual - few
    assert ask(server, "/v1/completions", {"model": "sharp", "prompt": "w10", "max_tokens": 1})[0] == 200
    assert ask(server, "/api/generate", {"model": "sharp", "prompt": "w10", "raw": True, "stream": False,
                                         "options": {"num_predict": 1}})[0] == 200


@pytest.mark.parametrize("named", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x.png", "photo.jpg", "",
                                   "data:image/png,notbase64", "data:image/png;base64,!!!", "%2Fetc%2Fpasswd",
                                   base64.b64encode(b"no image at all").decode(),
                                   "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\nx").decode(),
                                   "data:image/png,PHOTO", "data:PHOTO", "data:image/png;base64;x,PHOTO"])
def test_invalid_images_are_refused(server: Any, photo: bytes, named: str) -> None:
    named = named.replace("PHOTO", base64.b64encode(photo).decode())
    parts = [{"type": "image_url", "image_url": {"url": named}}, {"type": "text", "text": "x"}]
    status, found = ask(server, "/v1/chat/completions", {"model": "llava", "messages": [{"role": "user",
                                                                                        "content": parts}]})
    assert status == 400 and "0x" not in found["error"]["message"]
    status, found = ask(server, "/api/chat", {"model": "llava", "messages": [
        {"role": "user", "content": "x", "images": [named]}]})
    assert status == 400 and "0x" not in found["error"]
    for source in ({"type": "base64", "media_type": "image/png", "data": named}, {"type": "url", "url": named}):
        status, found = ask(server, "/v1/messages", {"model": "llava", "max_tokens": 3, "messages": [
            {"role": "user", "content": [{"type": "image", "source": source}]}]})
        assert status == 400 and "0x" not in found["error"]["message"]


def test_the_error_of_an_image_names_the_field_of_the_request(server: Any) -> None:
    for path, body, name in (("/api/generate", {"prompt": "x", "images": ["!"]}, "images[0]"),
                             ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["!"]}]},
                              "messages[0].images[0]")):
        status, found = ask(server, path, {"model": "llava", **body})
        assert status == 400 and f"`{name}` must be base64" in found["error"]


CORRUPTED = base64.b64encode(b"\x89PNG\r\n\x1a\nx").decode()
DATA = "data:image/png;base64," + CORRUPTED
EARLIER = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CORRUPTED}}
TOOL = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
    {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, SOURCE]}]}]


@pytest.mark.parametrize("path, body, name", [
    ("/v1/chat/completions", {"messages": [*EARLIER, {"role": "user", "content": [
        {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": DATA}}]}]},
     "messages[3].content[1].image_url.url"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": DATA}]}],
                              "stream": True}, "messages[0].content[0].image_url"),
    ("/v1/responses", {"instructions": "s", "input": [*EARLIER[1:], {"role": "user", "content": [
        {"type": "input_image", "image_url": DATA}]}]}, "input[2].content[0].image_url"),
    ("/v1/messages", {"system": "s", "max_tokens": 3, "messages": [
        *EARLIER[1:], {"role": "user", "content": [SOURCE]}]},
     "messages[2].content[0].source.data"),
    ("/v1/messages", {"max_tokens": 3, "messages": TOOL}, "messages[2].content[0].content[1].source.data"),
    ("/v1/messages/count_tokens", {"messages": TOOL}, "messages[2].content[0].content[1].source.data"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}, {"role": "thinking", "content": "t"}, {
        "role": "assistant", "content": "y"}, {"role": "user", "content": "x", "images": ["PHOTO", CORRUPTED]}]},
     "messages[3].images[1]"),
    ("/api/generate", {"prompt": "x", "system": "s", "images": ["PHOTO", CORRUPTED]}, "images[1]"),
    ("/api/generate", {"prompt": "x", "images": [CORRUPTED]}, "images[0]"),
    ("/api/mpool/embed_images", {"model": "clip", "images": [CORRUPTED]}, "images[0]"),
    ("/api/mpool/embed_images", {"model": "clip", "images": ["PHOTO", DATA]}, "images[1]")])
def test_the_error_of_an_unreadable_image_names_its_field(server: Any, photo: bytes, path: str, body: dict[str, Any],
                                                          name: str) -> None:
    """The bytes of a field are no image. The library finds that in messages that differ from those of the client."""
    text = json.dumps({"model": "llava", **body}).replace("PHOTO", base64.b64encode(photo).decode())
    status, found = ask(server, path, json.loads(text))
    error = found["error"]
    message = error if isinstance(error, str) else error["message"]
    assert status == 400 and f"`{name}` must be a PNG, JPEG" in message, found
    if path in ("/v1/chat/completions", "/v1/responses"):
        assert error["param"] == name and error["code"] == "invalid_value"


def test_the_error_of_an_image_for_a_language_model_names_its_field(server: Any) -> None:
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": DATA}]
    status, found = ask(server, "/v1/responses", {"model": "llama", "instructions": "s", "input": [
        {"role": "user", "content": parts}]})
    name = "input[0].content[1].image_url"
    assert (status, found["error"]["param"]) == (400, name)
    assert f"`{name}` is of type image; this model supports text only" in found["error"]["message"]


# ---- images at URLs --------------------------------------------------------------------------------------------------

URL = "https://images.example/photo.png"


@pytest.fixture(scope="module")
def fetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path_factory.mktemp("llava"))
    with serving([f"llava={folder}"], allow_image_urls=True, max_body=1 << 20) as made:
        yield made


def bodies(url: str, text: str = "x") -> dict[str, dict[str, Any]]:
    """Return a request with the URL of an image for each protocol that has URLs."""
    part = {"type": "text", "text": text}
    return {
        "/v1/chat/completions": {"model": "llava", "temperature": 0, "max_tokens": 8, "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, part]}]},
        "/v1/responses": {"model": "llava", "temperature": 0, "max_output_tokens": 8, "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": url},
                                         {"type": "input_text", "text": text}]}]},
        "/v1/messages": {"model": "llava", "temperature": 0, "max_tokens": 8, "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}, part]}]}}


def test_images_at_urls(fetching: Any, photo: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server asks for public addresses only. The bytes of a body and 30 s are limits of all images together."""
    asked, now = list[Any](), [100.0]

    def fetch(url: str, name: str, most: int, timeout: float | None, public: bool) -> bytes:
        asked.append((url, most, timeout, public))
        now[0] += 7
        return photo

    monkeypatch.setattr("mpool.server.image_urls.fetch", fetch)
    monkeypatch.setattr("mpool.server.image_urls.time", SimpleNamespace(monotonic=lambda: now[0]))
    text = visionmodels.text(3, 6)
    wanted = fetching.state.pool.chat([{"role": "user", "content": text, "images": [photo]}], "llava", temperature=0,
                                      max_tokens=8).text
    for path, body in bodies(URL, text).items():
        status, found = ask(fetching, path, body)
        assert status == 200 and asked == [(URL, 1 << 20, 30.0, True)], found
        asked.clear()
        answer = found["choices"][0]["message"]["content"] if "choices" in found else \
            found["output"][0]["content"][0]["text"] if "output" in found else found["content"][0]["text"]
        assert answer == wanted
    body = bodies(URL, text)["/v1/chat/completions"]
    status, counted = ask(fetching, "/tokenize", {"model": "llava", "messages": body["messages"]})
    assert status == 200 and [one[0] for one in asked] == [URL], counted
    asked.clear()
    assert counted["count"] == ask(fetching, "/v1/chat/completions", body)[1]["usage"]["prompt_tokens"]
    asked.clear()
    body = bodies(URL)["/v1/chat/completions"]
    body["messages"][0]["content"] = body["messages"][0]["content"][:1] * 2
    ask(fetching, "/v1/chat/completions", body)
    assert asked == [(URL, 1 << 20, 30.0, True), (URL, (1 << 20) - len(photo), 23.0, True)]
    asked.clear()
    body["messages"][0]["content"] = body["messages"][0]["content"][:1] * 17
    status, found = ask(fetching, "/v1/chat/completions", body)
    assert status == 400 and "at most 16 URLs" in found["error"]["message"] and not asked
    assert found["error"]["param"] == "messages[0].content[16].image_url.url"


@pytest.mark.parametrize("url", ["https://127.0.0.1:1/x.png", "https://localhost:1/x.png", "https://[::1]:1/x.png",
                                 "https://169.254.169.254/latest/meta-data", "https://10.0.0.1/x.png", "https:///x",
                                 "https://[::ffff:10.0.0.1]/x.png", "https://2130706433:1/x.png", "https://[zz]/"])
def test_private_addresses_are_refused(fetching: Any, url: str) -> None:
    """The error does not say whether anything listens there."""
    names = ("messages[0].content[0].image_url.url", "input[0].content[0].image_url",
             "messages[0].content[0].source.url")
    for (path, body), name in zip(bodies(url).items(), names, strict=True):
        status, found = ask(fetching, path, body)
        error = found["error"]
        assert status == 400 and f"`{name}` must be the https URL of a public server" in error["message"], found
        assert error.get("param", name) == name


@pytest.mark.parametrize("url", ["https://", "https://[::1", "https://host:99999/x.png", "https://host:x/"])
def test_urls_without_a_host_are_refused_before_the_model(fetching: Any, url: str) -> None:
    """A request with such a value is wrong whatever its model: 400, not the 404 of an unknown model."""
    for path, body in bodies(url).items():
        for model in ("llava", "none"):
            status, found = ask(fetching, path, {**body, "model": model})
            assert status == 400 and "https URL" in found["error"]["message"], found


@pytest.mark.parametrize("url", ["http://images.example/x.png", "ftp://images.example/x", "file:///etc/passwd",
                                 "https://" + "x" * 5000, " https://images.example/x.png"])
def test_other_urls_are_refused(fetching: Any, server: Any, url: str) -> None:
    for path, body in bodies(url).items():
        assert ask(fetching, path, body)[0] == 400
    for path, body in bodies(URL).items():
        status, found = ask(server, path, body)
        assert status == 400 and "--allow-image-urls" in found["error"]["message"], found
