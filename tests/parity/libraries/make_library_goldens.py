"""Record results of PEFT for the seeded models of tests/python/helpers/librarycases.py.

    pip install torch "transformers<5" pytest peft && python tests/parity/libraries/make_library_goldens.py

Writes peft.npz beside this file: the results, the hash of each model's weights, and the versions of the libraries.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "python" / "helpers"))

import librarycases as cases  # noqa: E402


def record_peft() -> dict[str, Any]:
    """Return the logits of classifiers with adapters, float32 ``(texts, labels)``."""
    from peft import PeftModel

    found: dict[str, Any] = {}
    for name in cases.ADAPTERS:
        with tempfile.TemporaryDirectory() as place:
            folder, adapter = cases.write_adapted(Path(place), name)
            base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            model = PeftModel.from_pretrained(base, adapter).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            with torch.no_grad():
                found[name] = np.concatenate([
                    model(**tokenizer(text, return_tensors="pt")).logits.numpy() for text in cases.TEXTS])
            found[f"{name}.sha256"] = cases.digest_of(folder, adapter)
    return found


def main() -> None:
    """Write the results of PEFT."""
    found = record_peft()
    versions = {name: version(name) for name in ("peft", "torch", "transformers", "tokenizers")}
    np.savez_compressed(HERE / "peft.npz", **found, versions=json.dumps(versions))


if __name__ == "__main__":
    main()
