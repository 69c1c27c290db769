"""Record results of PEFT and of FlagEmbedding for the seeded models of tests/python/helpers.

    pip install torch "transformers<5" pytest peft && python tests/parity/libraries/make_library_goldens.py peft
    pip install torch "transformers<5" pytest FlagEmbedding && python tests/parity/libraries/make_library_goldens.py m3

``peft`` writes peft.npz beside this file, for the models of librarycases.py. ``m3`` writes flagembedding.npz, for the
model of recordedm3.py. A file has the results, the hash of each model's weights, and the versions of the libraries.
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


def record_peft() -> dict[str, Any]:
    """Return the logits of classifiers with adapters, float32 ``(texts, labels)``."""
    import librarycases as cases
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


def record_flagembedding() -> dict[str, Any]:
    """Return the outputs of a model like BGE-M3, and the scores of each text for each other.

    Returns:
        ``dense``: float32 ``(texts, size)``; ``sparse``: float32 ``(texts, vocabulary)``; ``tokens``: the vectors of
        all tokens, float32 ``(tokens, size)``; ``counts``: tokens of each text; ``lexical``, ``colbert``: scores of
        vectors ``(texts, texts)``; ``pair.NAME``: those that ``compute_score`` returns for pairs of texts.
    """
    import recordedm3 as cases
    from adapterfiles import digest_of
    from FlagEmbedding import BGEM3FlagModel

    with tempfile.TemporaryDirectory() as place:
        folder = cases.write(Path(place) / "model")
        for stem, tensors in cases.heads().items():  # FlagEmbedding reads the heads from pickles only
            torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, folder / f"{stem}.pt")
        model = BGEM3FlagModel(str(folder), use_fp16=False, devices="cpu")
        made = model.encode(cases.TEXTS, max_length=cases.LENGTH, return_dense=True, return_sparse=True,
                            return_colbert_vecs=True)
        weights, rows = made["lexical_weights"], made["colbert_vecs"]
        sparse = np.zeros((len(cases.TEXTS), len(cases.TOKENS)), np.float32)
        for at, text in enumerate(weights):
            for token, weight in text.items():
                sparse[at, int(token)] = weight
        # a batch of one pair: in a larger one, the padding of a text counts as a token with the similarity 0
        scores = model.compute_score([(one, other) for one in cases.TEXTS for other in cases.TEXTS], batch_size=1,
                                     max_query_length=cases.LENGTH, max_passage_length=cases.LENGTH,
                                     weights_for_different_modes=list(cases.MODES))
        return {"dense": made["dense_vecs"], "sparse": sparse, "tokens": np.concatenate(rows),
                "counts": np.array([len(text) for text in rows]),
                "lexical": model.compute_lexical_matching_score(weights, weights),
                "colbert": np.array([[model.colbert_score(one, other).item() for other in rows] for one in rows]),
                **{f"pair.{name}": np.array(values).reshape(len(rows), -1) for name, values in scores.items()},
                "sha256": digest_of(folder), "inputs": cases.inputs()}


def main() -> None:
    """Write the results of the libraries that the arguments name."""
    libraries = {"peft": ("peft", record_peft), "m3": ("FlagEmbedding", record_flagembedding)}
    for name in sys.argv[1:]:
        library, record = libraries[name]
        versions = {package: version(package) for package in (library, "torch", "transformers", "tokenizers")}
        np.savez_compressed(HERE / f"{library.lower()}.npz", **record(), versions=json.dumps(versions))


if __name__ == "__main__":
    main()
