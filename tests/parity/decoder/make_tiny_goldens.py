"""Makes the goldens of the tiny decoders: llama.cpp's results for a GGUF file of every family.

    python tests/python/helpers/tinygguf.py FOLDER    # torch, transformers, gguf; the models are seeded
    python tests/parity/decoder/make_tiny_goldens.py FOLDER    # llama-cpp-python; writes tiny.npz beside this file

With names after FOLDER, only these files are computed, and the other results stay. For every file that llama.cpp
loads: its SHA-256, by which a test recognises the file; the logits at the positions SHOWN
of TOKENS; and GREEDY tokens after the first of them, with the end-of-text token barred. All weights are float32.
Families that this llama.cpp refuses are printed and skipped (BERT, and DeepSeek-V2 without q_lora unless it has the
layers of DeepSeek-V2-Lite).
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "helpers"))

from filehash import file_hash  # noqa: E402

TOKENS = np.random.default_rng(31).integers(2, 157, 131)
SHOWN = (0, 7, 40, 130)
PROMPT, GREEDY, END = 9, 16, 1


def main(folder: Path, names: list[str]) -> None:
    """Write the goldens of the files of a folder: of all, or of those in ``names``."""
    import llama_cpp

    target = Path(__file__).with_name("tiny.npz")
    found: dict[str, np.ndarray] = dict(np.load(target)) if names else {}
    for path in sorted(path for path in folder.glob("*.gguf") if not names or path.stem in names):
        try:
            model = llama_cpp.Llama(str(path), n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1, logits_all=True,
                                    flash_attn=False, type_k=0, type_v=0, verbose=False)
        except Exception as error:  # llama.cpp says no more than that it failed
            print(f"{path.stem}: refused by llama.cpp: {error}")
            continue
        model.eval(TOKENS.tolist())
        logits = np.array(model.scores[:len(TOKENS)], np.float32)[list(SHOWN)]
        model.reset()
        model.eval(TOKENS[:PROMPT].tolist())
        greedy = []
        for _ in range(GREEDY):
            last = np.array(model.scores[model.n_tokens - 1], np.float32)
            last[END] = -np.inf
            greedy.append(int(last.argmax()))
            model.eval([greedy[-1]])
        found |= {f"{path.stem}.hash": file_hash(path), f"{path.stem}.logits": logits,
                  f"{path.stem}.greedy": np.array(greedy, np.int32)}
        print(f"{path.stem}: largest logit {np.abs(logits).max():.3f}, greedy {greedy}")
    np.savez_compressed(target, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
