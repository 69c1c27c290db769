"""``mpool completion``."""

from __future__ import annotations

import argparse

from .common import packages, say
from .parser import make_parser


def completion(arguments: argparse.Namespace) -> int:
    """Run ``mpool completion``."""
    with packages("shell completion", "completion"):
        import shtab
    say(shtab.complete(make_parser(), shell=arguments.shell))
    return 0
