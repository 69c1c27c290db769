"""``mpool generate``, ``mpool vision``, ``mpool chat`` and ``mpool run``."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ContextOverflow, InvalidArgument, MpoolError, WrongCapability
from ..tasks.sampling import NAMES
from .common import (
    default_model,
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
from .messages import text_of

if TYPE_CHECKING:
    from ..completions import Completion
    from ..pool import Pool

#: Start of a line that is a command, not a path.
_COMMAND = re.compile(r"/[a-z]+(?=\s|$)")

_HELP = '''/exit   exit (also Ctrl-D)
/clear  delete the conversation
/help   show this help
Ctrl-C stops a reply. Enclose a message of several lines in """ and """.'''


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given."""
    given = {name: getattr(arguments, name) for name in NAMES if hasattr(arguments, name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


# ---- generate --------------------------------------------------------------------------------------------------------

def generate(arguments: argparse.Namespace) -> int:
    """Run ``mpool generate``."""
    prompt = require_prompt(standard_input() if arguments.prompt in (None, "-") else arguments.prompt,
                            "mpool generate PROMPT")
    options = {**sampling_of(arguments), **format_of(arguments), "compute": arguments.compute,
               "parse_special": arguments.parse_special}
    with make_pool(arguments) as pool:
        model = load(pool, "generate", arguments.model or default_model("text_to_text"),
                     {"prompt": prompt, **options}, compute=arguments.compute)
        if arguments.json:
            done = model.generate(prompt, **options)
            print_json(asdict(done))
        elif options.get("n", 1) > 1:
            done = model.generate(prompt, **options)
            for choice in done.choices:
                say(f"--- {choice.index + 1} of {len(done.choices)}, {choice.finish_reason}\n"
                    + for_output(choice.text, sys.stdout))
        else:
            done = _print_stream(model.generate(prompt, stream=True, **options))
        if arguments.stats:
            note(stats_line(done))
    return 0


def vision(arguments: argparse.Namespace) -> int:
    """Run ``mpool vision``."""
    question = require_prompt(standard_input() if arguments.question == "-" else arguments.question,
                              "mpool vision QUESTION --image FILE")
    options = {**sampling_of(arguments), **format_of(arguments), "compute": arguments.compute,
               "allow_urls": arguments.allow_urls}
    with make_pool(arguments) as pool:
        model = load(pool, "vision", arguments.model or default_model("vision"),
                     {"images": arguments.image, "prompt": question, **options}, compute=arguments.compute)
        if arguments.json:
            done = model.vision(arguments.image, question, **options)
            print_json(asdict(done))
        else:
            done = _print_stream(model.vision(arguments.image, question, stream=True, **options))
        if arguments.stats:
            note(stats_line(done))
    return 0


def _print_stream(stream: Any) -> Completion:
    with stream:
        for chunk in stream:
            sys.stdout.write(for_output(chunk.text, sys.stdout))
            sys.stdout.flush()
        say()
        done: Completion = stream.result()
    return done


# ---- chat ------------------------------------------------------------------------------------------------------------

def run(arguments: argparse.Namespace) -> int:
    """Run ``mpool run``, which works as ``ollama run`` does."""
    prompt = "\n\n".join(part for part in (_piped(), " ".join(arguments.prompt)) if part.strip())
    if not prompt and not sys.stdin.isatty():
        raise InvalidArgument("there is no prompt, and standard input is not a terminal",
                              hint=f"mpool run {arguments.model} PROMPT")
    with make_pool(arguments) as pool:
        model = load(pool, "chat", arguments.model, _start_of(arguments), compute=arguments.compute)
        if model.capability == "text_to_image":
            raise WrongCapability("generates images", key=model.key,
                                  hint=f"Use mpool generate-image --model {arguments.model} PROMPT")
        if model.capability == "image_embedding":
            raise WrongCapability("returns vectors of images and cannot chat", key=model.key,
                                  hint=f"Use mpool embed-image --model {arguments.model} FILE")
        if model.capability == "text_embedding":
            _refuse_conversation(model.key, prompt, arguments)
            say(json.dumps(model.embed(prompt).tolist()))
            return 0
        talk = Conversation(pool, model, arguments)
        if not prompt:
            note(f"Chat with {model.key}. /exit exits, /help lists the commands.")
            return talk.run()
        talk.interactive = False
        talk.turn(prompt)
    return 1 if talk.failed else 0


def _refuse_conversation(key: str, prompt: str, arguments: argparse.Namespace) -> None:
    """Raise an error if the command asks for a reply of an embedding model."""
    if not prompt:
        raise WrongCapability("returns vectors and cannot chat", key=key, hint=f"mpool run {arguments.model} TEXT")
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
    arguments.model = arguments.model or arguments.name
    with make_pool(arguments) as pool:
        model = load(pool, "chat", arguments.model or default_model("text_to_text"), _start_of(arguments),
                     compute=arguments.compute)
        talk = Conversation(pool, model, arguments)
        if talk.interactive:
            note(f"Chat with {model.key}. /exit exits, /help lists the commands.")
        return talk.run()


def _start_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a chat that are known before its first message."""
    messages = [{"role": "system", "content": arguments.system or "-"}]
    return {"messages": messages, **sampling_of(arguments), **format_of(arguments)}


class Conversation:
    """A conversation with a model: reads messages, prints replies, and stores both.

    Args:
        pool: pool of the model.
        model: the loaded model.
        arguments: options of the command line.
    """

    def __init__(self, pool: Pool, model: Any, arguments: argparse.Namespace) -> None:
        self.pool, self.model = pool, model
        self.options = {**sampling_of(arguments), **format_of(arguments), "compute": arguments.compute}
        self.arguments, self.stats = arguments, arguments.stats
        self.interactive = sys.stdin.isatty()
        self.start = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self.messages: list[dict[str, str]] = []
        self.failed = False

    def run(self) -> int:
        """Run until the end of the input or /exit. Return the exit code."""
        if self.interactive:
            try:
                import readline  # noqa: F401  enables line editing and history
            except ImportError:
                pass
        interrupted = False
        while True:
            try:
                text = self.read()
                if text is None or text in ("/exit", "/quit", "/bye"):
                    break
                interrupted = False
                self.handle(text)
            except KeyboardInterrupt:
                # at the prompt, the first Ctrl-C discards the line and the second one exits
                if interrupted or not self.interactive:
                    raise
                interrupted = True
                note("\nTo exit, press Ctrl-C again or Ctrl-D, or enter /exit")
        return 1 if self.failed else 0

    def handle(self, text: str) -> None:
        """Execute a command or send a message."""
        if text == "/clear":
            self.messages.clear()
            note("(conversation deleted)")
        elif text == "/help":
            note(_HELP)
        elif _COMMAND.match(text):
            note(f"{text.split()[0]} is not a command; /help lists the commands. For questions about images, use "
                 "`mpool vision`.")
        elif text.strip():
            self.turn(text)

    def line(self, prompt: str) -> str | None:
        """Read a line; None at the end of the input."""
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                say()
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def read(self) -> str | None:
        """Read a message: a line, or several lines between triple quotes. None at the end of the input."""
        line = self.line("> ")
        if line is None or not line.lstrip().startswith('"""'):
            return line.strip() if line is not None and line.lstrip().startswith("/") else line
        parts = [line.lstrip()[3:]]
        while not parts[-1].rstrip().endswith('"""'):
            more = self.line("... ")
            if more is None:
                return "\n".join(parts)
            parts.append(more)
        parts[-1] = parts[-1].rstrip()[:-3]
        return "\n".join(parts)

    def turn(self, text: str) -> None:
        """Send a message and print the reply."""
        self.messages.append({"role": "user", "content": text})
        try:
            reply = self.reply()
        except MpoolError as error:
            note(f"mpool: {text_of(error, self.arguments)}")
            self.failed = not self.interactive
            reply = ""
        if reply:
            self.messages.append({"role": "assistant", "content": reply})
        else:
            self.messages.pop()

    def reply(self) -> str:
        """Print the reply while it is generated. Return the reply, or its part before Ctrl-C."""
        stream = None
        try:
            stream = self.begin()
            thinking = False
            for chunk in stream:
                if chunk.reasoning and self.interactive:  # shown on standard error, not part of the reply
                    sys.stderr.write(for_output(chunk.reasoning, sys.stderr))
                    sys.stderr.flush()
                    thinking = True
                elif chunk.text and thinking:
                    note("\n---")
                    thinking = False
                sys.stdout.write(for_output(chunk.text, sys.stdout))
                sys.stdout.flush()
            say()
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
            say()
            note("(stopped)")
        except BaseException:
            if stream is not None:
                stream.close()
            raise
        if stream is None:
            return ""
        done = stream.result()
        if self.stats:
            note(stats_line(done))
        return done.text

    def begin(self) -> Any:
        """Start the reply. Remove the oldest messages while the conversation exceeds the model's context."""
        dropped = 0
        while True:
            try:
                stream = self.pool.chat([*self.start, *self.messages], self.model, stream=True, **self.options)
                break
            except ContextOverflow:
                if len(self.messages) < 3:
                    raise
                del self.messages[:2]
                dropped += 2
        if dropped:
            note(f"(the conversation exceeds the model's context: the oldest {dropped} messages were dropped)")
        return stream
