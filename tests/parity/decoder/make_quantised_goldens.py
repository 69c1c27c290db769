"""Makes the goldens of ``mpool quantize``: llama.cpp's results for files that mpool wrote.

    python tests/python/helpers/quantisedfiles.py FOLDER    # torch, transformers, tokenizers; the models are seeded
    python tests/parity/decoder/make_quantised_goldens.py FOLDER    # llama-cpp-python; writes quantised.json

For every file: its SHA-256, by which a test recognises the file, and that of all before its weights; the tokens of a
text; the logits after PROMPT; and GREEDY tokens after it, with the end-of-text token barred. For the F32 files in
MIXED, the types that llama.cpp's own quantiser gives the tensors. For each type of SEARCHED, the root mean square error
of ggml's quantiser on seeded rows.
"""

import ctypes
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "helpers"))

from filehash import file_hash  # noqa: E402

TEXT = "Hello, world! It's 12345 o'clock.\n\n  The quick   brown fox."
PROMPT = [5, 99, 201, 300, 17, 250, 3]
GREEDY, END = 16, 319
#: Release whose random numbers are the weights of the recorded files: the one that ``pyproject.toml`` pins.
TORCH = "2.13.0"
#: Name of a recipe -> number of llama.cpp.
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
#: File -> recipes. Of hybrid models, only those that choose by the place of a layer among those with a weight.
MIXED = {**dict.fromkeys(("llama", "qwen2", "qwen3"), tuple(FILE_TYPES)),
         **dict.fromkeys(("qwen35moe", "lfm2", "nemotron_h", "granitehybrid"), ("Q4_K_S", "Q4_K_M"))}
SEARCHED = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def rows() -> dict[str, np.ndarray]:
    """Return seeded rows by distribution, float32 (64, 1024)."""
    random = np.random.default_rng(0)
    return {name: np.ascontiguousarray(values, np.float32) for name, values in {
        "normal": random.standard_normal((64, 1024)), "student3": random.standard_t(3, (64, 1024)),
        "student2": random.standard_t(2, (64, 1024)), "laplace": random.laplace(size=(64, 1024)),
        "shifted": random.standard_normal((64, 1024)) + 2}.items()}


def header_hash(path: Path) -> str:
    """Return the SHA-256 of a GGUF file up to its weights: keys, values and tensors, in their order."""
    import gguf

    size = min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)
    return hashlib.sha256(path.read_bytes()[:size]).hexdigest()


def errors(library: Path) -> dict[str, dict[str, float]]:
    """Return the errors of ggml's quantisers by type and distribution, relative to the root mean square."""
    import gguf

    ggml = ctypes.CDLL(str(library))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3,
                                         ctypes.c_void_p]
    found: dict[str, dict[str, float]] = {}
    for dtype, number in SEARCHED.items():
        for name, values in rows().items():
            kind = gguf.GGMLQuantizationType[dtype]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            stored = np.zeros((64, 1024 // block * size), np.uint8)
            ggml.ggml_quantize_chunk(number, values.ctypes.data, stored.ctypes.data, 0, 64, 1024, None)
            back = gguf.quants.dequantize(stored, kind)
            found.setdefault(dtype, {})[name] = float(np.sqrt(np.mean((back - values) ** 2) / np.mean(values ** 2)))
    return found


def types(source: Path, number: int, target: Path) -> dict[str, str]:
    """Quantise a file by llama.cpp, and return the types of its tensors."""
    import gguf
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = number, 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        raise SystemExit(f"llama.cpp refuses {source}")
    found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    target.unlink()
    return found


def main(folder: Path) -> None:
    """Write the goldens of the files of a folder."""
    import llama_cpp

    found: dict[str, Any] = {"files": {}, "types": {}, "text": TEXT}
    for path in sorted(folder.glob("*.gguf")):
        model = llama_cpp.Llama(str(path), n_ctx=128, n_batch=128, n_ubatch=128, n_threads=1, logits_all=True,
                                flash_attn=False, type_k=0, type_v=0, verbose=False)
        ids = model.tokenize(TEXT.encode(), add_bos=False, special=True)
        model.eval(PROMPT)
        logits = np.array(model.scores[len(PROMPT) - 1], np.float32)
        greedy: list[int] = []
        for _ in range(GREEDY):
            last = np.array(model.scores[model.n_tokens - 1], np.float32)
            last[[END, END - 2]] = -np.inf
            greedy.append(int(last.argmax()))
            model.eval([greedy[-1]])
        found["files"][path.stem] = {"hash": file_hash(path).tobytes().hex(), "header": header_hash(path), "ids": ids,
                                     "greedy": greedy, "logits": [round(float(one), 5) for one in logits[:32]]}
        print(path.stem, greedy)
    for name, recipes in MIXED.items():
        found["types"][name] = {recipe: types(folder / f"{name}-F32.gguf", FILE_TYPES[recipe], folder / "own.tmp")
                                for recipe in recipes}
    found["errors"] = errors(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so")
    Path(__file__).with_name("quantised.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
