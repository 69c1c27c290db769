"""Engines that answer a question about an image: mpool and llama.cpp's mtmd, on the same pairs of GGUF files. Runs by
path in a process of its own, like worker.py.

A pair has random values in published shapes: rates depend on sizes only.
"""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_process
from own_process import rss, run_task
from timing import seconds_of

SIDE = 1024
QUESTION = "What do you see here?"


class Mpool(own_process.Mpool):
    """mpool, which keeps encoded images by their content, and the keys and values of a prompt's beginning."""

    tokens: int | None = None

    def load(self, folder: str, threads: int, **config: Any) -> None:
        """Open a pool and load the model."""
        super().load(folder, threads, max_workers_per_model=1, **config)
        self.model = self.pool.load(folder)

    def ask(self, image: np.ndarray, before: str, question: str) -> None:
        """Compute one token after an image and a question."""
        parts = [{"type": "text", "text": before}, {"type": "image", "image": image},
                 {"type": "text", "text": question}]
        self.model.chat([{"role": "user", "content": parts}], max_tokens=1, temperature=0, timeout=1800,
                        image_tokens=self.tokens)

    def encode(self, image: np.ndarray) -> float:
        """Return the seconds to encode an image: those of a new image, minus those of the same one in another prompt,
        which shares no prefix.
        """
        return seconds_of(lambda: self.ask(image, "One. ", QUESTION)) - seconds_of(
            lambda: self.ask(image, "Another. ", QUESTION))

    def gap(self, ask: Callable[[], None]) -> float:
        """Return the longest time between two tokens of another chat, while a question is answered."""
        gaps, begun, done = [0.0], threading.Event(), threading.Event()

        def chat() -> None:
            last = 0.0
            with self.model.generate("Once", max_tokens=4000, temperature=1, seed=1, ignore_eos=True,
                                     stream=True) as stream:
                for number, _ in enumerate(stream):
                    now = time.monotonic()
                    if begun.is_set():
                        gaps.append(now - last)
                    last = now
                    if number == 5:
                        begun.set()
                    if done.is_set():
                        break

        thread = threading.Thread(target=chat)
        thread.start()
        try:
            if not begun.wait(600):
                raise RuntimeError("the other chat has no tokens")
            ask()
        finally:
            done.set()
            thread.join()
        return max(gaps)

    def gaps(self, image: np.ndarray) -> dict[str, float]:
        """Return the longest gaps of another chat: during a pause, while a new image is encoded and its rows are
        computed, and while the rows of an encoded image are.
        """
        return {"gap s": self.gap(lambda: time.sleep(2)), "gap beside an image s": self.gap(
                    lambda: self.ask(image, "One. ", QUESTION)),
                "gap beside its rows s": self.gap(lambda: self.ask(image, "Another. ", QUESTION))}


class Mtmd:
    """llama.cpp's mtmd through the binding of llama-cpp-python, with flash attention. A second question computes all
    again: an application would have to keep the context.
    """

    tokens: int | None = None

    def __init__(self, variant: str) -> None:
        if variant:
            raise ValueError("llama-cpp has no variants here")

    def load(self, folder: str, threads: int) -> None:
        """Load both files."""
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.lib, self.mtmd = llama_cpp, mtmd_cpp
        self.model = llama_cpp.Llama(f"{folder}/model.gguf", n_ctx=4096, n_batch=2048, n_ubatch=2048, n_threads=threads,
                                     n_threads_batch=threads, flash_attn=True, verbose=False)
        settings = mtmd_cpp.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads, settings.warmup = False, threads, False
        if self.tokens:
            settings.image_min_tokens = settings.image_max_tokens = self.tokens
        self.context = mtmd_cpp.mtmd_init_from_file(f"{folder}/mmproj.gguf".encode(), self.model.model, settings)
        if not self.context:
            raise RuntimeError(f"mtmd does not load {folder}/mmproj.gguf")

    def _chunks(self, image: np.ndarray, before: str, question: str) -> Any:
        text = f"user: {before}{self.mtmd.mtmd_default_marker().decode()}{question}\nassistant:".encode()
        given = self.mtmd.mtmd_input_text(text, len(text), True, True)
        high, wide = image.shape[:2]
        data = np.ascontiguousarray(image).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = self.mtmd.mtmd_bitmap_init(wide, high, data)
        chunks = self.mtmd.mtmd_input_chunks_init()
        maps = (self.mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if self.mtmd.mtmd_tokenize(self.context, chunks, ctypes.byref(given), maps, 1):
            raise RuntimeError("mtmd_tokenize failed")
        self.mtmd.mtmd_bitmap_free(bitmap)
        return chunks

    def ask(self, image: np.ndarray, before: str, question: str) -> None:
        """See Mpool."""
        self.model.reset()
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.model.ctx), True)
        chunks, past = self._chunks(image, before, question), self.lib.llama_pos(0)
        if self.mtmd.mtmd_helper_eval_chunks(self.context, self.model.ctx, chunks, 0, 0, 2048, True,
                                             ctypes.byref(past)):
            raise RuntimeError("mtmd_helper_eval_chunks failed")
        int(np.argmax(np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.model.ctx, -1),
                                            shape=(self.model.n_vocab(),))))
        self.mtmd.mtmd_input_chunks_free(chunks)

    def encode(self, image: np.ndarray) -> float:
        """See Mpool."""
        chunks = self._chunks(image, "", QUESTION)
        parts = (self.mtmd.mtmd_input_chunks_get(chunks, at) for at in range(self.mtmd.mtmd_input_chunks_size(chunks)))
        seen = next(part for part in parts if self.mtmd.mtmd_input_chunk_get_type(part) == 1)
        seconds = seconds_of(lambda: self.mtmd.mtmd_encode_chunk(self.context, seen))
        self.mtmd.mtmd_input_chunks_free(chunks)
        return seconds


ENGINES: dict[str, Any] = {"mpool": Mpool, "llama-cpp": Mtmd}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds of an image's encoding, of the first question about it and of the second one; of mpool, the
    gaps of another chat too.
    """
    name, _, variant = task["engine"].partition(":")
    engine, chance = ENGINES[name](variant), np.random.default_rng(int(time.time()))
    engine.tokens = task["tokens"]
    engine.load(task["folder"], task["threads"])

    def median(run: Callable[[np.ndarray], float]) -> float:
        images = (chance.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(task["repeat"]))
        return statistics.median(map(run, images))

    engine.ask(chance.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), "", "Hello.")  # the first use takes longer
    encoding = median(engine.encode)
    second: list[float] = []

    def both(image: np.ndarray) -> float:
        first = seconds_of(lambda: engine.ask(image, "", QUESTION))
        second.append(seconds_of(lambda: engine.ask(image, "", "Which colours has it?")))
        return first

    first = median(both)
    more = engine.gaps(chance.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) if name == "mpool" else {}
    return {"measures": {**more, "encoding s": encoding, "first token s": first,
                         "second question s": statistics.median(second),
                         "encoding Gop/s": task["operations"] / encoding / 1e9}, "rss MB": rss()}


if __name__ == "__main__":
    run_task({"measure": measure})
