"""``/v1/images/generations``."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ... import aio
from ...errors import InvalidArgument, sentence
from ...host import native_calls
from ..errors import Refusal, openai_error
from ..models import is_missing
from ..operations import Context, Operation, json_response
from ..sampling import check_count
from ..streaming import EVENTS, MergedStreams, StreamedResponse, event
from .structs import ImageData, ImageEvent, ImagesRequest, ImagesResponse, ImageUsage
from .text import encode

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...aio import AsyncImageStream
    from ..models import ServedModel

_PARTIAL, _COMPLETED = "image_generation.partial_image", "image_generation.completed"
_NO_TOKENS = ImageUsage({"image_tokens": 0, "text_tokens": 0})
#: Fields of a request that have the same name in the library.
_OPTIONS = ("n", "negative_prompt", "num_inference_steps", "guidance_scale")


async def generations(context: Context, body: ImagesRequest) -> Response:
    """Generate images from a prompt, as one response or as a stream with previews."""
    served = await context.model(body.model)
    context.check_text(body.prompt, "prompt")
    check_count(body.n or 1, context.state.settings.max_n)
    options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        options["seed"] = body.seed % 2**64
    if body.size not in (None, "auto"):
        options["width"], options["height"] = map(int, body.size.split("x"))  # type: ignore[union-attr]
    if body.stream:
        if (body.n or 1) != 1:
            raise Refusal("invalid_value", f"`n` must be 1 with `stream`, got {body.n}.", "n")
        return await _streamed(context, served, body, options)
    if body.partial_images:
        raise Refusal("invalid_value", "`partial_images` requires `stream`.", "partial_images")
    with _size_errors():
        made = await aio.generate_image(body.prompt, served.model, pool=context.state.pool, **options)
    data = [ImageData(await _encoded_file(image, body)) for image in made.images]
    return json_response(ImagesResponse(int(time.time()), data, _size(made.image), body.output_format or "png",
                                        made.seed))


@contextmanager
def _size_errors() -> Iterator[None]:
    """Report an invalid ``width`` or ``height`` as an error of ``size``, the field of the request."""
    try:
        yield
    except InvalidArgument as error:
        if error.param not in ("width", "height"):
            raise
        raise Refusal("invalid_value", f"`size`: {sentence(error.message)}", "size") from None


def _size(image: Image) -> str:
    return f"{image.width}x{image.height}"


async def _encoded_file(image: Image, body: ImagesRequest) -> str:
    """Encode an image as a file in base64, on a thread for images."""
    kind = body.output_format or "png"
    quality: dict[str, Any] = {} if kind == "png" or body.output_compression is None \
        else {"quality": body.output_compression}

    def write() -> str:
        out = io.BytesIO()
        image.save(out, format=kind.upper(), **quality)
        return base64.b64encode(out.getvalue()).decode()

    return await native_calls.IMAGES.arun(write)


async def _streamed(context: Context, served: ServedModel, body: ImagesRequest, options: dict[str, Any]) -> Response:
    previews = body.partial_images or 0
    if previews and not is_missing(served):
        pipeline = await native_calls.REQUESTS.arun(lambda: served.model.description.pipeline)
        steps = body.num_inference_steps or (1 if pipeline is None else pipeline.steps)  # None: the request is refused
        options["preview_every"] = max(1, steps // (previews + 1))
    created = int(time.time())
    with _size_errors():
        stream: AsyncImageStream = aio.generate_image(body.prompt, served.model, stream=True, pool=context.state.pool,
                                                        **options)
        chunks = MergedStreams(context.state, [stream])
        await chunks.start()

    async def image_event(kind: str, image: Image, index: int | None = None, seed: int | None = None) -> bytes:
        return event(encode(ImageEvent(kind, await _encoded_file(image, body), created, _size(image),
                                       body.output_format or "png", "auto", "opaque", index, seed,
                                       None if kind == _PARTIAL else _NO_TOKENS)), kind)

    async def events() -> AsyncIterator[bytes]:
        shown = 0
        async for _, step in chunks:
            if step.preview is not None and shown < previews:
                yield await image_event(_PARTIAL, step.preview, shown)
                shown += 1
        made = await stream.result()
        yield await image_event(_COMPLETED, made.image, seed=made.seed)

    return StreamedResponse(context, events(), lambda refusal: event(openai_error(refusal)), EVENTS, chunks.close)


OPERATIONS = (
    Operation("POST", "/v1/images/generations", generations, ImagesRequest, ImagesResponse,
              "Generate images from a prompt", EVENTS, "images_generations"),
)

__all__ = ["OPERATIONS"]
