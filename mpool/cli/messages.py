"""Errors of the library in the words of the command line: options in place of parameters and values of Python."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from ..server.option_table import with_options
from .formats import flag_of

if TYPE_CHECKING:
    from ..errors import MpoolError

#: Parameter of the library -> attribute of the parsed arguments, where they have different names.
_NAMES = {"adapters": "adapter", "images": "image", "allowed_hosts": "allow_host",
          "allowed_origins": "allow_origin"}
#: Attribute of the parsed arguments -> what hints say in Python, and what they say on the command line.
_HINTS = {"adapter": ("mpool.load(model, adapters={name: path}) adds adapters", "--adapter NAME=PATH adds one"),
          "no_truncate": ("set truncate=True", "leave out --no-truncate"),
          "on_error": ("on_error='null'", "--on-error null"),
          "allow_urls": ("allow_urls=True", "--allow-urls"),
          "image": ("A string is a path, a URL or base64 of an image",
                    "Name an image file, or a URL with --allow-urls")}
#: Allowed values in Python -> what the command line has for them. The first rows are for single options.
_VALUES = {"None to generate until": "none to generate until", "True, False, or an integer from": "an integer from",
           "a dict whose keys are token ids": "ID=X, where ID is a token id",
           "None or False": "left out", "None": "left out"}


def text_of(error: MpoolError, arguments: object) -> str:
    """Return the text of an error, with command-line options (``--top-k``) instead of the parameters (``top_k``).

    An element of a list (``stop[0]``) has the option of the list, which may be repeated; the error has its value.

    Args:
        error: the error, which is changed.
        arguments: the parsed arguments.
    """
    for name, (python, option) in _HINTS.items():
        if error.hint and hasattr(arguments, name):
            error.hint = error.hint.replace(python, option)
    if (error.got or "").startswith("half of a surrogate pair"):  # Python's form of a byte that is not of the encoding
        error.hint = _encoding_hint(sys.getfilesystemencoding().upper())
    if error.problem is not None:  # every image of the command line is a path or a URL
        error.problem = error.problem.replace(" was read as a path: ", ": ", 1)
    if hasattr(arguments, "config") and with_options(error.message) != error.message:  # a server
        error.message = with_options(error.message)
    param = error.param or ""
    place = re.fullmatch(r"(\w+)(?:[\[.].*)?", param, re.DOTALL)
    flags: dict[str, str] = getattr(arguments, "flags", {})
    if param.startswith("response_format"):
        error.rename({param: flag_of(arguments) or param})
    elif place is not None and (flag := flags.get(_NAMES.get(place[1], place[1]))) is not None:
        _reword(error, flags)
        error.rename({param: flag})
    return str(error)


def _encoding_hint(encoding: str) -> str:
    """Return what to do if an argument has bytes that are not text in the encoding of the locale."""
    what = "Convert the argument to UTF-8" if encoding == "UTF-8" else "Set LC_ALL=C.UTF-8, or another locale of UTF-8"
    return f"The locale has the encoding {encoding}, in which the argument is no valid text. {what}"


def _reword(error: MpoolError, flags: dict[str, str]) -> None:
    """Replace the words of Python in an error about an option. The invalid value stays as it is."""
    if error.allowed is None or error.problem != f" must be {error.allowed}, got {error.got}":
        return
    allowed = error.allowed
    for python, words in _VALUES.items():
        allowed = re.sub(rf"\b{python}\b", words, allowed)
    for name, flag in flags.items():
        if "_" in name:  # others are also words of English
            allowed = re.sub(rf"`?\b{name}\b`?", flag, allowed)
    error.allowed, error.problem = allowed, f" must be {allowed}, got {error.got}"


__all__ = ["text_of"]
