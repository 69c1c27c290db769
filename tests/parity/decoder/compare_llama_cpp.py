"""The tiny GGUF files of tests/python/tinygguf.py in llama.cpp and in mpool: logits and greedy tokens. By hand:

    python tests/python/tinygguf.py FOLDER
    python tests/parity/decoder/compare_llama_cpp.py reference FOLDER/*.gguf     # where llama-cpp-python is
    python tests/parity/decoder/compare_llama_cpp.py compare FOLDER/*.gguf       # where mpool is

Both in fp32, keys and values too. What differs beyond 1e-4 and why (llama-cpp-python 0.3.36): llama.cpp has GELU from a
table of halves (gemma2, gemma3: 1e-2), no window in Phi-3, LongRoPE's long factors for every sequence of a long
context, and YaRN's ramp on whole pairs (gpt_oss; with ``mpool.rope_yarn_truncate`` the logits are within 2e-5).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

TOKENS = np.random.default_rng(31).integers(2, 157, 131)
PROMPT, ANSWER, END = 40, 16, 1


def reference(path: str) -> None:
    """Writes PATH.npz: logits (131, vocab) float32 of llama.cpp, and 16 greedy tokens after the first 40."""
    from llama_cpp import Llama

    model = Llama(path, n_ctx=300, logits_all=True, verbose=False, n_threads=1, n_batch=300, swa_full=True, type_k=0,
                  type_v=0)
    model.eval(TOKENS.tolist())
    logits = np.array(model.scores[:len(TOKENS)])
    model.reset()
    model.eval(TOKENS[:PROMPT].tolist())
    answer: list[int] = []
    while len(answer) < ANSWER:
        row = np.array(model.scores[model.n_tokens - 1])
        row[END] = -np.inf
        answer.append(int(row.argmax()))
        model.eval(answer[-1:])
    np.savez(f"{path}.npz", logits=logits, greedy=np.array(answer))


def compare(path: str) -> None:
    """Prints how far mpool is from PATH.npz."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "python"))
    import mpool
    from corelib import greedy, logits

    made = np.load(f"{path}.npz")
    with mpool.Pool() as pool:
        got = logits(pool, path, TOKENS, "float32")
        answer = greedy(pool, path, TOKENS[:PROMPT], ANSWER, "float32")
    far, equal = np.abs(got - made["logits"]).max(), answer.tolist() == made["greedy"].tolist()
    print(f"{Path(path).stem:16} logits within {far:.1e} of {np.abs(got).max():.1f}, greedy tokens "
          f"{'equal' if equal else 'differ'}")


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        {"reference": reference, "compare": compare}[sys.argv[1]](argument)
