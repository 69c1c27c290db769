"""Program of a child process that compiles grammars on trial for :mod:`mpool.conversation.grammar_trial`.

``child_main.py`` runs it outside the package; it imports the standard library and llguidance only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
from typing import Any

import llguidance

#: Stack of a thread where the stack has no limit, in glibc. The other threads have the limit as their stack.
_UNLIMITED = 2 << 20
#: Longest token that stands for a part of a literal, in bytes.
_LONGEST = 32

# llguidance recurses as deeply as a grammar is nested, and overflows of the stack end the process. The main thread of
# this process gets half the stack of a thread in the parent: a grammar that passes here cannot overflow it there.
_stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
_stack = (_UNLIMITED if _stack == resource.RLIM_INFINITY else _stack) // 2
resource.setrlimit(resource.RLIMIT_STACK, (_stack, _stack))

try:
    _status = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
except OSError:  # not Linux
    _status = -1
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class _Vocabulary:
    """Implements the tokenizer interface of llguidance. Literals become the longest tokens that match, from the left:
    the trial needs tokens, but not those of the model's tokenizer."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos[0], None
        self._ids = {token: at for at, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(min(_LONGEST, len(data) - at), 0, -1) if data[at:at + n] in self._ids), 0)
            if size:
                ids.append(self._ids[data[at:at + size]])
            at += size or 1
        return ids


def load(text: str, task: str, grammar: str) -> Any:
    """Return llguidance's tokenizer for a vocabulary: see :class:`mpool.conversation.grammar_trial.Trial`."""
    tokens, special, eos, slices = json.loads(text)
    vocabulary = _Vocabulary([token.encode("latin-1") for token in tokens], special, eos)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=eos,
                                  slices=slices)


def handle(tokenizer: Any, task: str, grammar: str) -> tuple[str, bytes]:
    """Return the task and its result, or ``"failed"`` and the reason.

    Args:
        tokenizer: what :func:`load` returned, or None.
        task: ``"compile"`` the grammar and compute its first mask: returns the resident bytes that the matcher needs.
            ``"check"`` it without a vocabulary: returns nothing. ``"examine"`` regular expressions: see
            :func:`mpool.conversation.grammar_trial.examine`.
        grammar: the grammar, or the question of ``"examine"``.
    """
    try:
        if task == "examine":
            return task, json.dumps(_examine(**json.loads(grammar))).encode()
        if task == "check":
            wrong = llguidance.LLMatcher.validate_grammar(grammar)
            return "failed" if wrong else task, wrong.encode()
        before = _resident()
        # the arguments of _Compiler in grammar.py, which compiles the format after this trial
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0,
                                       limits=llguidance.LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            return "failed", matcher.get_error().encode()
        matcher.compute_bitmask()
        if matcher.is_error():
            return "failed", matcher.get_error().encode()
        return task, b"%d" % max(_resident() - before, 0)
    except MemoryError:
        raise
    except BaseException as error:  # a panic is no Exception
        return "failed", str(error).encode("utf-8", "replace")


def _examine(patterns: list[str], names: list[str], escapes: str) -> list[list[int] | None]:
    tokenizer = load(json.dumps([[chr(byte) for byte in range(256)] + ["<end>"], [256], [256], []]), "", "")
    options = {"whitespace_flexible": False, "json_allowed_escapes": escapes}

    def matcher(schema: dict[str, Any]) -> Any:
        grammar = llguidance.LLMatcher.grammar_from_json_schema({**schema, "x-guidance": options})
        return llguidance.LLMatcher(tokenizer, grammar, log_level=0,
                                    limits=llguidance.LLParserLimits(verbose_errors=False))

    found: list[list[int] | None] = []
    for pattern in patterns:
        known = matcher({"type": "string", "pattern": pattern})
        # one more property, none of `names`: it is possible if the grammar goes on after the bracket
        more = matcher({"type": "object", "properties": dict.fromkeys(names, False), "patternProperties": {
            pattern: True}, "additionalProperties": False, "minProperties": 1})
        if more.is_error():  # the pattern is malformed or too complex
            found.append(None)
            continue
        more.consume_tokens([ord("{")])
        more.compute_bitmask()
        if not more.is_error():
            found.append(None)
            continue
        matched = []
        for at, name in enumerate(names):
            text = list(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass"))
            one = known.deep_copy()
            if not one.is_error() and one.try_consume_tokens(text) == len(text) and one.is_accepting():
                matched.append(at)
        found.append(matched)
    return found


def _resident() -> int:
    if _trim is not None:
        _trim(0)
    return 0 if _status < 0 else int(os.pread(_status, 64, 0).split()[1]) * resource.getpagesize()
