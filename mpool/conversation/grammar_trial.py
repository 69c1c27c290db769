"""Compiles grammars on trial, in child processes that can be killed (:mod:`mpool.host.child_processes`).

A grammar comes from a client. llguidance limits the size of a grammar, but neither the time and the memory for its
compilation nor the depth of its own recursion: 20,000 optional characters need 1.5 GB, and a chain of 3,000 rules
overflows the stack, which ends the process. mpool compiles a grammar in its own process only after the same compilation
has succeeded in a child process with limits of time and memory and half the stack.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..host.child_processes import Children, Limits, Program, Source

#: The program of the processes; each keeps the vocabularies of two models.
PROGRAM = Program(file=os.path.join(os.path.dirname(os.path.abspath(__file__)), "grammar_trial_program.py"),
                  packages=("llguidance",), what="compile the grammar", most=2, kept=2, worn=1 << 30)
#: CPU seconds and bytes of memory to compile a grammar. The memory includes the vocabularies.
SECONDS, MEMORY = 3.0, 512 << 20
#: CPU seconds to load a vocabulary; maximum length of a response in bytes.
_LOADING, _RESPONSE = 30.0, 1 << 20


class Refused(Exception):
    """The compilation exceeded a limit, or ended its process. The text is the reason."""


class Trial:
    """Compiles grammars on trial for one vocabulary. Thread-safe.

    Args:
        tokens: the bytes of each token.
        special: ids of the tokens that add no text.
        eos: ids of the tokens that end a completion.
        slices: llguidance's option of this name.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int],
                 slices: Sequence[str]) -> None:
        self._source = Source(json.dumps([[token.decode("latin-1") for token in tokens], list(special), list(eos),
                                          list(slices)]))

    def compile(self, grammar: str) -> int:
        """Compile a grammar. An invalid one is not an error: the caller will compile it again.

        Returns:
            Bytes of memory that the compiled grammar needs.

        Raises:
            Refused: the grammar needs too much time, memory or stack.
            SpawnFailed, ShuttingDown: no process could be started.
        """
        status, data = _run("compile", grammar, self._source)
        return 0 if status == "failed" else int(data)


def start() -> None:
    """Start a process unless there is one, and do not wait for it."""
    _children.start()


def fault(grammar: str, with_bytes: bool = False) -> str | None:
    """Compile a grammar without a vocabulary. Returns why llguidance refuses it, or None.

    Args:
        grammar: the grammar.
        with_bytes: True: compile it for a vocabulary of the 256 bytes, and compute its first mask: this also finds
            grammars that are too complex, or that no text matches. It must not refer to tokens.

    Raises:
        Refused: the grammar needs too much time, memory or stack.
        SpawnFailed, ShuttingDown: no process could be started.
    """
    status, data = _run("compile", grammar, _BYTES) if with_bytes else _run("check", grammar)
    return data.decode("utf-8", "replace") if status == "failed" else None


def examine(question: Mapping[str, Any]) -> list[list[int] | None]:
    """Find the regular expressions for names of properties that match few names.

    Args:
        question: ``patterns``: regular expressions of a JSON schema; ``names``: names; ``escapes``: llguidance's option
            ``json_allowed_escapes``.

    Returns:
        For each regular expression, the indices of the ``names`` in which it is found if it is found in no other name;
        else None. A malformed one is not an error: the caller will compile it again.

    Raises:
        Refused: the regular expressions need too much time, memory or stack.
        SpawnFailed, ShuttingDown: no process could be started.
    """
    status, data = _run("examine", json.dumps(question))
    found: list[list[int] | None] = [None] * len(question["patterns"]) if status == "failed" else json.loads(data)
    return found


def _run(task: str, grammar: str, vocabulary: Source | None = None) -> tuple[str, bytes]:
    status, data = _children.run((task, grammar), Limits(SECONDS, _LOADING, MEMORY, _RESPONSE), vocabulary)
    if status == "died":
        raise Refused(f"it needs more than {MEMORY >> 20} MiB to compile, or refers to rules too deeply")
    if status not in (task, "failed"):
        raise Refused(f"it needs more than {SECONDS:g} s of CPU time or {MEMORY >> 20} MiB to compile")
    return status, data


_children = Children(PROGRAM)
#: The arguments of :class:`Trial` for a vocabulary of the 256 bytes.
_BYTES = Source(json.dumps([[chr(byte) for byte in range(256)] + ["<end>"], [256], [256], []]))

__all__ = ["Refused", "Trial", "examine", "fault", "start"]
