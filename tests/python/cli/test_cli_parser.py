"""Every command and option of the parser, compared with a committed snapshot: names, defaults, types and choices.

``python tests/python/cli/test_cli_parser.py`` writes the snapshot again after a wanted change.
"""

import argparse
import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mpool.cli.parser import make_parser

SNAPSHOT = Path(__file__).with_name("options.json")
_SHOWN = ("default", "const", "nargs", "choices", "metavar")


def _text(value: Any) -> str:
    if value == argparse.SUPPRESS:
        return "SUPPRESS"
    return repr(list(value) if isinstance(value, (tuple, dict)) else value)


def _option(action: argparse.Action) -> str:
    """Describe an option by its names and by the settings that differ from argparse's."""
    parts = ["/".join(action.option_strings) or "(argument)", action.dest, type(action).__name__.strip("_")]
    if action.type is not None:
        parts.append(f"type={getattr(action.type, '__name__', action.type)}")
    if action.option_strings and action.required:  # for arguments, this depends on the version of argparse
        parts.append("required")
    parts += [f"{name}={_text(getattr(action, name))}" for name in _SHOWN if getattr(action, name) is not None]
    return " ".join(parts)


def _function(run: Any) -> str:
    """Name the function of a command, whose module is imported when the command runs."""
    names = inspect.getclosurevars(run).nonlocals
    assert callable(getattr(import_module(f"mpool.cli.{names['module']}"), names["name"]))
    return f"{names['module']}.{names['name']}"


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with its options and then the values that it sets by itself."""
    found = [_option(action) for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    yield name, found + [f"sets {key}={_function(value) if callable(value) else _text(value)}"
                         for key, value in sorted(parser._defaults.items())]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                yield from _commands(inner, f"{name} {command}")


def described() -> dict[str, list[str]]:
    """Describe all commands."""
    return dict(_commands(make_parser(), "mpool"))


def test_options_match_the_snapshot() -> None:
    """A changed name, default, type or choice of an option is a change of the command line, and is intended."""
    wanted = json.loads(SNAPSHOT.read_text())
    found = described()
    assert list(found) == list(wanted)
    for command, options in found.items():
        assert options == wanted[command], command


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(described(), indent=1) + "\n")
