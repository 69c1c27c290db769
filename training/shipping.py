"""Package data beside the trained models: sample images, and the models' rows in the catalogue."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from . import MODELS, ROOT, digits

CATALOGUE = ROOT / "mpool" / "models" / "catalogue.json"
#: Key -> capability.
CAPABILITIES = {"digits-clip": "image_embedding", "digits-sd3": "text_to_image", "digits-llava": "vision"}
ORIGIN = "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits"


def write_images(folder: Path) -> None:
    """Write one held-out image of each digit, as ``0.png`` to ``9.png``."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    _, held = digits.load()
    for digit in range(10):
        Image.fromarray(held.images[held.labels == digit][0]).save(folder / f"{digit}.png", optimize=True)


def tidy(folder: Path) -> None:
    """Make all files readable for everybody (safetensors writes them for the owner alone), and remove the paths of this
    machine from the configurations.
    """
    for path in folder.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)
        if path.name in ("config.json", "model_index.json"):
            config = json.loads(path.read_text(encoding="utf-8"))
            for part in (config, *(value for value in config.values() if isinstance(value, dict))):
                part.pop("_name_or_path", None)
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tensors(folder: Path) -> tuple[int, int]:
    """Return (values, bytes) of all tensors of a folder."""
    values = size = 0
    for path in folder.rglob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        for name, entry in header.items():
            if name != "__metadata__":
                values += math.prod(entry["shape"])
                size += entry["data_offsets"][1] - entry["data_offsets"][0]
    return values, size


def row(key: str) -> str:
    """Format a model's row like the other rows."""
    folder = MODELS / key
    values, size = tensors(folder)
    head: dict[str, Any] = {
        "key": key, "capability": CAPABILITIES[key], "refs": [f"mpool:{key}"], "license": "apache-2.0",
        "origin": ORIGIN, "parameters": values, "est_memory_allocation_mb": math.ceil(size * 1.15 / 1e6 + 48)}
    lines = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"):
        data = path.read_bytes()
        fact = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        files.append(f"    {json.dumps(path.relative_to(folder).as_posix())}: {json.dumps(fact)}")
    lines.append('   "files": {\n' + ",\n".join(files) + "\n   }")
    return "  {\n" + ",\n".join(lines) + "\n  }"


def write_row(key: str) -> None:
    """Write a model's row into mpool's catalogue: replace an earlier one, else append."""
    text = CATALOGUE.read_text(encoding="utf-8")
    begin = text.find(f'  {{\n   "key": "{key}"')
    if begin >= 0:
        end = text.index("\n  }", begin) + len("\n  }")
        text = text[:begin] + row(key) + text[end:]
    else:
        end = text.rindex("\n ]")
        text = text[:end] + ",\n" + row(key) + text[end:]
    json.loads(text)
    CATALOGUE.write_text(text, encoding="utf-8")
