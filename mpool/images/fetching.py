"""Images from URLs: http and https, limited in time and bytes. Only on request: whoever passes URLs on from others lets
them reach whatever this machine reaches."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import Any

from ..errors import DownloadError, InvalidArgument, MpoolError

#: Seconds in which an image has to come, unless the call has less.
SECONDS = 30.0
_CHUNK = 1 << 16


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.HTTPError(newurl, code, "redirected elsewhere", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, name: str, most: int, timeout: float | None = None) -> bytes:
    """The bytes behind a URL.

    Raises:
        DownloadError: it could not be had in time.
        InvalidArgument: it has more than ``most`` bytes.
    """
    seconds = SECONDS if timeout is None else min(timeout, SECONDS)
    deadline = time.monotonic() + seconds
    opener = urllib.request.build_opener(_Redirects())
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "mpool", "Accept": "image/*"})
        with opener.open(request, timeout=seconds) as answer:
            found = bytearray()
            while chunk := answer.read1(_CHUNK):
                found += chunk
                if len(found) > most:
                    raise InvalidArgument(f"{name} has more than {most:,} bytes, allowed: at most so many")
                if time.monotonic() > deadline:
                    raise TimeoutError
            return bytes(found)
    except MpoolError:
        raise
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{name} could not be fetched: the server answers {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) or isinstance(
            getattr(error, "reason", None), TimeoutError) else "the server cannot be reached"
        raise DownloadError(f"{name} could not be fetched: {why}") from None
