"""Texts of tokens with a special role, and regular expressions that find tokens in a text.

GGUF files rarely state which tokens end a generation. llama.cpp identifies them by their texts
(``src/llama-vocab.cpp``); the tables below reproduce its lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..errors import LimitError
from . import limits

#: Texts of tokens that end a turn, in order of preference.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
               "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>")

#: Texts of tokens that end a generation, in addition to those that the file states.
END_OF_GENERATION = frozenset((*END_OF_TURN, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>",
                               "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~["))

#: Key of ``tokenizer.ggml`` -> texts that identify the token if the key is absent.
BY_TEXT: Mapping[str, tuple[str, ...]] = {
    "eot": END_OF_TURN,
    "eom": ("<|eom_id|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

#: Markers of Harmony messages. They are part of a completion's text, whatever their token type is.
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

#: Markers of tool calls and of reasoning. They are part of a completion's text even if they are control tokens.
CALL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>", "<tool_call>",
              "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
              "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
              "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call_start|>",
              "<function_calls>", "</function_calls>", "<seed:tool_call>", "</seed:tool_call>", "<arg_key>",
              "</arg_key>", "<arg_value>", "</arg_value>", "<TOOLCALL>", "</TOOLCALL>", "<|START_ACTION|>",
              "<|END_ACTION|>", "<|tool_call>", "<tool_call|>", '<|"|>',
              "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<|START_THINKING|>",
              "<|END_THINKING|>", "<|channel>", "<channel|>")

#: Markers around the response of Command R7B and A. The tokenizers of these models declare them text.
HIDDEN = frozenset(("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"))


def check_sizes(added: Iterable[str], control: Iterable[str], *, file: str, field: str, kind: str = "control") -> None:
    """Check the lengths of tokens before a search for them is compiled, which takes time and memory for each character.

    Args:
        added: tokens that are searched for before any other step.
        control: control tokens, and others that a regular expression finds.
        file, field: path of the file, and the part of it that lists the tokens, for errors.
        kind: name of the tokens of ``control``.

    Raises:
        LimitError: a token, or all of them together, have more characters than :mod:`mpool.tokenizers.limits` allows.
    """
    sizes = list(map(len, control))
    for found, name, what in (
            (max(sizes, default=0), "max_control_token_chars", f"a {kind} token of"),
            (sum(sizes), "max_control_chars", f"{kind} tokens with together"),
            (sum(map(len, added)), "max_added_chars", "tokens to search for with together")):
        if found > (most := getattr(limits, name)):
            raise LimitError(f"{file}: {field} has {what} {found:,} characters, the limit is {most:,}",
                             hint=f"Raise mpool.tokenizers.limits.{name} if you trust the file")


def trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of ``words`` at a position, built as a trie."""
    ordered = sorted(set(words))
    try:
        return _trie(ordered, 0, len(ordered), 0) if ordered else "(?!)"
    except RecursionError:
        return "|".join(map(re.escape, sorted(ordered, key=len, reverse=True)))


def compile_trie(words: Iterable[str], *, group: bool = False) -> re.Pattern[str]:
    """Compile :func:`trie_pattern`; with ``group``, as one capturing group, for ``re.split``."""
    words = list(words)
    pattern = trie_pattern(words)
    try:
        return re.compile(f"({pattern})" if group else pattern)
    except RecursionError:
        pattern = "|".join(map(re.escape, sorted(set(words), key=len, reverse=True)))
        return re.compile(f"({pattern})" if group else pattern)


def _trie(words: list[str], low: int, high: int, depth: int) -> str:
    """Return the pattern of ``words[low:high]``, whose first ``depth`` characters are equal."""
    ends_here = len(words[low]) == depth
    if ends_here:
        low += 1
        if low == high:
            return ""
    branches = []
    while low < high:
        first, end = words[low][depth], low + 1
        while end < high and words[end][depth] == first:
            end += 1
        shared, last = depth + 1, words[end - 1]
        # the words are sorted: all of them share the prefix that the first and the last share
        while shared < len(words[low]) and shared < len(last) and words[low][shared] == last[shared]:
            shared += 1
        branches.append(re.escape(words[low][depth:shared]) + _trie(words, low, end, shared))
        low = end
    if len(branches) == 1 and not ends_here:
        return branches[0]
    return "(?:" + "|".join(branches) + ")" + ("?" if ends_here else "")
