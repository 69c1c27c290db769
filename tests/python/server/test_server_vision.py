"""Images in messages of all protocols, compared with the library, and invalid images."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import ask, serving

visionmodels = pytest.importorskip("visionmodels")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
ollama = pytest.importorskip("ollama")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Any]:
    folder = visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path_factory.mktemp("llava"))
    with serving([f"llava={folder}", f"llama={llama}"]) as made:
        yield made


@pytest.fixture(scope="module")
def photo() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(visionmodels.image(7, 50, 60)).save(out, format="PNG")
    return out.getvalue()


def test_all_protocols_agree_with_the_library(server: Any, photo: bytes) -> None:
    text = visionmodels.text(3, 6)
    wanted = server.state.pool.chat([{"role": "user", "content": text, "images": [photo]}], "llava", temperature=0,
                                    max_tokens=8).text
    encoded = base64.b64encode(photo).decode()
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded}},
             {"type": "text", "text": text}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.create(model="llava", messages=[{"role": "user", "content": parts}],
                                              temperature=0, max_tokens=8)
    assert done.choices[0].message.content == wanted
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    question = {"type": "text", "text": text}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        turns = [{"role": "user", "content": [block, question]}]
        message = client.messages.create(model="llava", messages=turns, max_tokens=8, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(model="llava", messages=turns)
    assert message.content[0].text == wanted
    assert counted.input_tokens == done.usage.prompt_tokens
    client = ollama.Client(host=server.url)
    options = {"temperature": 0, "num_predict": 8}
    chat = client.chat("llava", [{"role": "user", "content": text, "images": [photo]}], options=options)
    assert chat.message.content == wanted
    assert client.generate("llava", text, images=[photo], options=options).response == wanted
    assert "vision" in client.show("llava").capabilities
    assert client.chat("llava", [{"role": "user", "content": text}], options=options).done  # without an image


@pytest.mark.parametrize("named", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x.png", "photo.jpg", "",
                                   "data:image/png,notbase64", "data:image/png;base64,!!!", "%2Fetc%2Fpasswd",
                                   base64.b64encode(b"no image at all").decode(),
                                   "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\nx").decode()])
def test_invalid_images_are_refused(server: Any, named: str) -> None:
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
