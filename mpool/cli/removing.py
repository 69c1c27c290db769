"""``mpool rm``."""

from __future__ import annotations

import argparse

from ..errors import MpoolError
from ..models.removing import remove
from .common import note, print_json, say


def rm(arguments: argparse.Namespace) -> int:
    """Run ``mpool rm``. If a model cannot be deleted, the others still are."""
    done, failed = [], False
    for name in arguments.model:
        try:
            found = remove(name, dry_run=arguments.dry_run)
        except MpoolError as error:
            note(f"mpool: {error}")
            failed = True
            continue
        done.append({"ref": name, "bytes": found.freed, "files": list(found.files)})
        if not arguments.json:
            say(f"{name}: {found.freed / 1e6:.1f} MB {'would be ' if arguments.dry_run else ''}freed")
    if arguments.json:
        print_json(done)
    return 1 if failed else 0
