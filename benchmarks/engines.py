"""mpool and its peers behind the few calls that are measured. Each runs in a process of its own, and alone in it.

An engine is named ``name`` or ``name:variant``; the variant is a class of arithmetic. ``imports`` brings in the library
and what it uses, so that the time of a load can be told with and without.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

if __package__:
    from . import ik, peers
    from .timing import together
else:  # in a worker, which is run by path
    import ik  # type: ignore[no-redef]
    import peers  # type: ignore[no-redef]
    from timing import together  # type: ignore[no-redef]


class Embedder(Protocol):
    """Texts to normalised vectors."""

    def imports(self) -> None:
        """Imports everything that a call needs."""

    def load(self, path: str, threads: int) -> None:
        """Makes the model ready."""

    def embed(self, texts: list[str]) -> np.ndarray:
        """Vectors (n, d) float32."""


class Generator(Protocol):
    """Token ids to token ids, greedy."""

    def imports(self) -> None:
        """Imports everything that a call needs."""

    def load(self, path: str, threads: int, context: int) -> None:
        """Makes the model ready for so many tokens of prompt and answer."""

    def generate(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """``count`` tokens after a prompt that is read anew, and the seconds of the second token to the last."""

    def together(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of as many answers of ``count`` tokens at once, their prompts of one length included."""


class MpoolEmbedder:
    """mpool, one call for all texts."""

    def __init__(self, variant: str) -> None:
        self.compute = variant or "auto"

    def imports(self) -> None:
        """Everything is imported on first use otherwise."""
        import mpool
        from mpool import _core, text
        from mpool.tasks import text_embedding as embedding  # noqa: F401
        from mpool.tokenizers import Tokenizer  # noqa: F401

        self.mpool, self.most = mpool, 100_000

    def load(self, path: str, threads: int) -> None:
        """In a pool with so many threads."""
        self.pool = self.mpool.Pool(self.mpool.PoolConfig(threads=threads, max_embed_inputs=self.most))
        self.model = self.pool.load(path, compute=self.compute)
        self.used = self.pool.ps()[0].compute

    def embed(self, texts: list[str]) -> np.ndarray:
        """See Embedder."""
        return self.model.batch_embed(texts, normalize=True)


class SentenceTransformers:
    """sentence-transformers, in its own batches of 32 sorted by length; as itself decides (fp32), or bfloat16."""

    def __init__(self, variant: str) -> None:
        self.dtype = variant or "float32"

    def imports(self) -> None:
        """And torch."""
        import sentence_transformers
        import torch

        self.torch, self.make = torch, sentence_transformers.SentenceTransformer

    def load(self, path: str, threads: int) -> None:
        """On the CPU."""
        self.torch.set_num_threads(threads)
        self.model = self.make(path, device="cpu", model_kwargs={"dtype": getattr(self.torch, self.dtype)})
        self.model.eval()

    def embed(self, texts: list[str]) -> np.ndarray:
        """See Embedder."""
        found = self.model.encode(texts, batch_size=32, normalize_embeddings=True, convert_to_tensor=True,
                                  show_progress_bar=False)
        return found.float().numpy()


class MpoolGenerator:
    """mpool, by token ids. Without guesses at what comes next, as nobody else makes any, but for the variant of that
    name."""

    def __init__(self, variant: str) -> None:
        self.guesses = variant == "guesses"
        self.compute = "auto" if self.guesses else variant or "auto"

    def imports(self) -> None:
        """Everything is imported on first use otherwise."""
        os.environ["MPOOL_SPECULATION"] = "1" if self.guesses else "0"
        import mpool
        from mpool import _core, text
        from mpool.tasks import text_to_text as generation  # noqa: F401
        from mpool.tokenizers import Tokenizer  # noqa: F401

        self.mpool = mpool

    def load(self, path: str, threads: int, context: int) -> None:
        """In a pool with so many threads; the context is what the model's file says."""
        self.pool = self.mpool.Pool(self.mpool.PoolConfig(threads=threads))
        self.model = self.pool.load(path, compute=self.compute)

    def generate(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """See Generator. What a call takes beside its prompt counts as writing."""
        import time

        start = time.perf_counter()
        done = self.model.generate(ids, temperature=0, max_tokens=count, ignore_eos=True)
        total = time.perf_counter() - start
        if done.usage.cached_tokens:
            raise RuntimeError(f"{done.usage.cached_tokens} tokens of the prompt were not computed")
        return list(done.token_ids), total - done.timings.queued - done.timings.prompt

    def together(self, prompts: list[list[int]], count: int) -> float:
        """See Generator: a thread a prompt."""
        return together(len(prompts), lambda number: self.generate(prompts[number], count))

    def tokens(self, text: str) -> list[int]:
        """Ids that all engines are given."""
        return self.model.tokenize(text)


class LlamaCpp:
    """llama.cpp by llama-cpp-python: flash attention, greedy choice by numpy over its logits."""

    def __init__(self, variant: str) -> None:
        if variant:
            raise ValueError("llama-cpp has no variants")

    def imports(self) -> None:
        """The library."""
        import llama_cpp

        self.lib = llama_cpp

    def load(self, path: str, threads: int, context: int) -> None:
        """Mapped, as mpool does."""
        self.model = self.lib.Llama(path, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads,
                                    flash_attn=True, use_mmap=True, verbose=False)
        self.vocab = self.model.n_vocab()
        self.threads = threads

    def _next(self) -> int:
        logits = self.lib.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocab,))))

    def generate(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """See Generator."""
        import time

        self.model.reset()
        self.model.eval(ids)
        written = [self._next()]
        start = time.perf_counter()
        while len(written) < count:
            self.model.eval(written[-1:])
            written.append(self._next())
        return written, time.perf_counter() - start

    def together(self, prompts: list[list[int]], count: int) -> float:
        """See Generator: one batch a step, in a context of its own."""
        import time

        settings = self.lib.llama_context_default_params()
        settings.n_seq_max = len(prompts)
        settings.n_ctx = len(prompts) * (len(prompts[0]) + count + 32)
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.kv_unified = True
        context = self.lib.llama_init_from_model(self.model.model, settings)
        batch = self.lib.llama_batch_init(sum(map(len, prompts)), 0, 1)

        def step(parts: list[list[int]], past: int) -> list[int]:
            batch.n_tokens = at = 0
            last = []
            for number, ids in enumerate(parts):
                for place, token in enumerate(ids):
                    batch.token[at], batch.pos[at] = token, past + place
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                    batch.logits[at] = place == len(ids) - 1
                    at += 1
                last.append(at - 1)
            batch.n_tokens = at
            if self.lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            rows = (self.lib.llama_get_logits_ith(context, row) for row in last)
            return [int(np.argmax(np.ctypeslib.as_array(row, shape=(self.vocab,)))) for row in rows]

        start = time.perf_counter()
        tokens = step(prompts, 0)
        for past in range(len(prompts[0]), len(prompts[0]) + count - 1):
            tokens = step([[token] for token in tokens], past)
        seconds = time.perf_counter() - start
        self.lib.llama_batch_free(batch)
        self.lib.llama_free(context)
        return seconds


EMBEDDERS: dict[str, Any] = {"mpool": MpoolEmbedder, "sentence-transformers": SentenceTransformers,
                             "onnxruntime": peers.OnnxRuntime, "openvino": peers.OpenVino,
                             "ctranslate2": peers.CTranslate2}
GENERATORS: dict[str, Any] = {"mpool": MpoolGenerator, "llama-cpp": LlamaCpp, "ik": ik.IkLlama}
#: Engine -> the module that must be there; none: it is programs in a folder.
MODULES = {"mpool": "mpool", "sentence-transformers": "sentence_transformers", "llama-cpp": "llama_cpp",
           "onnxruntime": "onnxruntime", "openvino": "openvino", "ctranslate2": "ctranslate2", "ik": ""}


def make(kind: str, engine: str, folder: str) -> Any:
    """An engine by name; ``kind``: embed or generate; ``folder``: of what it makes of the weights, or its programs."""
    name, _, variant = engine.partition(":")
    found = (EMBEDDERS if kind == "embed" else GENERATORS)[name]
    if found is ik.IkLlama:
        return found(folder)
    return found(variant, folder) if issubclass(found, peers.Converted) else found(variant)
