"""Functions shared by the commands: creating the pool, reading lines, and printing."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import FileError, InvalidArgument, MpoolError, Unsupported
from ..host.resources import install_hint
from ..models.catalogue import load as load_catalogue
from .layout import fit

if TYPE_CHECKING:
    from ..completions import Completion
    from ..model import Model
    from ..models import Resolved
    from ..pool import Pool

#: Control characters that could move the cursor of a terminal or change its settings. A model can generate them.
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

#: Characters of a line, or of a prompt on standard input, that are read. Texts have at most a million; without a limit,
#: a file without line ends, such as /dev/zero, fills the memory.
MAX_READ = 1 << 24

#: Parameter of an error about a text or image of a list, with its index.
_ELEMENT = re.compile(r"(?:inputs|texts|documents|images)\[(\d+)\](?:\[\d\])?")


@contextmanager
def packages(user: str, extra: str) -> Iterator[None]:
    """Raise Unsupported, with the command that installs an extra, if a package that ``user`` needs is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Unsupported(f"{user} needs the package {error.name}", hint=install_hint(extra)) from None


def make_pool(arguments: argparse.Namespace) -> Pool:
    """Create a pool with the options ``--threads`` and ``--offline``."""
    from ..config import PoolConfig
    from ..pool import Pool

    return Pool(PoolConfig(threads=arguments.threads, offline=arguments.offline or None,
                           weights=arguments.weights))


def adapter_of(arguments: argparse.Namespace) -> tuple[dict[str, str] | None, str | None]:
    """Return the adapters that ``--adapter`` loads with the model (None: none), and the name of the one that it selects
    (None: none)."""
    if arguments.adapter is None:
        return None, None
    name, equals, path = arguments.adapter.partition("=")
    if not name or (equals and not path):
        raise InvalidArgument(param="adapter", got=arguments.adapter, allowed="NAME or NAME=PATH")
    return {name: path} if equals else None, name


def load(pool: Pool, name: str, ref: str, arguments: Mapping[str, Any], **options: Any) -> Model:
    """Check the arguments of a request, then load its model.

    Args:
        pool: pool of the model.
        name: name of the function that sends the request.
        ref: reference of the model.
        arguments: arguments of the function.
        options: options of :meth:`mpool.Pool.load`.
    """
    check_request(pool, name, ref, arguments)
    return pool.load(ref, **options)


def check_request(pool: Pool, name: str, ref: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a request without its model; see :func:`load`."""
    from ..tasks.running import check

    check(name, pool.config, {"model": ref, **arguments})


def default_model(capability: str) -> str:
    """Return the key of the default model of a capability."""
    return load_catalogue().default(capability).key


def no_inputs(unit: str) -> Exception:
    """Return the error of a command that got no inputs (``unit``: text or image)."""
    return InvalidArgument(f"at least one {unit} is required, got none",
                           hint="Pass texts as arguments, with --file or on standard input" if unit == "text" else
                           "Pass paths as arguments or on standard input")


def check_folder(name: str, path: str) -> None:
    """Raise InvalidArgument unless the folder of an output exists. Call before the model is loaded.

    Args:
        name: parameter of the path.
        path: path of the file that the command will write.
    """
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise InvalidArgument(param=name, got=repr(path), allowed="a path in an existing folder",
                              hint="Create the folder first")


def for_output(text: str, stream: TextIO) -> str:
    """Replace the control characters in generated text if the stream is a terminal."""
    return text.translate(_UNPRINTABLE) if stream.isatty() else text


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a line and flush, on a terminal without control characters: names and texts of files may have some."""
    stream = stream or sys.stdout
    print(for_output(text, stream), file=stream, flush=True)


def note(text: str) -> None:
    """Print a line to standard error: a message that is not part of the output. A terminal gets lines that fit."""
    say(fit(text, sys.stderr), sys.stderr)


def print_json(value: Any) -> None:
    """Print strict JSON. NaN and infinities become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size_of(found: Resolved) -> int:
    """Return the total size of a model's files in bytes."""
    if found.files:
        return sum(os.path.getsize(path) for path in found.files)
    if os.path.isfile(found.path):
        return os.path.getsize(found.path)
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(found.path)
               for name in names)


def speed(done: Completion) -> tuple[float, float]:
    """Return the prefill and decode speed of a completion in tokens per second; 0: too few tokens to measure."""
    prefilled = done.usage.prompt_tokens - done.usage.cached_tokens
    decoded = done.usage.completion_tokens - len(done.choices)  # the prefill yields the first token of each choice
    return (prefilled / done.timings.prompt if done.timings.prompt > 0 else 0.0,
            decoded / done.timings.generation if done.timings.generation > 0 and decoded > 0 else 0.0)


def stats_line(done: Completion) -> str:
    """Format the token counts and the speed of a completion."""
    usage, timings = done.usage, done.timings
    prefill, decode = speed(done)
    parts = [f"{usage.prompt_tokens} prompt tokens in {timings.prompt:.3f} s ({prefill:,.0f} tokens/s)",
             f"{usage.completion_tokens} completion tokens" + (f" at {decode:,.1f} tokens/s" if decode else "")]
    if usage.cached_tokens:
        parts.insert(1, f"{usage.cached_tokens} of them cached")
    return ", ".join([*parts, f"{timings.total:.2f} s in total", f"finish reason: {done.finish_reason}"])


def require_prompt(prompt: str, usage: str) -> str:
    """Return a prompt; raise InvalidArgument if it is empty. Call before the model is loaded.

    Args:
        prompt: text of an argument or of standard input.
        usage: command with the argument.
    """
    if not prompt:
        raise InvalidArgument("the prompt must have at least 1 character, got none",
                              hint=f"Pass it as an argument or on standard input: {usage}")
    return prompt


def reads_terminal(asked: bool) -> bool:
    """Return True if the input would come from a terminal without being asked for: the command has no input.

    Args:
        asked: the command line names standard input, by ``-``. A note then says how to end the input.
    """
    if asked and sys.stdin.isatty():
        note("mpool: reading the terminal; Ctrl-D on a line of its own ends the input")
    return sys.stdin.isatty() and not asked


def standard_input(asked: bool = True) -> str:
    """Return the whole text on standard input; "" if it is a terminal and was not asked for.

    Args:
        asked: see :func:`reads_terminal`.

    Raises:
        FileError: the text has more than ``MAX_READ`` characters.
    """
    if reads_terminal(asked):
        return ""
    text = sys.stdin.read(MAX_READ + 1)
    if len(text) > MAX_READ:
        raise FileError(f"standard input has more than {MAX_READ:,} characters", hint="Pass a shorter text")
    return text


def lines_in(file: TextIO, name: str) -> Iterator[str]:
    """Return the lines of a file without their ends.

    Raises:
        FileError: a line has more than ``MAX_READ`` characters.
    """
    number = 0
    while line := file.readline(MAX_READ + 1):
        number += 1
        if len(line) > MAX_READ:
            raise FileError(f"line {number:,} of {name} has more than {MAX_READ:,} characters",
                            hint="A file has one text per line: split it first")
        yield line.rstrip("\r\n")


@contextmanager
def naming(place: Callable[[int, str], str | None]) -> Iterator[None]:
    """Let errors about a text or image of a list name its place.

    Args:
        place: function of the index and the noun (text or image) that returns the place; None: unknown.
    """
    try:
        yield
    except MpoolError as error:
        element = _ELEMENT.fullmatch(error.param or "")
        found = element and place(int(element[1]), "image" if element[0].startswith("images") else "text")
        if element is not None and found is not None:
            error.rename({element[0]: found})
        raise


class Texts(Iterator[str]):
    """Texts of the command line, or the lines of files, without line terminators and byte order marks.

    Args:
        texts: texts of the command line.
        paths: files, if there are no such texts. ``-`` is standard input.
    """

    def __init__(self, texts: Sequence[str], paths: Sequence[str] = ()) -> None:
        self._files: list[tuple[int, str]] = []  # index of the first text of each file, its name
        self._count, self._all = 0, bool(texts)
        for path in () if texts else paths:  # before a model is loaded
            if path != "-" and stat.S_ISDIR(os.stat(path).st_mode):
                raise FileError(f"{path} is a folder; --file takes a file with one text per line",
                                hint="`mpool search` reads the files of a folder")
        self._rows: Iterator[str] = iter(texts) if texts else self._lines(paths)

    def __next__(self) -> str:
        text = next(self._rows)
        self._count += 1
        return text

    def begin(self, unit: str = "text", blank: bool = False) -> list[str]:
        """Read the texts of the command line, or up to the first text of a file that counts, before a model is loaded.
        Iteration still yields them.

        Args:
            unit: what a text is, for the error.
            blank: a text of white space counts.

        Raises:
            InvalidArgument: there is no text.
        """
        read: list[str] = []
        for text in self._rows:
            read.append(text)
            if not self._all and (blank or text.strip()):
                break
        if not any(blank or text.strip() for text in read):
            raise no_inputs(unit)
        self._rows = itertools.chain(read, self._rows)
        return read

    def _lines(self, paths: Sequence[str]) -> Iterator[str]:
        for path in paths:
            self._files.append((self._count, "standard input" if path == "-" else path))
            if path == "-":
                yield from lines_in(sys.stdin, "standard input")
                continue
            try:
                with open(path, encoding="utf-8-sig") as file:
                    yield from lines_in(file, path)
            except UnicodeDecodeError as error:
                raise FileError(f"{path} is not UTF-8 text: {error.reason}",
                                hint="Convert it first, for example with iconv") from None

    def place(self, at: int, noun: str = "text") -> str:
        """Return where the text with this index stands, for errors: its line and file, or its number as an argument.

        Args:
            at: index of the text.
            noun: what the text is.
        """
        for first, name in reversed(self._files):
            if first <= at:
                return f"line {at - first + 1} of {name}"
        return f"{noun} {at + 1} of the command line"

    @contextmanager
    def named(self, given: Sequence[int] | None = None) -> Iterator[None]:
        """Let errors about a text name its place.

        Args:
            given: indices of the texts that are passed to the library; None: all texts are.
        """
        def place(at: int, noun: str) -> str | None:
            if given is None:
                return self.place(at, noun)
            return self.place(given[at], noun) if at < len(given) else None

        with naming(place):
            yield


def check_source(arguments: argparse.Namespace) -> None:
    """Raise InvalidArgument if there are both texts and ``--file``, or neither and standard input is a terminal."""
    if arguments.text and arguments.file:
        raise InvalidArgument("texts must come either from arguments or from --file, got both")
    asked = arguments.text == ["-"] or "-" in arguments.file
    if (asked or not (arguments.text or arguments.file)) and reads_terminal(asked):
        raise no_inputs("text")


def texts_of(arguments: argparse.Namespace) -> Texts:
    """Return the texts of the arguments, of the files of ``--file``, or of standard input (also for one text ``-``)."""
    check_source(arguments)
    path = next(filter(os.path.isfile, arguments.text), None)
    if path is not None:
        note(f"mpool: {path!r} is a text here, and the file is not read. To read the lines of a file: --file {path}")
    return Texts(() if arguments.text == ["-"] else arguments.text, arguments.file or ["-"])
