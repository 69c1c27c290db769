"""mpool and its peers behind one interface. Each engine runs alone, in its own process.

An engine is named ``name``, ``name:variant`` or ``name:variant:setting``. The variant is a compute type, the setting a
way to use the threads. ``imports`` imports the library and all its dependencies, so that load times can be measured
with and without imports.
"""

import os
from typing import Any, Protocol

import numpy as np

if __package__:
    from . import ik, peers
    from .timing import together
else:  # worker.py runs by path, without a package
    import ik  # type: ignore[no-redef]
    import peers  # type: ignore[no-redef]
    from timing import together  # type: ignore[no-redef]


class Embedder(Protocol):
    """Embed texts as normalised vectors."""

    def imports(self) -> None:
        """Import every module that ``load`` and ``embed`` need."""

    def load(self, path: str, threads: int) -> None:
        """Load the model."""

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return the vectors, float32 (n, d)."""


class Generator(Protocol):
    """Generate token ids from token ids, greedily."""

    def imports(self) -> None:
        """Import every module that ``load`` and ``generate`` need."""

    def load(self, path: str, threads: int, context: int) -> None:
        """Load the model, with a context of ``context`` tokens for prompt and completion."""

    def generate(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """Prefill the prompt without a prefix cache. Return ``count`` tokens, and the seconds from the first token to
        the last.
        """

    def together(self, prompts: list[list[int]], count: int) -> float:
        """Generate ``count`` tokens for every prompt at the same time. Return the seconds after the first tokens of all
        prompts. All prompts have the same length.
        """


class MpoolEmbedder:
    """mpool, all texts in one call."""

    def __init__(self, variant: str) -> None:
        self.compute = variant or "auto"

    def imports(self) -> None:
        """Import the modules that mpool imports on first use."""
        import mpool
        from mpool import _core, conversation  # noqa: F401
        from mpool.tasks import text_embedding as embedding  # noqa: F401
        from mpool.tokenizers import Tokenizer  # noqa: F401

        self.mpool, self.most = mpool, 100_000

    def load(self, path: str, threads: int) -> None:
        """Load the model in a pool of ``threads`` compute threads."""
        self.pool = self.mpool.Pool(self.mpool.PoolConfig(threads=threads, max_embed_inputs=self.most))
        self.model = self.pool.load(path, compute=self.compute)
        self.used = self.pool.ps()[0].compute

    def embed(self, texts: list[str]) -> np.ndarray:
        """See Embedder."""
        return self.model.batch_embed(texts, normalize=True)


class SentenceTransformers:
    """sentence-transformers with its own batches: 32 texts, sorted by length. The default precision is its own (fp32);
    the variant is bfloat16.
    """

    def __init__(self, variant: str) -> None:
        self.dtype = variant or "float32"

    def imports(self) -> None:
        """Import sentence-transformers and torch."""
        import sentence_transformers
        import torch

        self.torch, self.make = torch, sentence_transformers.SentenceTransformer

    def load(self, path: str, threads: int) -> None:
        """Load the model on the CPU."""
        self.torch.set_num_threads(threads)
        self.model = self.make(path, device="cpu", model_kwargs={"dtype": getattr(self.torch, self.dtype)})
        self.model.eval()

    def embed(self, texts: list[str]) -> np.ndarray:
        """See Embedder."""
        found = self.model.encode(texts, batch_size=32, normalize_embeddings=True, convert_to_tensor=True,
                                  show_progress_bar=False)
        return found.float().numpy()


class MpoolGenerator:
    """mpool, by token ids. Speculation is off, as in every peer, except in the variant of that name."""

    def __init__(self, variant: str) -> None:
        self.speculates = variant in ("speculation", "guesses")  # the second name occurs in old records
        self.compute = "auto" if self.speculates else variant or "auto"
        self.weights = "auto"

    def imports(self) -> None:
        """Import the modules that mpool imports on first use."""
        os.environ["MPOOL_SPECULATION"] = "1" if self.speculates else "0"
        import mpool
        from mpool import _core, conversation  # noqa: F401
        from mpool.tasks import text_to_text as generation  # noqa: F401
        from mpool.tokenizers import Tokenizer  # noqa: F401

        self.mpool = mpool

    def load(self, path: str, threads: int, context: int) -> None:
        """Load the model in a pool of ``threads`` compute threads. The context is the one in the model's file."""
        self.pool = self.mpool.Pool(self.mpool.PoolConfig(threads=threads, weights=self.weights))
        self.model = self.pool.load(path, compute=self.compute)
        self.used = self.pool.ps()[0].compute

    def generate(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """See Generator. All time of a call except prefill counts as decode."""
        written, first, end = self._generate(ids, count)
        return written, end - first

    def _generate(self, ids: list[int], count: int) -> tuple[list[int], float, float]:
        """Return the tokens, the time of the first one, and the time at the end of the call."""
        import time

        start = time.perf_counter()
        done = self.model.generate(ids, temperature=0, max_tokens=count, ignore_eos=True)
        end = time.perf_counter()
        if done.usage.cached_tokens:
            raise RuntimeError(f"{done.usage.cached_tokens} tokens of the prompt came from the prefix cache")
        return list(done.token_ids), start + done.timings.queued + done.timings.prompt, end

    def together(self, prompts: list[list[int]], count: int) -> float:
        """See Generator. Each prompt has its own thread."""
        calls: list[tuple[list[int], float, float]] = []
        together(len(prompts), lambda number: calls.append(self._generate(prompts[number], count)))
        return max(end for _, _, end in calls) - max(first for _, first, _ in calls)

    def memory(self) -> dict[str, float]:
        """Return the size of the packed weights, and of keys and values, in units of 10**6 bytes."""
        (row,) = self.pool.ps()
        return {"weights MB": row.model_bytes / 1e6, "caches MB": row.engine_bytes / 1e6}

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text. All engines get these ids."""
        return self.model.tokenize(text)


class LlamaCpp:
    """llama.cpp through llama-cpp-python: flash attention; numpy takes the greedy token from its logits.

    Variant ``mapped``: llama.cpp uses all weights as they are mapped. Without it, the load copies the weights for which
    llama.cpp has faster kernels.
    """

    def __init__(self, variant: str) -> None:
        if variant not in ("", "mapped"):
            raise ValueError("the variants of llama-cpp are: mapped")
        self.mapped = variant == "mapped"

    def imports(self) -> None:
        """Import the library."""
        import llama_cpp

        self.lib = llama_cpp

    def load(self, path: str, threads: int, context: int) -> None:
        """Load the model with mmap, as mpool does."""
        if self.mapped:
            settings = self.lib.llama_model_default_params()
            settings.use_extra_bufts = False
            self.lib.llama_cpp.llama_model_default_params = lambda: settings
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
        """See Generator. One batch per step, in a context of its own."""
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

        tokens = step(prompts, 0)
        start = time.perf_counter()
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
#: Engine -> its Python module; empty for an engine that consists of programs in a folder.
MODULES = {"mpool": "mpool", "sentence-transformers": "sentence_transformers", "llama-cpp": "llama_cpp",
           "onnxruntime": "onnxruntime", "openvino": "openvino", "ctranslate2": "ctranslate2", "ik": ""}


def split(engine: str) -> tuple[str, str, str]:
    """Return the name, the compute type and the setting of an engine; "" for what it does not name."""
    name, compute, setting, *_ = [*engine.split(":"), "", ""]
    return name, compute, setting


def expand(engines: list[str]) -> list[str]:
    """Replace each engine that has several settings, and names none, by one engine per setting."""
    found = []
    for engine in engines:
        name, compute, setting = split(engine)
        peer = EMBEDDERS.get(name)
        if setting or not (isinstance(peer, type) and issubclass(peer, peers.Converted)) or len(peer.settings) < 2:
            found.append(engine)
        else:
            found += [f"{name}:{compute or peer.variants[0]}:{setting}" for setting in peer.settings]
    return list(dict.fromkeys(found))


def make(kind: str, engine: str, folder: str) -> Any:
    """Return an engine by name. ``kind`` is embed or generate; ``folder`` holds its converted weights or its
    programs.
    """
    name, variant, setting = split(engine)
    found = (EMBEDDERS if kind == "embed" else GENERATORS)[name]
    if found is ik.IkLlama:
        return found(folder)
    return found(variant, folder, setting) if issubclass(found, peers.Converted) else found(variant)
