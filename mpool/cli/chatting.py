"""The conversation of ``mpool chat`` and ``mpool run``: messages, replies and commands such as ``/set``."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from ..checks import nearest, shown
from ..conversation.reasoning import SWITCHES
from ..errors import ContextOverflow, FileError, InvalidArgument, MpoolError, WrongCapability
from ..foreign_names import SYNONYMS
from ..images.loading import MAX_BYTES
from ..tasks.sampling import NAMES, TABLE, check
from .common import MAX_READ, note, say, stats_line
from .formats import format_of
from .messages import text_of
from .prompting import line_reader
from .reply import Thinking, faint, note_end, print_reply
from .terminal import Keys, is_screen

if TYPE_CHECKING:
    from ..completions import Completion

#: Start of a line that is a command, not a path.
_COMMAND = re.compile(r"/(?:[a-z]+|\?)(?=\s|$)")
#: Parameter of an error about an image of a message.
_IMAGE_OF_MESSAGE = re.compile(r"messages\[\d+\]\.images\[(\d+)\]")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
#: A path of an image in a message: in quotes, or with a backslash before spaces, as terminals write a dropped file.
_IMAGE = re.compile(r"""(?<!\S)(?:'([^'\n]+)'|"([^"\n]+)"|((?:\\.|[^\s\\])+?\.(?:png|jpe?g|webp|gif|bmp)))"""
                    r"(?=[\s.,;:?!)]|$)", re.IGNORECASE)

_HELP = '''/set            show the settings
/set NAME VALUE sampling options, such as temperature 0.5 or max_tokens 1024;
                system TEXT; stats, think, fold, wrap, history: on or off;
                default as VALUE restores the default
/show           show the model and the settings; /show thinking: the reasoning
                of the last reply, which is folded
/save FILE      write the conversation to a file; /load FILE reads it
/clear          forget the conversation
/exit           exit (also /bye, Ctrl-D, or Ctrl-C twice)
/?              show this help

Ctrl-C ends a reply. A pasted text of several lines is one message; to enter
one, begin and end it with """, or press Alt-Enter for a new line. Name image
files in a message, or drop them into the terminal, to ask about them.'''
#: Words of `ollama run` -> words of /set.
_OLLAMA = {"verbose": "stats on", "quiet": "stats off", "think": "think on", "nothink": "think off",
           "wordwrap": "wrap on", "nowordwrap": "wrap off", "history": "history on", "nohistory": "history off"}

#: Parameters of Ollama that have no setting -> the reason.
_NEEDLESS = {"num_ctx": "the context is the model's own, and only the part in use takes memory",
             "num_batch": "mpool chooses the size of a batch", "num_gpu": "mpool computes on the CPU",
             "num_thread": "mpool uses all CPUs of its process, or --threads of the command",
             "use_mmap": "mpool maps the file if it can, or as --weights of the command says",
             "keep_alive": "the model stays loaded until the chat ends"}


class Backend(Protocol):
    """A model that replies: in this process, or on a server.

    Attributes:
        name: name of the model.
        capability: its capability.
    """

    name: str
    capability: str

    @property
    def context_length(self) -> int | None:
        """Tokens in the context; None: unknown."""

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """Start a reply. Return a stream of chunks, whose method ``result`` returns the completion."""


class Conversation:
    """A conversation with a model: prints replies, and stores messages and settings.

    Args:
        backend: the model.
        arguments: options of the command line.
    """

    def __init__(self, backend: Backend, arguments: argparse.Namespace) -> None:
        self.backend, self.arguments = backend, arguments
        self.options: dict[str, Any] = {**sampling_of(arguments), **format_of(arguments)}
        self.system: str = arguments.system or ""
        self.messages: list[dict[str, Any]] = []
        self.switches = {"stats": bool(arguments.stats), "fold": True, "wrap": True, "history": True}
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.interrupted = False  # the last key was Ctrl-C, which ended a reply or an empty line
        self.typed = ""  # during the last reply
        self.thoughts = ""  # the last reply's
        self._paths: list[str] = []  # images of the last message
        self._commands: dict[str, Callable[[str], None]] = {
            "set": self.set, "show": self.show, "save": self.save, "load": self.load, "clear": self.clear,
            "help": lambda _: note(_HELP), "?": lambda _: note(_HELP)}

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the end of the input or /exit. Return the exit code."""
        if self.interactive and is_screen(sys.stdout):
            from .screen_prompt import screen_reader as reader
        else:
            reader = line_reader
        read = reader(self)
        while True:
            try:
                text = read()
                if text is None or text.strip() in ("/exit", "/quit", "/bye"):
                    break
                self.interrupted = False
                self.interrupted = not self.handle(text) and self.interactive
            except KeyboardInterrupt:
                if self.interrupted or not self.interactive:
                    raise
                self.interrupted = True
                note("To exit, press Ctrl-C again or Ctrl-D, or enter /exit")
        return 1 if self.failed else 0

    def handle(self, text: str) -> bool:
        """Execute a command or send a message. Return False if Ctrl-C ended the reply."""
        command = _COMMAND.match(text.lstrip())
        if not command:
            return not text.strip() or self.turn(text)
        name, rest = command[0][1:], text.lstrip()[command.end():].strip()
        try:
            if name not in self._commands:
                close = nearest(name, self._commands, 1)
                raise InvalidArgument(f"/{name} is not a command", hint=f"Did you mean /{close[0]}?" if close else
                                      "/? lists the commands")
            self._commands[name](rest)
        except MpoolError as error:
            note(f"mpool: {error}")
        return True

    def turn(self, text: str, typed: str | None = None) -> bool:
        """Send a message and print the reply. Return False if Ctrl-C ended it. ``typed``: see :meth:`message`."""
        before, done = len(self.messages), True
        try:
            self.messages.append(self.message(text, typed))
            reply, done = self.reply()
        except MpoolError as error:
            image = _IMAGE_OF_MESSAGE.fullmatch(error.param or "")
            if image is not None and int(image[1]) < len(self._paths):
                error.rename({image[0]: self._paths[int(image[1])]})
            note(f"mpool: {text_of(error, self.arguments)}")
            self.failed, reply = not self.interactive, None
        if reply:
            self.messages.append(reply)
        else:
            del self.messages[before:]
        return done

    def message(self, text: str, typed: str | None = None) -> dict[str, Any]:
        """Return a message of the user. Paths of image files in it are images.

        Args:
            text: the message.
            typed: the part of a single message that a person typed, and no program wrote; None: all of it in a
                terminal.

        Raises:
            WrongCapability: the model does not see, and ``typed`` names an image.
            FileError: an image cannot be read, or ``typed`` names a path without a file.
        """
        paths, missing, rest = _images_in(text)
        own = typed if typed is not None else text if self.interactive else ""
        absent = _images_in(own)[1]
        sees = self.backend.capability == "vision"
        if not sees:
            refuse_images(self.backend.name, own)
            paths = []
        for path in missing if sees else absent:
            if sees and typed is not None and path in absent and path.startswith(("/", "./", "../")):
                raise FileError(f"there is no file {path}", hint="Name an image file that exists, or leave it out")
            note(f"(there is no file {path}: the model gets its name only)")
        self._paths = paths
        if not paths:
            return {"role": "user", "content": text}
        for path in paths if self.interactive else ():
            faint(f"(image: {path})")
        return {"role": "user", "content": rest or "Describe the image.", "images": list(map(_bytes_of, paths))}

    def reply(self) -> tuple[dict[str, Any] | None, bool]:
        """Print the reply to the messages. Return it as a message, and False if Ctrl-C ended it.

        After Ctrl-C, the message is the part of the reply that was printed.
        """
        stream, ended = None, True
        thinking: Thinking = "hidden"
        if self.interactive or is_screen(sys.stdout):
            thinking = "folded" if self.switches["fold"] else "full"
        try:
            with Keys() if self.interactive and is_screen(sys.stdout) else nullcontext() as keys:
                stream = self.begin()
                print_reply(stream, thinking, self.switches["wrap"])
        except KeyboardInterrupt:
            ended = False
            if stream is not None:
                stream.close()
            faint("(stopped)")
        except BaseException:
            if stream is not None:
                stream.close()
            raise
        finally:
            self.typed = keys.text if isinstance(keys, Keys) else ""
        if stream is None:
            return None, ended
        done: Completion = stream.result()
        self.thoughts = done.reasoning or ""
        self._note(done)
        return (done.message if done.text else None), ended

    def _note(self, done: Completion) -> None:
        if self.interactive:
            note_end(done, lambda: self.backend.context_length, "/set max_tokens {}", ": /clear")
        else:
            note_end(done, lambda: self.backend.context_length, "--max-tokens {}")
        if self.switches["stats"]:
            note(stats_line(done))

    def begin(self) -> Any:
        """Start the reply. Remove the oldest messages while the conversation exceeds the model's context."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        dropped = 0
        while True:
            try:
                stream = self.backend.chat([*start, *self.messages], self.options)
                break
            except ContextOverflow:
                if len(self.messages) < 3:
                    raise
                del self.messages[:2]
                dropped += 2
        if dropped:
            note(f"(the conversation exceeds the model's context: the oldest {dropped} messages were dropped)")
        return stream

    # ---- commands ----------------------------------------------------------------------------------------------------

    def set(self, text: str) -> None:
        """Change a setting, or show the settings."""
        text = text.removeprefix("parameter ").strip()
        name, _, value = _OLLAMA.get(text, text).partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        name = next((own for own in NAMES if name in SYNONYMS.get(own, ())), name)
        if name in _NEEDLESS:
            note(f"({name} needs no setting: {_NEEDLESS[name]})")
            return
        if not name:
            self.show("settings")
        elif name == "system":
            self.system = "" if value == "default" else _without_quotes(value)
        elif name in (*self.switches, "think"):
            if value not in ("on", "off", "default"):
                raise InvalidArgument(param=name, got=shown(value), allowed="on or off", hint=f"/set {name} on")
            if name != "think":
                self.switches[name] = value == "on" or value == "default" and name != "stats"
            elif value == "default":
                self.options.pop("template_options", None)
            else:
                self.options["template_options"] = {
                    switch: values[value == "on"] for switch, values in SWITCHES.items()}
        elif name not in NAMES or name in ("n", "logprobs", "top_logprobs", "logit_bias"):
            known = [one for one in (*NAMES, *self.switches, "think", "system") if one not in ("n", "logit_bias")]
            close = nearest(name, known, 1)
            raise InvalidArgument(f"{shown(name)} is not a setting", hint=f"Did you mean /set {close[0]}?" if close
                                  else "/set shows the settings")
        elif value == "default":
            self.options.pop(name, None)
        else:
            found = {name: _value(name, value)}
            check({**self.options_of_sampling(), **found})
            self.options |= found
        if name:
            faint(f"({name}: {value or 'none'})")

    def options_of_sampling(self) -> dict[str, Any]:
        """Return the sampling options that differ from the defaults."""
        return {name: value for name, value in self.options.items() if name in NAMES}

    def show(self, text: str) -> None:
        """Show the model and the settings, or the reasoning of the last reply."""
        if text == "thinking":
            say(self.thoughts or "(the last reply has no reasoning)")
            return
        rows = [("system", self.system or "none")]
        if text != "system":
            rows += [(name, "default" if value is None else str(value)) for name, value in
                     {**dict.fromkeys(TABLE), **self.options_of_sampling()}.items() if name != "n"]
            think = self.options.get("template_options")
            rows += [("think", "default" if think is None else "on" if all(think.values()) else "off")]
            rows += [(name, "on" if on else "off") for name, on in self.switches.items()]
        if text not in ("settings", "parameters", "system"):
            context = self.backend.context_length
            rows = [("model", self.backend.name), ("capability", self.backend.capability),
                    ("context", "unknown" if context is None else f"{context:,} tokens"),
                    ("messages", str(len(self.messages))), *rows]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            say(f"{name.ljust(width)}  {value}")

    def save(self, text: str) -> None:
        """Write the conversation to a JSON file."""
        path = _path_of(text, "save")
        if os.path.exists(path):
            _read_saved(path)  # replaces nothing but a saved conversation
        found = {"mpool_conversation": 1, "model": self.backend.name, "system": self.system,
                 "options": self.options_of_sampling(), "messages": [_saved(one) for one in self.messages]}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1, ensure_ascii=False)
                file.write("\n")
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from None
        note(f"({len(self.messages)} messages written to {path}; /load {text} reads them)")

    def load(self, text: str) -> None:
        """Continue the conversation of a file that ``/save`` wrote."""
        path = _path_of(text, "load")
        found = _read_saved(path)
        check(found["options"])
        self.messages, self.system = found["messages"], found["system"]
        self.options = {**{name: value for name, value in self.options.items() if name not in NAMES},
                        **found["options"]}
        note(f"({len(self.messages)} messages read from {path})")

    def clear(self, text: str) -> None:
        """Forget the conversation."""
        self.messages.clear()
        note("(conversation deleted)")


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given."""
    given = {name: getattr(arguments, name) for name in NAMES if hasattr(arguments, name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def refuse_images(name: str, text: str) -> None:
    """Raise WrongCapability if a message names an image; ``name``: a model that does not see."""
    paths = _images_in(text)[0]
    if paths:
        raise WrongCapability(f"does not see images, and the message names {paths[0]}", key=name,
                              hint="mpool models --task vision lists models that do")


def _images_in(text: str) -> tuple[list[str], list[str], str]:
    """Return the paths of image files in a message, the paths without a file, and the text without the files."""
    paths: list[str] = []
    missing: list[str] = []

    def take(found: re.Match[str]) -> str:
        path = found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])
        if path.startswith("file://"):
            path = urllib.parse.unquote(path.removeprefix("file://"))
        path = os.path.expanduser(path)
        if not path.lower().endswith(_IMAGE_SUFFIXES):
            return found[0]
        is_file = os.path.isfile(path)
        if is_file or os.sep in path and "://" not in path:
            (paths if is_file else missing).append(path)
        return "" if is_file else found[0]

    rest = _IMAGE.sub(take, text)
    return paths, missing, rest.strip()


def _without_quotes(text: str) -> str:
    return text.strip('"') if text.startswith('"""') or text[:1] == text[-1:] == '"' else text


def _value(name: str, text: str) -> Any:
    """Convert the value of a setting. Values that are not of the type are returned as they are, and refused later."""
    if name == "stop":
        return _without_quotes(text)
    if name == "max_tokens" and text == "none":
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return [value] if name == "stop_token_ids" and isinstance(value, int) else value


def _bytes_of(path: str) -> bytes:
    """Read an image file, up to a size that is refused."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None


def _path_of(text: str, command: str) -> str:
    """Return the path of a saved conversation, with the suffix .json."""
    if not text:
        raise InvalidArgument(f"/{command} needs the name of a file", hint=f"/{command} notes")
    path = os.path.expanduser(_without_quotes(text))
    return path if os.path.splitext(path)[1] else f"{path}.json"


def _saved(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with images as base64 text, for JSON."""
    images = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in message.get("images", ())]
    return {**message, "images": images} if images else message


def _read_saved(path: str) -> dict[str, Any]:
    """Read a file of ``/save``.

    Raises:
        FileError: the file cannot be read, or is none that ``/save`` wrote.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_READ + 1)
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    try:
        found = json.loads(text) if len(text) <= MAX_READ else None
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, dict) and found.get("mpool_conversation") == 1 and isinstance(found.get("system"), str)
            and isinstance(found.get("options"), dict) and isinstance(found.get("messages"), list)
            and all(isinstance(one, dict) and one.get("role") in ("user", "assistant")
                    and isinstance(one.get("content"), str) and all(isinstance(part, str) for part in
                                                                    one.get("images") or ())
                    for one in found["messages"])):
        raise FileError(f"{path} is not a conversation that /save wrote")
    return found


__all__ = ["Backend", "Conversation", "sampling_of"]
