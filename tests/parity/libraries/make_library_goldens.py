"""Record results of PEFT, FlagEmbedding, PyLate and llama.cpp for the seeded models of tests/python/helpers.

    pip install torch "transformers<5" pytest peft && python tests/parity/libraries/make_library_goldens.py peft
    pip install torch "transformers<5" pytest FlagEmbedding && python tests/parity/libraries/make_library_goldens.py m3
    pip install pylate pytest && python tests/parity/libraries/make_library_goldens.py pylate
    pip install torch transformers pytest llama-cpp-python
    LLAMA_CPP=vendor/llama.cpp python tests/parity/libraries/make_library_goldens.py llama.cpp

``peft`` writes peft.npz beside this file, for the models of librarycases.py; ``m3`` writes flagembedding.npz, for the
model of recordedm3.py; ``pylate`` writes pylate.npz, for the models of recordedpylate.py. ``llama.cpp`` writes
llama_cpp_python.npz, for the Llama of librarycases.py; ``LLAMA_CPP`` is the folder of llama.cpp's sources with
convert_lora_to_gguf.py, which the source archive of llama-cpp-python contains: the revision that the package runs.
A file has the results, the hash of each model's weights, and the versions of the libraries.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "python" / "helpers"), str(HERE.parents[2])]  # helpers import mpool


def record_peft() -> dict[str, Any]:
    """Return the logits of models with adapters, float32.

    Returns:
        Of a classifier, ``(texts, labels)``; of a decoder, ``(tokens, vocabulary)``.
    """
    import librarycases as cases
    from peft import PeftModel

    def logits(folder: Path, adapter: Path, decoder: bool) -> np.ndarray:
        kind = transformers.AutoModelForCausalLM if decoder else transformers.AutoModelForSequenceClassification
        model = PeftModel.from_pretrained(kind.from_pretrained(folder, dtype=torch.float32), adapter).eval()
        with torch.no_grad():
            if decoder:
                return model(torch.from_numpy(cases.TOKENS[None])).logits[0].numpy()
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            return np.concatenate([model(**tokenizer(text, return_tensors="pt")).logits.numpy()
                                   for text in cases.TEXTS])

    found: dict[str, Any] = {}
    for name in (*cases.ADAPTERS, *cases.DECODERS):
        with tempfile.TemporaryDirectory() as place:
            folder, adapter = cases.write_adapted(Path(place), name)
            found |= {name: logits(folder, adapter, name in cases.DECODERS),
                      f"{name}.sha256": cases.digest_of(folder, adapter)}
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


def record_pylate() -> dict[str, Any]:
    """Return the token vectors of models of PyLate, pooled documents, and scores.

    Returns:
        By case: ``queries`` and ``documents``: the vectors of all tokens, float32 ``(tokens, size)``;
        ``pool.FACTOR.PROTECTED``: those of pooled documents; ``NAME.counts``: tokens of each text; ``scores``:
        ``(queries, documents)``; ``ranks`` and ``ranked``: documents of each query by score, and their scores.
    """
    import recordedpylate as cases
    from adapterfiles import digest_of
    from pylate import models, rank, scores

    found: dict[str, Any] = {}
    for name, case in cases.CASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = cases.write(Path(place) / "model", name)
            model = models.ColBERT(str(folder), device="cpu")
            queries = model.encode(cases.QUERIES, is_query=True, show_progress_bar=False)
            vectors = {"queries": queries, "documents": model.encode(cases.DOCUMENTS, is_query=False)}
            for factor, protected in case.pooled:
                vectors[f"pool.{factor}.{protected}"] = model.encode(
                    cases.DOCUMENTS, is_query=False, pool_factor=factor, protected_tokens=protected)
            documents = vectors["documents"]
            ranking = rank.rerank([list(range(len(documents)))] * len(queries), queries, [documents] * len(queries))
            made = {"scores": np.array([[scores.colbert_scores(one[None], other[None]).item() for other in documents]
                                        for one in queries]),
                    "ranks": np.array([[row["id"] for row in rows] for rows in ranking]),
                    "ranked": np.array([[row["score"] for row in rows] for rows in ranking], np.float32),
                    "sha256": digest_of(folder), "inputs": cases.inputs(folder)}
            for part, rows in vectors.items():
                made |= {part: np.concatenate(rows), f"{part}.counts": np.array([len(text) for text in rows])}
            found |= {f"{name}.{part}": value for part, value in made.items()}
    return found


def record_llama_cpp() -> dict[str, Any]:
    """Return the GGUF file that llama.cpp's converter makes of the Llama's adapter, and llama.cpp's logits.

    Returns:
        ``adapter``: the bytes of the file; ``plain`` and ``logits``: float32 ``(tokens, vocabulary)``, without and with
        the adapter, with float32 weights, keys and values; ``revision``: the commit of llama.cpp that the library
        names; ``converter``: the hash of the converter's script.
    """
    import librarycases as cases

    sources = Path(os.environ["LLAMA_CPP"]).resolve()
    sys.path.insert(0, str(sources / "gguf-py"))
    import llama_cpp
    import tinygguf
    from llama_cpp._ggml import libggml

    with tempfile.TemporaryDirectory() as place:
        folder, peft = cases.write_adapted(Path(place), "llama")
        model, adapter = Path(place) / "model.gguf", Path(place) / "adapter.gguf"
        tinygguf.write(model, cases.make_decoder("llama"))
        script = sources / "convert_lora_to_gguf.py"
        subprocess.run([sys.executable, script, "--base", folder, "--outfile", adapter, "--outtype", "f32", peft],
                       check=True)

        def logits(path: Path | None) -> np.ndarray:
            engine = llama_cpp.Llama(str(model), n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, logits_all=True,
                                     flash_attn=False, type_k=0, type_v=0, verbose=False,
                                     lora_path=None if path is None else str(path))
            engine.eval(cases.TOKENS.tolist())
            return np.array(engine.scores[:len(cases.TOKENS)], np.float32)

        libggml.ggml_commit.restype = ctypes.c_char_p
        return {"adapter": np.frombuffer(adapter.read_bytes(), np.uint8), "plain": logits(None),
                "logits": logits(adapter), "sha256": cases.digest_of(folder, peft),
                "revision": libggml.ggml_commit().decode(),
                "converter": hashlib.sha256(script.read_bytes()).hexdigest()}


def main() -> None:
    """Write the results of the libraries that the arguments name."""
    libraries: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
        "peft": (record_peft, ("peft",)), "m3": (record_flagembedding, ("FlagEmbedding",)),
        "pylate": (record_pylate, ("pylate", "sentence-transformers", "scipy")),
        "llama.cpp": (record_llama_cpp, ("llama_cpp_python",))}
    for name in sys.argv[1:]:
        record, packages = libraries[name]
        versions = {package: version(package) for package in (*packages, "torch", "transformers", "tokenizers")}
        np.savez_compressed(HERE / f"{packages[0].lower()}.npz", **record(), versions=json.dumps(versions))


if __name__ == "__main__":
    main()
