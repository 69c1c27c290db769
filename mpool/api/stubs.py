"""Write the committed stubs of public names, functions and methods: ``python -m mpool.api.stubs``.

The stubs are ``__init__.pyi`` and ``aio.pyi`` of the package, ``functions.pyi`` and ``methods.pyi`` of this folder.
``--check`` writes nothing and fails if a stub is stale.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ..tasks.verbs import REQUIRED, VERBS, Verb

_HEAD = '''"""{about}. Written by ``python -m mpool.api.stubs``: do not edit."""

import os
from collections.abc import {abc}
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from .images.loading import ImageInput
from .model import Model
from .pool import Pool
from .completions import Completion
from .tasks.captures import Capture, CaptureJob
from .tasks.classification import Classification, Classifications
from .tasks.images_result import {images}
{more}from .tasks.options import Compute, Input, Policy, Precision, Priority, Progress
from .tasks.rerank import Ranking
from .tasks.token_labels import TokenClassification, TokenClassifications
'''
_LINE = 120


def _parameters(verb: Verb, form: str, stream: str | None, more: tuple[str, ...] = (),
                first: str | None = None) -> list[str]:
    """Return the parameters as source text.

    Args:
        verb: the verb.
        form: as in :meth:`Verb.signature`.
        stream: type of the parameter ``stream`` in this overload, with its default; None: the verb does not have it.
        more: further parameters, as source text.
        first: type of the first parameter; None: that of the verb.
    """
    slots = verb.slots(form)
    if first is not None:
        slots = (slots[0]._replace(type=first), *slots[1:])
    found = ["self"] if form in ("pool", "model") else []
    found += [f"{one.name}: {one.type}" + ("" if one.default is REQUIRED else f" = {one.default!r}") for one in slots]
    found.append("*")
    if stream is not None:
        found.append(f"stream: {stream}")
    taken = {one.name for one in slots}
    found += [f"{name}: {kind} = {default!r}" for name, kind, default in verb.keywords(False) if name not in taken]
    return [*found, *more]


def _definition(indent: str, head: str, parameters: list[str], result: str) -> str:
    start = f"{indent}{head}("
    body = textwrap.wrap("\0".join(parameters).replace(" ", "\1").replace("\0", ", "), _LINE - len(start),
                         break_long_words=False, break_on_hyphens=False)
    text = ("\n" + " " * len(start)).join(line.strip() for line in body).replace("\1", " ")
    end = f") -> {result}: ..."
    if len(text.rsplit("\n", 1)[-1]) + len(end) > _LINE - (0 if "\n" in text else len(start)):
        end = f"\n{' ' * len(indent)}{end}"
    return f"{start}{text}{end}"


def _verb(verb: Verb, form: str) -> Iterator[str]:
    indent = "    " if form in ("pool", "model") else ""
    more = ("pool: Pool | None = None",) if form == "aio" else ()
    if verb.single is not None:
        for single in (True, False):
            yield f"{indent}@overload"
            parameters = _parameters(verb, form, None, more, verb.single[0] if single else None)
            yield _definition(indent, f"def {verb.name}", parameters, verb.result(form, single=single))
        return
    if verb.stream is None:
        yield _definition(indent, f"def {verb.name}", _parameters(verb, form, None, more), verb.result(form))
        return
    for stream, kind in ((False, "Literal[False] = False"), (True, "Literal[True]"), (None, "bool")):
        yield f"{indent}@overload"
        yield _definition(indent, f"def {verb.name}", _parameters(verb, form, kind, more), verb.result(form, stream))


def methods() -> str:
    """Return the text of ``methods.pyi``."""
    about = "Inference methods of pools and models"
    lines = [_HEAD.format(about=about, abc="Callable, Iterable, Mapping, Sequence",
                          images="GeneratedImages", more="from .tasks.embedding_results import SparseVectors, "
                          "TextEmbeddings, TokenVectors\n"
                          "from .tasks.iterating import EmbedIterator\n"
                          "from .tasks.jobs import Job\n")]
    lines[0] += ("from .tasks.streams import Stream\nfrom .tasks.text_to_image import ImageStream\n"
                 "from .tasks.verbs import Verb\n")
    lines += ["def _named(function: Callable[..., Any], verb: Verb, form: str, doc: str) -> Callable[..., Any]: ...",
              "", "class PoolVerbs:"]
    for verb in VERBS.values():
        lines += _verb(verb, "pool")
    lines += ["    def submit(self, capability: str, **request: Any) -> Job: ...", "", "class ModelVerbs:",
              "    __slots__ = ()"]
    for verb in VERBS.values():
        lines += _verb(verb, "model")
    return "\n".join(lines) + "\n"


def functions() -> str:
    """Return the text of ``api/functions.pyi``."""
    from ..pool import Pool
    from . import functions

    lines = [_HEAD.format(about="Functions of the package", abc="Callable, Iterable, Mapping, Sequence",
                          images="GeneratedImages", more="from .tasks.embedding_results import SparseVectors, "
                          "TextEmbeddings, TokenVectors\n"
                          "from .tasks.iterating import EmbedIterator\n"
                          "from .tasks.jobs import Job\n")]
    lines[0] += ("from .debug import ModelTable\nfrom .runtime.health import Health\n"
                 "from .tasks.streams import Stream\nfrom .tasks.text_to_image import ImageStream\n")
    lines += ["FORWARDED: tuple[str, ...]", "_default: Pool | None", "",
              "def default_pool() -> Pool: ...", "def pool_of(*arguments: object) -> Pool: ...",
              "def is_default(pool: Pool) -> bool: ...",
              "def install() -> None: ...",
              "def begin_shutdown() -> None: ...", "def submit(capability: str, **request: Any) -> Job: ..."]
    for name in functions.FORWARDED:
        if name == "metrics":
            lines += ["@overload", 'def metrics(format: Literal["dict"] = "dict") -> dict[str, Any]: ...', "@overload",
                      'def metrics(format: Literal["prometheus"]) -> str: ...']
            continue
        signature = inspect.signature(getattr(Pool, name))
        parameters, starred = [], False
        for one in list(signature.parameters.values())[1:]:
            if one.kind is one.KEYWORD_ONLY and not starred:
                parameters.append("*")
                starred = True
            default = "" if one.default is one.empty else f" = {one.default!r}"
            parameters.append(f"{one.name}: {one.annotation}{default}")
        result = str(signature.return_annotation)
        lines.append(_definition("", f"def {name}", parameters, result))
    for verb in VERBS.values():
        lines += _verb(verb, "function")
    return "\n".join(lines) + "\n"


def aio() -> str:
    """Return the text of ``aio.pyi``."""
    lines = [_HEAD.format(about="mpool for asyncio", images="GeneratedImages",
                          more="from .tasks.embedding_results import SparseVectors as SparseVectors\n"
                          "from .tasks.embedding_results import TextEmbeddings as TextEmbeddings\n"
                          "from .tasks.embedding_results import TokenVectors as TokenVectors\n",
                          abc="AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence")]
    lines[0] += "from .tasks.async_streams import AsyncImageStream as AsyncImageStream\n" \
        "from .tasks.async_streams import AsyncStream as AsyncStream\n"
    for verb in VERBS.values():
        lines += _verb(verb, "aio")
    lines += ["""async def load(model: str | os.PathLike[str] | Model, *, name: str | None = None, pin: bool = False,
               keep_alive: float | str | None = None, compute: Compute = 'auto', progress: bool | None = None,
               timeout: float | None = None, isolation: Literal['thread', 'process'] | None = None,
               weights: Literal['auto', 'mapped', 'packed'] | None = None,
               kv_dtype: Literal['auto', 'int8'] | None = None,
               draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
               adapters: Mapping[str, str | os.PathLike[str]] | None = None,
               pool: Pool | None = None) -> Model: ...""",
              """async def swap(model: str | Model, new: str | os.PathLike[str], *, timeout: float | None = None,
               prompts: Mapping[str, str] | None = None, default_prompt_name: str | None = None,
               pooling: str | None = None, normalize: bool | None = None, max_length: int | None = None,
               chat_template: str | None = None, isolation: Literal['thread', 'process'] | None = None,
               weights: Literal['auto', 'mapped', 'packed'] | None = None,
               kv_dtype: Literal['auto', 'int8'] | None = None,
               draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
               adapters: Mapping[str, str | os.PathLike[str]] | None = None,
               pool: Pool | None = None) -> Model: ...""",
              """async def unload(model: str | os.PathLike[str] | Model, *, timeout: float | None = None,
                 pool: Pool | None = None) -> None: ..."""]
    return "\n".join(lines) + "\n"


def package() -> str:
    """Return ``__init__.pyi``."""
    names = vars(sys.modules[__package__.rpartition(".")[0]])
    lines = ['"""Public names for type checkers. ``__init__.py`` imports each on first use."""', ""]
    lines += [f"from . import {name} as {name}" for name in sorted(names["_MODULES"])]
    homes = sorted([*((home, name) for name, home in names["_HOME"].items()), ("_version", "__version__")])
    lines += [f"from .{home} import {name} as {name}" for home, name in homes]
    return "\n".join([*lines, "", "__all__: list[str]"]) + "\n"


def _trimmed(text: str) -> str:
    """Remove unused imports from the text of a stub."""
    lines = text.split("\n")
    body = "\n".join(line for line in lines if not line.startswith(("from ", "import ")))
    found = []
    for line in lines:
        if line.startswith("from ") and " as " not in line:
            home, _, names = line.partition(" import ")
            used = [name for name in names.split(", ") if re.search(rf"\b{name}\b", body)]
            line = f"{home} import {', '.join(used)}" if used else ""
            if not used:
                continue
        elif line == "import numpy as np" and "np." not in body:
            continue
        found.append(line)
    ours = sorted(line for line in found if line.startswith("from ."))
    first = next(at for at, line in enumerate(found) if line.startswith("from ."))
    rest = [line for line in found[first:] if not line.startswith("from .")]
    return "\n".join([*found[:first], *ours, *rest])


def stubs() -> dict[Path, str]:
    """Return the text of every stub by path."""
    folder = Path(__file__).parent
    found = {folder / "functions.pyi": functions(), folder / "methods.pyi": methods()}
    found = {path: re.sub(r"(?m)^from \.", "from ..", text) for path, text in found.items()}
    found[folder.parent / "aio.pyi"] = aio()
    return {folder.parent / "__init__.pyi": package(), **{path: _trimmed(text) for path, text in found.items()}}


def main(arguments: list[str]) -> int:
    """Write the stubs, or report stale stubs with ``--check``."""
    stale = [path for path, text in stubs().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" not in arguments:
        for path, text in stubs().items():
            path.write_text(text, "utf-8")
    elif stale:
        print("stale: " + ", ".join(path.name for path in stale) + "; run python -m mpool.api.stubs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
