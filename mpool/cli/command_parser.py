"""The parser of the command line: its help, and errors that name what to use instead of an unknown word or option."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..checks import nearest

#: Word that is no command of mpool (a command of another program, or a function of mpool) -> what to use.
_FOREIGN = {
    "bench": "mpool demo prints speeds; python -m benchmarks, in the sources, compares mpool with other libraries",
    "cp": "give a model a name when you serve it: mpool serve NAME=MODEL",
    "create": "give a model a name when you serve it: mpool serve NAME=MODEL. A running server makes names with a "
              "system prompt and options: curl http://127.0.0.1:11435/api/create -d '{\"model\": \"NAME\", \"from\": "
              "\"MODEL\", \"system\": \"TEXT\", \"parameters\": {\"temperature\": 0}}'",
    "delete": "use mpool rm MODEL",
    "download": "use mpool pull MODEL",
    "info": "use mpool show MODEL",
    "push": "mpool uploads nothing; to upload a file to the Hugging Face hub: hf upload ORG/NAME FILE",
    "remove": "use mpool rm MODEL",
    "server": "use mpool serve",
    "similar": "use mpool search QUERY TEXT ...",
    "similarity": "use mpool search QUERY TEXT ...",
    "start": "use mpool serve",
    "tokenize": "use mpool.tokenize(text, model) in Python, or POST /tokenize of mpool serve",
    "unload": "use mpool stop NAME",
    "version": "use mpool --version",
}


_CONTEXT = "The context is the model's own, and only the part in use takes memory: leave it out"
_CPU = "mpool computes on the CPU: leave it out"
_BATCHED = "mpool batches as many requests as fit into memory: leave it out"
_UNNEEDED = "mpool needs no such option: leave it out"
#: Option of Ollama, llama-server, vLLM or text-embeddings-inference -> what to do instead. If the text names an option
#: of mpool (--NAME), it is for commands that have this option.
_FOREIGN_OPTIONS = {
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len", "--num-ctx"), _CONTEXT),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers", "--device", "--tensor-parallel-size"), _CPU),
    **dict.fromkeys(("-np", "--parallel", "-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-seqs",
                     "--max-batch-tokens", "--max-concurrent-requests", "--cont-batching"), _BATCHED),
    **dict.fromkeys(("--embedding", "--embeddings", "--reranking", "--jinja", "--flash-attn", "-fa",
                     "--enable-auto-tool-choice", "--trust-remote-code"), _UNNEEDED),
    **dict.fromkeys(("-hf", "--hf-repo", "--model-id"),
                    "Use --model org/name, or --model org/name:Q4_K_M for a GGUF file"),
    **dict.fromkeys(("-a", "--alias", "--served-model-name"), "Use --model NAME=REF"),
    **dict.fromkeys(("--lora", "--lora-modules"), "Use --adapter NAME=PATH"),
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--num-predict", "--max-new-tokens"), "Use --max-tokens N"),
    "-t": "Use --threads N", "--api-key": "Use --token-file PATH, a file with the token",
    "--repeat-penalty": "Use --repetition-penalty X", "--temp": "Use --temperature X",
    "--hostname": "Use --host ADDRESS", "-p": "Pass the prompt as an argument",
    "--prompt": "Pass the prompt as an argument",
    **dict.fromkeys(("--grammar-file", "-jf", "--json-schema-file", "-j", "--format"),
                    "Use --grammar TEXT or --json-schema TEXT, with a text or the path of a file"),
    "--keepalive": "A model of mpool run is unloaded when the command ends; mpool serve has the option keep-alive",
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--kv-cache-dtype"), "Use --kv-dtype int8"),
}


class Help(argparse.HelpFormatter):
    """Keeps the lines of a paragraph that begins with a heading, such as ``examples:``, and does not list the options
    twice: the usage names only those that are required."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any],
                  prefix: str | None = None) -> None:
        """Add the usage. See :class:`argparse.HelpFormatter`."""
        shown = [one for one in actions if one.required or not one.option_strings]
        options = argparse.Action([], "options", metavar="[options]")
        super().add_usage(usage, [options, *shown], (), prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(part if part.partition("\n")[0].endswith(":") else super(Help, self)._fill_text(
            part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest commands if a command does not exist."""

    #: The commands, of which one is required; empty if none is required.
    commands: Mapping[str, object] = {}
    #: Headings of the help -> the commands below each; empty: the commands have one heading.
    groups: Mapping[str, Sequence[str]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help, **options})

    def format_help(self) -> str:
        """Return the help, with the commands in their groups. See :meth:`argparse.ArgumentParser.format_help`."""
        if not self.groups:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, (), ())
        formatter.add_text(self.description)
        listed = next(one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        rows = {one.dest: one for one in listed._get_subactions()}
        for title, names in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments([rows[name] for name in names])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def add_subparsers(self, **options: Any) -> Any:  # type: ignore[override]
        """Add commands. See :meth:`argparse.ArgumentParser.add_subparsers`."""
        added = super().add_subparsers(**options)
        if added.required:
            self.commands = added.choices
        return added

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        """Parse arguments. See :meth:`argparse.ArgumentParser.parse_known_args`."""
        first = next((one for one in (sys.argv[1:] if args is None else args) if not one.startswith("-")), None)
        if self.commands and first is not None and first not in self.commands:
            close = nearest(first, self.commands, cutoff=0.6)
            self.error(f"unknown command {first!r}" + (
                f"; {_FOREIGN[first]}" if first in _FOREIGN else f". Did you mean {' or '.join(close)}?" if close else
                ". `mpool --help` lists the commands"))
        parsed, rest = super().parse_known_args(args, namespace)
        flags = {one.dest: next((flag for flag in one.option_strings if flag.startswith("--")), one.option_strings[0])
                 for one in self._actions if one.option_strings}
        parsed.flags = {**flags, **getattr(parsed, "flags", {})}  # a command takes precedence over the program
        return parsed, rest

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        """Parse arguments. See :meth:`argparse.ArgumentParser.parse_args`."""
        given = sys.argv[1:] if args is None else args
        if self.groups and given[:1] == ["help"]:
            given = [*given[1:], "--help"]
        command = self._command(given)
        if command.commands and len(given) == (command is not self):  # mpool, or mpool ray
            command.print_help()
            command.exit()
        if "-hf" in given[:given.index("--") if "--" in given else None]:  # argparse would take it for -h
            self._unrecognized(["-hf"], given, None)
        parsed, rest = self.parse_known_args(given, namespace)
        words = getattr(parsed, "words", None)  # argparse leaves out the words that follow an option
        at = rest.index("--") if "--" in rest else len(rest)
        if rest and words and not any(one.startswith("-") for one in rest[:at]):
            setattr(parsed, words, [*getattr(parsed, words), *rest[:at], *rest[at + 1:]])
        elif rest:
            self._unrecognized(rest, given, getattr(parsed, "usage", None))
        command = self._command(given)
        missing = ["/".join(one.option_strings) for one in command._actions
                   if one.dest in getattr(parsed, "needed", ()) and getattr(parsed, one.dest) is None]
        if missing:
            command.error(f"the following arguments are required: {', '.join(missing)}")
        return parsed

    def _command(self, args: Sequence[str]) -> Parser:
        """Return the parser of the command that the arguments name."""
        command = self
        for word in args:
            found = command.commands.get(word)
            command = found if isinstance(found, Parser) else command
        return command

    def _unrecognized(self, rest: Sequence[str], args: Sequence[str], usage: str | None) -> NoReturn:
        """Exit with an error that names the arguments, and what to use instead of the first unknown option."""
        command = self._command(args)
        option = next((one.partition("=")[0] for one in rest if one.startswith("-")), "")
        known = list(command._option_string_actions)
        respelt = any(one.replace("-", "") == option.replace("-", "") for one in known if one != option)
        advice = "" if respelt else _FOREIGN_OPTIONS.get(option, "")
        if advice and all(one in known for one in advice.split() if one.startswith("--")):
            text = (f"{option}: " if len(rest) > 1 else "") + advice
        elif usage and not option:
            text = usage
        elif option in known:
            text = f"Options follow the command: {command.prog} {' '.join(rest)}"
        else:
            close = nearest(option, known, 1, cutoff=0.75)
            text = f"Did you mean {close[0]}?" if close else f"`{command.prog} --help` lists the options"
        command.exit(2, f"{command.prog}: error: unrecognized arguments: {' '.join(rest)}. {text}\n")
