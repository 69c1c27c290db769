"""Formats of completions on the command line: ``--grammar``, ``--regex`` and ``--json-schema``."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..checks import shown
from ..conversation.response_formats import MAX_CHARS
from ..errors import FileError, InvalidArgument, LimitError


def format_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return ``response_format`` for the options, or an empty dict if none is given.

    Raises:
        InvalidArgument: a value is neither a text of its kind nor the path of a file.
        FileError: the file cannot be read.
    """
    flag = flag_of(arguments)
    if flag == "--grammar":
        text = _text(arguments.grammar, "grammar")
        if ":" not in text:  # every rule of GBNF and of Lark has a colon
            raise InvalidArgument(param="grammar", got=shown(text), allowed="a GBNF or Lark grammar, or the path of a "
                                                                           "file with one")
        return {"response_format": {"type": "grammar", "grammar": text}}
    if flag == "--regex":
        return {"response_format": {"type": "regex", "regex": arguments.regex}}
    if flag == "--json-schema":
        text = _text(arguments.json_schema, "json_schema")
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, (dict, bool)):
            raise InvalidArgument(param="json_schema", got=shown(text), allowed="a JSON schema, which is an object, or "
                                                                               "the path of a file with one")
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    return {}


def flag_of(arguments: object) -> str | None:
    """Return the option that gave the format; None: none did."""
    names = ("grammar", "regex", "json_schema")
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None) is not None), None)


def _text(given: str, param: str) -> str:
    """Return the text of the file with this path; without such a file, the given text."""
    try:
        if not os.path.isfile(given):
            return given
    except ValueError:  # a null character
        return given
    try:
        with open(given, encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARS + 1)
    except UnicodeDecodeError as error:
        raise FileError(f"{given}: the file is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise FileError(f"{given}: {error.strerror}") from None
    if len(text) > MAX_CHARS:
        raise LimitError(f"{given}: the file has more than {MAX_CHARS:,} characters, the limit of a format",
                         param=param)
    return text
