"""``mpool completion``."""

from __future__ import annotations

import argparse

from ..errors import Unsupported
from ..host.resources import install_hint
from .common import packages, say
from .parser import make_parser


def completion(arguments: argparse.Namespace) -> int:
    """Run ``mpool completion``."""
    with packages("shell completion", "completion"):
        import shtab
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise Unsupported(f"shtab {shtab.__version__} has no completion for {arguments.shell}",
                          hint=install_hint("completion"))
    say(shtab.complete(make_parser(), shell=arguments.shell))
    return 0
