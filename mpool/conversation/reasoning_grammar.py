"""Grammars of completions that reason before they answer in a format. The reasoning is free; the format constrains the
response.

Lexemes and the syntax are described in :mod:`mpool.conversation.tool_grammar`.
"""

from __future__ import annotations

import json
import re

from .reasoning import HarmonySplitter, Splitter, ThinkSplitter
from .tool_grammar import escape_slashes

_FINAL = r"<\|channel\|>final( ?<\|constrain\|>json| json)?<\|message\|>"
_ANALYSIS = r"<\|channel\|>analysis<\|message\|>(?s:.*)<\|end\|><\|start\|>assistant"


def build_grammar(response: str, regex: str | None, splitter: type[Splitter], newline: bool) -> str:
    """Return a grammar for llguidance: reasoning, if the model writes any, and a response.

    Args:
        response: the grammar of the response, as llguidance's ``grammar_from_*`` return it.
        regex: the response as a regular expression; None: another grammar.
        splitter: class that splits reasoning and response.
        newline: the response may begin with a newline, so none may be between the reasoning and it.
    """
    if issubclass(splitter, HarmonySplitter):
        rules = ["start: thoughts* FINAL @response", f"thoughts[lazy]: /{_ANALYSIS}/", f"FINAL: /{_FINAL}/"]
    else:
        assert issubclass(splitter, ThinkSplitter)
        opening, closing = (escape_slashes(re.escape(mark)) for mark in (splitter.open, splitter.close))
        gap = "" if newline else " GAP?"
        rules = [f"start: thoughts{gap} @response", rf"thoughts[lazy]: /(?s:.*){closing}/"]
        if gap:
            rules.append(r"GAP: /\n{1,2}/")
        if not splitter.inside:
            rules[0] = f"start: think_open thoughts{gap} @response | " + ("@response" if regex is None else "PLAIN")
            rules.append(rf"think_open[lazy]: /\s*{opening}/")
        if not splitter.inside and regex is not None:
            # a response that begins like reasoning would be split
            source = escape_slashes(regex).replace("\n", r"\n")
            rules.append(rf"PLAIN: /{source}/ & ~/\s*{opening}(?s:.*)/")
    parts = json.loads(response)["grammars"] if response.lstrip().startswith("{") else [{"lark_grammar": response}]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**parts[0], "name": "response"}, *parts[1:]]})


__all__ = ["build_grammar"]
