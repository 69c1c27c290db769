"""``mpool completion``."""

from __future__ import annotations

import argparse

from .common import say
from .parser import make_parser


def completion(arguments: argparse.Namespace) -> int:
    """Run ``mpool completion``."""
    from ..errors import Unsupported
    from ..resources import install_hint

    try:
        import shtab
    except ImportError:
        raise Unsupported("shell completion needs the package shtab", hint=install_hint("completion")) from None
    say(shtab.complete(make_parser(), shell=arguments.shell))
    return 0
