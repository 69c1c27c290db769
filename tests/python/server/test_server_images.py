"""Image generation over HTTP, compared with the library on the same models."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers import ask, server_idle, serving

openai = pytest.importorskip("openai")
pytest.importorskip("diffusers")

SMALL: dict[str, Any] = {"num_inference_steps": 4, "seed": 5}


@pytest.fixture(scope="module")
def server(flux: Path, llama: Path) -> Iterator[Any]:
    with serving([f"flux={flux}", f"llama={llama}"]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def decoded(data: str) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


def test_images_agree_with_the_library(server: Any, client: Any) -> None:
    wanted = server.state.pool.generate_image("a cat", "flux", width=32, height=48, n=2, **SMALL)
    made = client.images.generate(model="flux", prompt="a cat", size="32x48", n=2, extra_body=SMALL)
    assert len(made.data) == 2 and made.size == "32x48" and made.output_format == "png"
    for mine, theirs in zip(made.data, wanted.images, strict=True):
        assert np.array_equal(decoded(mine.b64_json), np.asarray(theirs))
    for kind in ("jpeg", "webp"):
        file = client.images.generate(model="flux", prompt="a cat", size="32x48", output_format=kind,
                                      output_compression=80, extra_body=SMALL)
        assert decoded(file.data[0].b64_json).shape == (48, 32, 3)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_partial_images_precede_the_image(server: Any, client: Any, wanted: int) -> None:
    whole = server.state.pool.generate_image("a cat", "flux", width=32, height=32, **SMALL)
    found = list(client.images.generate(model="flux", prompt="a cat", size="32x32", stream=True, partial_images=wanted,
                                        extra_body=SMALL))
    kinds = [event.type for event in found]
    assert kinds == ["image_generation.partial_image"] * wanted + ["image_generation.completed"]
    assert [event.partial_image_index for event in found[:-1]] == list(range(wanted))
    assert np.array_equal(decoded(found[-1].b64_json), np.asarray(whole.image))
    assert all(decoded(event.b64_json).shape == (32, 32, 3) for event in found)
    server_idle(server)


@pytest.mark.parametrize("field", [{"size": "32"}, {"size": "0x32"}, {"size": "31x31"}, {"size": "99999x16"}, {"n": 0},
                                   {"n": 65}, {"partial_images": 4}, {"partial_images": 2}, {"response_format": "url"},
                                   {"output_format": "gif"}, {"background": "transparent"}, {"prompt": ""},
                                   {"num_inference_steps": 0}, {"guidance_scale": -1},
                                   {"stream": True, "n": 2}, {"model": "llama"}], ids=str)
def test_invalid_requests_are_refused(server: Any, field: dict[str, Any]) -> None:
    status, found = ask(server, "/v1/images/generations", {"model": "flux", "prompt": "a cat", **field})
    assert status == 400 and found["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_size(server: Any, stream: bool) -> None:
    status, found = ask(server, "/v1/images/generations", {"model": "flux", "prompt": "a cat", "size": "33x32",
                                                           "stream": stream})
    assert (status, found["error"]["param"]) == (400, "size")
    assert "`size`: `width` must be a multiple of " in found["error"]["message"]
