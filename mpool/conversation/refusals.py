"""The reasons for which llguidance refuses a format, in the terms of the caller's format."""

from __future__ import annotations

import re

#: The lines of a grammar that follow a reason, and the place before it: line and column.
_LINES, _PLACE = re.compile(r" \d+ \| .*", re.DOTALL), re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_KINDS = {"array": "an array", "f64": "a number", "positive integer": "an integer of 0 or more", "string": "a string"}
#: llguidance's words -> words of the errors of mpool.
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(found), words) for found, words in (
    (r'invalid regex ".*" \(in regex\): ', ""), (r"regex parse error: .* error: ", ""),
    (r"look-around, including look-ahead and look-behind, is not supported",
     "look-ahead and look-behind are not supported"),
    (r"lookarounds not supported yet; \w+ in regex /.*/", r"anchors and \\b inside of it are not supported"),
    (r"oneOf constraints are not supported.*",
     "several of its alternatives may match the same value, which a grammar cannot exclude; use anyOf"),
    (r"Unimplemented keys: \[(.*)\]", r"there is no grammar for \1"),
    (r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint", r"the patterns \1 and \2 match the same names"),
    (r"Unknown format: ", "there is no grammar for the format "), (r"Invalid type: ", "there is no type "),
    (r"Unsatisfiable schema: anyOf is empty", "no value matches: there are no alternatives"),
    (r"Unsatisfiable schema: ", "no value matches: "), (r"Pointer '(.*)' does not exist", r"there is no part \1"),
    (r"min/maxProperties only supported when .*",
     "the number of properties can be limited only if all of them are required"),
    (r"invalid multiple of", "multipleOf must be above 0"), (r"failed to compile JSON schema: ", "the JSON schema: "),
    (r'unknown name: "(.*)"', r"the rule \1 is not defined"), (r"lexer error", "this is no part of a grammar"),
    (r"Expected token (.*), found (.*) \(at .*", r"\1 is missing before \2"),
    (r"no start rule found", "there is no rule start"),
    (r"Unknown common regex: ([\w.]*);.*", r"there is nothing to import under the name \1"),
    (r"Token range end too large: (\d+)", r"the token \1 does not exist in this model")))
_EXPECTED = re.compile(r"Expected ([\w ]+) for '(\w+)', got ")


def reason(text: str, kind: str) -> str:
    """Return a message of llguidance in other words.

    Args:
        text: the message.
        kind: what was refused: ``"schema"``, ``"regex"``, ``"grammar"``, or ``"tools"``, whose grammar is not the
            caller's: the place in it stays, for :mod:`mpool.conversation.tools`.
    """
    text = " ".join(text.split())
    if kind == "tools":
        return text
    if kind != "schema":
        text = _PLACE.sub(r"line \1: " if kind == "grammar" else "", _LINES.sub("", text))
    for found, words in _WORDS:
        text = found.sub(words, text)
    return _EXPECTED.sub(lambda found: f"{found[2]} must be {_KINDS.get(found[1], found[1])}, got ", text)


__all__ = ["reason"]
