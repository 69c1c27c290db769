"""``mpool generate``, ``mpool vision``, ``mpool chat`` and ``mpool run``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..errors import InvalidArgument, MpoolError, UnknownModel, WrongCapability
from ..models.catalogue import load as load_catalogue
from ..models.describing import resolve
from ..models.references import parse
from .chatting import Conversation, refuse_images, sampling_of
from .common import (
    default_model,
    first_numbers,
    for_output,
    load,
    make_pool,
    note,
    print_json,
    require_prompt,
    say,
    standard_input,
    stats_line,
)
from .formats import flag_of, format_of
from .reply import faint, note_end, print_reply
from .terminal import is_screen, spinner

if TYPE_CHECKING:
    from ..completions import Completion
    from ..model import Model
    from ..pool import Pool
    from .chatting import Backend

# ---- generate --------------------------------------------------------------------------------------------------------

def generate(arguments: argparse.Namespace) -> int:
    """Run ``mpool generate``."""
    given = arguments.prompt
    prompt = require_prompt(standard_input(given == "-") if given in (None, "-") else given, "mpool generate PROMPT")
    options = {**sampling_of(arguments), **format_of(arguments), "compute": arguments.compute,
               "parse_special": arguments.parse_special}
    with make_pool(arguments) as pool:
        model = _loaded(pool, "generate", arguments.model or default_model("text_to_text"),
                        {"prompt": prompt, **options}, arguments)
        if arguments.json:
            done = model.generate(prompt, **options)
            print_json(asdict(done))
        elif options.get("n", 1) > 1:
            done = model.generate(prompt, **options)
            for choice in done.choices:
                say(f"--- {choice.index + 1} of {len(done.choices)}, {choice.finish_reason}\n"
                    + for_output(choice.text, sys.stdout))
        else:
            done = _print_stream(model.generate(prompt, stream=True, **options), model)
        if arguments.stats:
            note(stats_line(done))
    return 0


def vision(arguments: argparse.Namespace) -> int:
    """Run ``mpool vision``."""
    question = require_prompt(standard_input() if arguments.question == "-" else arguments.question,
                              "mpool vision QUESTION --image FILE")
    options = {**sampling_of(arguments), **format_of(arguments), "compute": arguments.compute,
               "allow_urls": arguments.allow_urls,
               **({} if arguments.image_tokens is None else {"image_tokens": arguments.image_tokens})}
    with make_pool(arguments) as pool:
        model = _loaded(pool, "vision", arguments.model or default_model("vision"),
                        {"images": arguments.image, "prompt": question, **options}, arguments)
        if arguments.json:
            done = model.vision(arguments.image, question, **options)
            print_json(asdict(done))
        else:
            done = _print_stream(model.vision(arguments.image, question, stream=True, **options), model)
        if arguments.stats:
            note(stats_line(done))
    return 0


def _loaded(pool: Pool, name: str, ref: str, given: dict[str, Any], arguments: argparse.Namespace) -> Model:
    """Check the arguments of a request, then load its model, with a spinner unless the progress of a download shows."""
    with spinner("loading", ref) if is_screen(sys.stdout) and _is_here(ref) else nullcontext():
        return load(pool, name, ref, given, compute=arguments.compute)


def _is_here(ref: str) -> bool:
    """Return True if a model is on this machine, so that loading it shows no progress of a download."""
    try:
        resolve(ref, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def _print_stream(stream: Any, model: Any) -> Completion:
    with stream:
        print_reply(stream)
        done: Completion = stream.result()
    note_end(done, lambda: _context_length(model), "--max-tokens {}")
    return done


# ---- chat ------------------------------------------------------------------------------------------------------------

#: Capability of models that cannot chat -> the problem, and the command for such models.
_NO_CHAT = {"text_to_image": ("generates images", "Use mpool generate-image --model {} PROMPT"),
            "image_embedding": ("returns vectors of images and cannot chat", "Use mpool embed-image --model {} FILE"),
            "text_embedding": ("returns vectors and cannot chat", "mpool run {} TEXT")}


class Local:
    """A model in this process, for a conversation. See :class:`mpool.cli.chatting.Backend`."""

    def __init__(self, pool: Pool, model: Any, compute: str) -> None:
        self.name, self.capability = model.key, model.capability
        self._pool, self._model, self._compute = pool, model, compute

    @property
    def context_length(self) -> int | None:
        """Tokens in the context."""
        return _context_length(self._model)

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """Start a reply."""
        given: dict[str, Any] = {**options, "compute": self._compute}
        return self._pool.chat(messages, self._model, stream=True, **given)


def _context_length(model: Any) -> int | None:
    """Return the tokens in a model's context; None: it generates no text."""
    generation = model.description.generation
    return None if generation is None else int(generation.context_length)


@contextmanager
def _backend(arguments: argparse.Namespace, ref: str | None) -> Iterator[tuple[Backend, Any]]:
    """Load a model, or find it on the server of ``--server``. Yield it, and the function that embeds a text with it."""
    if arguments.server or arguments.url is not None:
        from .remote_chat import connect

        remote = connect(arguments, ref)
        yield remote, remote.embed
        return
    with make_pool(arguments) as pool:
        try:
            model = _loaded(pool, "chat", ref or default_model("text_to_text"), _start_of(arguments), arguments)
        except UnknownModel as error:
            if ref is not None and _is_served(ref, arguments):
                error.hint = f"The running server has it: add --server. {error.hint or ''}".rstrip()
            raise
        yield Local(pool, model, arguments.compute), lambda text: model.embed(text).tolist()


def _is_served(name: str, arguments: argparse.Namespace) -> bool:
    """Return True if a server responds at once, and serves a model of this name."""
    from .remote import server_of

    try:
        with server_of(arguments).open(f"/v1/models/{urllib.parse.quote(name)}", seconds=0.2):
            return True
    except (MpoolError, OSError):
        return False


def run(arguments: argparse.Namespace) -> int:
    """Run ``mpool run``, which works as ``ollama run`` does."""
    _refuse_prompt(arguments.model, arguments)
    typed = " ".join(arguments.prompt)
    prompt = "\n\n".join(part for part in (_piped(), typed) if part.strip())
    if not prompt and not sys.stdin.isatty():
        raise InvalidArgument("there is no prompt, and standard input is not a terminal",
                              hint=f"mpool run {arguments.model} PROMPT")
    _check_row(arguments.model, arguments, typed, embeds=bool(prompt))
    with _backend(arguments, arguments.model) as (backend, embed):
        if backend.capability == "text_embedding" and prompt:
            _refuse_conversation(backend.name, arguments)
            vector = embed(prompt)
            if sys.stdout.isatty():
                say(first_numbers(vector))
                note("mpool: a terminal shows the first numbers; a pipe or file gets all of them")
            else:
                say(json.dumps(vector))
            return 0
        _refuse_capability(backend.capability, backend.name, arguments.model)
        talk = Conversation(backend, arguments)
        if not prompt:
            return _converse(talk, arguments.model)
        talk.interactive = False
        talk.turn(prompt, typed)
    return 1 if talk.failed else 0


def _converse(talk: Conversation, ref: str | None) -> int:
    if talk.interactive:
        faint(f"Chat with {ref or talk.backend.name}. /? lists the commands, /exit exits.")
    return talk.run()


def _refuse_prompt(name: str | None, arguments: argparse.Namespace) -> None:
    """Raise an error if the name of the model is a prompt: it has white space, and no file has this name."""
    if name is not None and len(name.split()) > 1 and not os.path.exists(name):
        prompt = " ".join([name, *getattr(arguments, "prompt", ())])
        raise InvalidArgument(f"the first argument is the model, got the prompt {shown(name)}", param="model",
                              hint=f"To answer it: mpool run {default_model('text_to_text')} {shlex.quote(prompt)}")


def _check_row(ref: str | None, arguments: argparse.Namespace, typed: str = "", embeds: bool = False) -> None:
    """Refuse what a model of the catalogue cannot do, before it is downloaded.

    Args:
        ref: the model of the command.
        arguments: arguments of the command.
        typed: the message that a person typed.
        embeds: True if an embedding model returns its vector.
    """
    row = load_catalogue().find(parse(ref)) if ref and not arguments.server and arguments.url is None else None
    if row is None:
        return
    if row.capability != "text_embedding" or not embeds:
        _refuse_capability(row.capability, row.key, ref)
    if row.capability == "text_to_text":
        refuse_images(row.key, typed)


def _refuse_capability(capability: str, name: str, ref: str | None) -> None:
    """Raise an error if a model cannot chat."""
    if capability in _NO_CHAT:
        problem, hint = _NO_CHAT[capability]
        raise WrongCapability(problem, key=name, hint=hint.format(ref or name))


def _refuse_conversation(key: str, arguments: argparse.Namespace) -> None:
    """Raise an error if the command asks for a reply of an embedding model."""
    given = [*sampling_of(arguments), *(name for name in ("system", "stats") if getattr(arguments, name))]
    given += [flag.removeprefix("--") for flag in [flag_of(arguments)] if flag is not None]
    if given:
        flag = given[0].replace("_", "-").replace("token-ids", "token-id")
        raise InvalidArgument(f"`--{flag}` is for models that generate text, and {key} returns vectors",
                              param=given[0], hint=f"mpool run {arguments.model} TEXT")


def _piped() -> str:
    """Return the text that a pipe or a file on standard input holds; "" for terminals and devices."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no standard input
        return ""
    return standard_input() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def chat(arguments: argparse.Namespace) -> int:
    """Run ``mpool chat``."""
    if arguments.name is not None and arguments.model is not None:
        raise InvalidArgument("the model is given twice, as an argument and with --model", param="model",
                              hint="To answer one prompt: mpool run MODEL PROMPT")
    _refuse_prompt(arguments.name, arguments)
    ref = arguments.model or arguments.name
    _check_row(ref, arguments)
    with _backend(arguments, ref) as (backend, _):
        _refuse_capability(backend.capability, backend.name, ref)
        return _converse(Conversation(backend, arguments), ref)


def _start_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a chat that are known before its first message."""
    messages = [{"role": "system", "content": arguments.system or "-"}]
    return {"messages": messages, **sampling_of(arguments), **format_of(arguments)}
