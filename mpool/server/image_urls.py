"""Images at https URLs in requests, for ``mpool serve --allow-image-urls``.

Clients choose these URLs, so the server connects only to public addresses: see :mod:`mpool.images.fetching`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..conversation.messages import NamedImage
from ..errors import DownloadError, InvalidArgument
from ..host import native_calls
from ..images.fetching import SECONDS, fetch
from .errors import Refusal

if TYPE_CHECKING:
    from .operations import Context

#: Maximum number of URLs in a request.
_MAX_URLS = 16


async def with_images(context: Context, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the URLs of images in messages of the library by the files.

    One time limit (30 s) and one limit of size (``Settings.max_body``) hold for all images of a request.

    Raises:
        Refusal: There are too many URLs, or an image cannot be fetched. The message is the same for private addresses
            and unreachable servers, so that it tells nothing about the network of this machine. Or the server does
            not serve the model of the request.
    """
    parts = [part for message in messages if isinstance(message.get("content"), list)
             for part in message["content"] if part["type"] == "image" and isinstance(part["image"].image, str)]
    if len(parts) > _MAX_URLS:
        raise Refusal("invalid_value", f"A request must have at most {_MAX_URLS} URLs of images, got {len(parts)}.",
                      parts[_MAX_URLS]["image"].name)
    if parts and context.missing is not None:  # for a request that must fail, the server fetches nothing
        raise context.missing
    most, end = context.state.settings.max_body, time.monotonic() + SECONDS
    for part in parts:
        url, name = part["image"].image, part["image"].name
        try:
            left = max(end - time.monotonic(), 0.0)
            data = await native_calls.IMAGE_REQUESTS.arun(fetch, url, name, most, left, True)
        except (DownloadError, InvalidArgument):
            raise Refusal("invalid_value", f"`{name}` must be the https URL of a public server that sends an image "
                                           f"within {SECONDS:.0f} s, of at most {most:,} bytes in total.",
                          name) from None
        context.memory.add(len(data))
        part["image"] = NamedImage(data, name)
        most -= len(data)
    return messages


__all__ = ["with_images"]
