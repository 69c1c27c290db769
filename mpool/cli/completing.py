"""``mpool completion``: a script that completes commands, options, names of models, and files."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import Unsupported
from ..host.resources import install_hint
from .command_parser import Parser
from .common import packages, say
from .parser import make_parser

#: Placeholders of files and folders in the help, and names of arguments that are files.
_FILES = ("PATH", "FILE", "[MODEL:]NAME=PATH", "NAME[=PATH]", "OUT")
_FILE_ARGUMENTS = ("image", "first", "second", "source", "target")
#: Placeholders of models.
_MODELS = ("REF", "MODEL", "[NAME=]REF", "IN")
#: Command -> command whose first column has the names of its models; the other commands take any model, and paths.
_LISTS = {"rm": "list", "stop": "ps"}
_NAMES = "mpool {} 2>/dev/null | awk 'NR > 1 && NF > 1 {{ print $1 }}'"
#: Shell -> the function that completes names, with its name and the command that prints the names.
_FUNCTIONS = {
    "bash": """{name}() {{ compgen -W "$({names})" -- "$1"; compgen -f -- "$1"; }}\n""",
    "zsh": """{name}() {{ local -a names; names=(${{(f)"$({names})"}}); compadd -a names; _files }}\n""",
    "fish": """function {name}\n  {names}\n  __fish_complete_path (commandline -ct)\nend\n""",
}


def completion(arguments: argparse.Namespace) -> int:
    """Run ``mpool completion``."""
    with packages("shell completion", "completion"):
        import shtab
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise Unsupported(f"shtab {shtab.__version__} has no completion for {arguments.shell}",
                          hint=install_hint("completion"))
    parser = make_parser()
    assert isinstance(parser, Parser)
    _mark(parser, "", shtab.FILE)
    function = _FUNCTIONS.get(arguments.shell, "")
    say(shtab.complete(parser, shell=arguments.shell, preamble="".join(
        function.format(name=f"_mpool_{listed}", names=_NAMES.format(listed)) for listed in ("models", "list", "ps"))))
    return 0


def _mark(parser: Parser, name: str, files: dict[str, Any]) -> None:
    """Set how the values of a command's options and arguments are completed, in the attribute that shtab reads."""
    for action in parser._actions:
        marked: Any = action
        if action.metavar in _MODELS or name == "stop" and action.metavar == "NAME":
            function = f"_mpool_{_LISTS.get(name, 'models')}"
            marked.complete = {**files, "bash": function, "zsh": function, "fish": f"({function})"}
        elif action.metavar in _FILES or action.dest in _FILE_ARGUMENTS:
            marked.complete = files
    for one, inner in parser.commands.items():
        if isinstance(inner, Parser):
            _mark(inner, one, files)
