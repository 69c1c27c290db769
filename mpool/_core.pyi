"""The C core, as Python sees it. Private: everything a user needs is in :mod:`mpool`.

Conventions: ids are int32, offsets int64, C-contiguous numpy arrays; a deadline is seconds from now (``None`` = none).
Every function that waits releases the GIL once, wakes for signals within 50 ms, and cancels what it started when a
signal handler raises. Errors are the classes of :mod:`mpool.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__version__: str

def status_table() -> list[tuple[int, str, str, str, str]]:
    """Rows of status.def: number, name, text, Python class, built-in base."""

def architectures() -> list[tuple[str, str]]:
    """Rows of archs.def: name, capability."""

def capabilities() -> list[tuple[str, tuple[int, int], str]]:
    """Rows of capabilities.def: name, calls of one input and calls of many that may wait, policy."""

def options() -> list[tuple[str, str, str, str]]:
    """Rows of options.def: variable, value in use, default, meaning."""

def config() -> dict[str, Any]:
    """What show_config prints: cpu (name, level, features), kernels {slot: variant}, blas (core, why), compute_threads,
    nodes [{number, cpus}], memory_bytes, compiler, version, sanitizer."""

def dequantize(dtype: str, data: bytes, n: int) -> NDArray[np.float32]:
    """n items of a stored row as float32 (n,)."""

def drain_log() -> list[tuple[int, str]]:
    """Records of the core's log ring: (logging level, text), oldest first; clears it."""

def set_log_level(level: int) -> None: ...

def metrics() -> list[tuple[str, str]]:
    """Rows of metrics.def: name, meaning."""

def event_names() -> list[str]:
    """Kinds of events (csrc/registry/events.h), in the order of their bits."""

def want_events(kinds: int) -> None:
    """Record events of these kinds (a bit each) from now on."""

def drain_events() -> list[tuple[int, int, str, int, int, str, float]]:
    """Recorded events, oldest first: registry number, kind, key, worker (0 = none), request (0 = none), name of the
    status, seconds of time.monotonic(); clears them."""

def events_dropped() -> int:
    """Events that found no room, since the process began."""

@final
class GgufFile:
    """A parsed GGUF header. ``kv`` maps keys to values (str, int, float, bool, or lists of them; strings that are not
    UTF-8 come as bytes, and a list of strings with one such comes as a list of bytes). ``tensors`` has (name, dtype,
    shape outermost first, file index, offset, nbytes). ``files`` are the paths (more than one when split)."""

    kv: dict[str, Any]
    keys: list[str]
    tensors: list[tuple[str, str, tuple[int, ...], int, int, int]]
    files: list[str]
    architecture: str
    def spec(self) -> Spec:
        """A new spec with all of it, to which more can be added before it is registered. Quicker than rebuilding it."""
    def value(self, key: str, /) -> Any:
        """``kv[key]``, made anew; the others are not."""
    def bpe(self) -> Bpe | None:
        """Its byte-pair vocabulary; None when it has none, or one that does not fit: tokens twice, a merge that is not
        of two tokens and makes a third. Takes some 20 ms, without the GIL."""

@final
class Bpe:
    """A byte-pair vocabulary with its merges, searched without objects for each of its entries. No token is there
    twice."""

    def find(self, text: str, /) -> int | None:
        """The token with exactly this text, which is not empty."""

    def part(self, words: Iterable[str], most: int, /) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """What byte-pair encoding needs of it for these words: tokens that are pieces of one, with their ids, and the
        merges that make one of those, by rank. None when that takes more than ``most`` look-ups."""

def read_gguf(path: str) -> GgufFile: ...

@final
class Spec:
    """A model spec under construction (csrc/files/spec.h)."""

    def __new__(cls, architecture: str) -> Spec: ...
    def add_file(self, path: str) -> None: ...
    def note_files(self) -> None:
        """What is loaded is what the files hold now; call it when all are added."""
    def set(self, key: str, value: Any) -> None:
        """bool, int, float, str, bytes, or a list or tuple of one kind (whole numbers may stand among floats)."""
    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], file: int, offset: int, nbytes: int) -> None: ...
    def set_tokens(self, data: bytes, offsets: NDArray[np.int64], control: bytes, eog: Sequence[int]) -> None: ...

@final
class Notifier:
    """One per event loop (csrc/registry/registry.h)."""

    def __new__(cls) -> Notifier: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...
    def close(self) -> None: ...

@final
class Ticket:
    """A call in flight. Dropping the last reference cancels it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Until done; False when the timeout passes first (the call goes on)."""
    def wait_progress(self, seen: int, timeout: float | None = None) -> int:
        """Until the progress counter exceeds ``seen``; returns it (2**64 - 1 once done)."""
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def check(self) -> None:
        """Raise the call's error if it failed. Must be done."""
    def bind(self, notifier: Notifier, id: int) -> None:
        """List ``id`` in the notifier whenever the call moves; besides the notifiers that it is bound to already."""
    def times(self) -> tuple[float, float, float]:
        """Seconds of time.monotonic(): submitted, started, finished; 0.0 = not yet."""
    def eta(self) -> float:
        """Predicted seconds until it is done; 0.0 = done, or nobody knows."""
    def position(self) -> int: ...
    # text_embedding
    def vectors(self) -> NDArray[np.float32]:
        """(n_texts, width) or (n_tokens, width), of image_embedding (n_images, width) or (n_rows, width); the array
        owns the call's buffer, no copy. Raises the call's error."""
    def texts_done(self) -> int: ...
    # text_to_text
    def text(self, choice: int, start: int = 0) -> tuple[bytes, int, int, int]:
        """Decided text from byte ``start`` on, tokens so far, finish (0 none, 1 stop, 2 length, 3 eos, 4 cancelled),
        stop index."""
    def tokens(self, choice: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint32]]:
        """ids, logprobs, byte_end of the tokens so far, from number ``start`` on (copies)."""
    def sampled_ids(self, choice: int, start: int) -> tuple[list[int], bool]:
        """Ids from number ``start`` on, and whether there will be no more."""
    def mask(self, choice: int, index: int, bits: bytes) -> None:
        """Which tokens may be number ``index`` of a choice, the next one: a bit an id, as many bytes as submit_text
        got. The answer waits for it. One thread at a time for a choice."""
    def top_logprobs(self, choice: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """(tokens, k) ids and logprobs of the tokens so far, from number ``start`` on (copies)."""
    def usage(self) -> tuple[int, int, int, float, float, float]:
        """prompt tokens, generated tokens of all choices, cached tokens; seconds: queued, prompt, generation."""
    def prompt_logits(self) -> NDArray[np.float32]:
        """(n_prompt, vocab) when asked for."""
    def image_rows(self) -> NDArray[np.float32]:
        """(rows of all images, hidden) of a call with prompt_logits and images, as far as they were computed."""
    def capture(self) -> tuple[NDArray[np.float32], int, int, int, int]:
        """Of a call with capture_values that is done: (tokens, values) as csrc/models/capture.h says, not copied;
        layers, hidden, vocab of the model; tokens whose records had no room."""
    # text_to_image
    def image_progress(self) -> tuple[int, int, int, int]:
        """Steps, previews and pictures finished so far, of all pictures together; previews that a picture gets."""
    def preview(self, index: int) -> NDArray[np.uint8]:
        """(height, width, 3) of a preview that is finished, not copied."""
    def pictures(self) -> dict[str, NDArray[np.float32]]:
        """``pixels`` (n, height, width, 3) from 0 to 1 and ``latents`` (n, channels, high, wide); when they were to be
        kept also ``texts`` (texts, rows, width), ``pooled`` (texts, width) and ``history`` (n, steps, channels,
        high, wide). Not copied. Raises the call's error."""

@final
class Registry:
    def __new__(cls, *, threads: int = 0, memory_bytes: int = 0, step_budget: float = ..., spin: float = ...,
                 shutdown_grace: float = 5.0, load_timeout: float = 30.0, load_ceiling: float = 600.0,
                 stall_timeout: float = 30.0, request_timeout: float = ..., keep_alive: float = 300.0,
                 maintenance_interval: float = 60.0, batch_wait: float = 0.0, breaker_window: float = 60.0,
                 breaker_rest: float = 60.0, breaker_threshold: int = 5, max_workers: int = 4,
                 queue_capacity: dict[str, int | tuple[int, int]] | None = None,
                 policy: dict[str, str] | None = None,
                 chaos: tuple[int, float, float, float, float, float] | None = None,
                 predictive_scaling: bool = False, scale_timeout: bool = False) -> Registry: ...
    def add(self, key: str, spec: Spec, compute: str = "auto", replace: bool = False,
            command: Sequence[str] | None = None, process_memory: int = 0) -> None:
        """command: workers are processes started so (csrc/isolation), each with process_memory bytes for its engine; 0:
        the core's default."""
    def remove(self, key: str, timeout: float | None = None) -> None: ...
    def load(self, key: str, pin: bool = False, timeout: float | None = None) -> None: ...
    def evict(self, key: str, timeout: float | None = None) -> None: ...
    def keep_alive(self, key: str, seconds: float) -> None: ...
    def entries(self) -> list[dict[str, Any]]:
        """One dict an entry: key, capability, state, breaker, policy, workers, busy, dead, queued, running, waiting and
        capacity (of the queue: calls of one input, calls of many), pinned,
        model_bytes, predicted_bytes (of the model, before it was loaded), engine_bytes, calls, errors, last_error,
        idle_seconds, keep_alive, arrivals (calls a second) and
        predicted_workers (both 0 unless predictive_scaling has something to say), units_in and
        units_out (tokens and images, of answered calls), worker (one dict a worker: id,
        state, running, served, busy_seconds, idle_seconds, engine_bytes, predicted_bytes, process: the id of its own,
        or 0, node: memory node, -1: there is one), latency (seconds of answered calls: count, sum, min, max,
        p50, p99, buckets of (upper bound, count)), and facts (architecture, compute, context_length, vocab,
        hidden_size, layers, output_size, parameters, weight_bytes) once loaded."""
    def stats(self) -> dict[str, Any]:
        """The rows of csrc/registry/metrics.def; memory_limit, memory_used, pressure, bytes_by_tag (of the process);
        compute_threads, compute_threads_leased; threads_created, threads_joined (of the process)."""
    def submit_embed(self, key: str, ids: NDArray[np.int32], offsets: NDArray[np.int64],
                     skip: NDArray[np.int32] | None = None, *, dimensions: int = 0, normalize: int = -1,
                     output: int = 0, tolerant: bool = False, second: NDArray[np.int32] | None = None,
                     timeout: float | None = None, patience: float = -1.0, keep_alive: float = -1.0,
                     priority: int = 2, service_class: int = 0, tenant: int = 0, fail_fast: bool = False,
                     uncounted: bool = False, policy: str = "default") -> Ticket: ...
    def embed(self, key: str, ids: NDArray[np.int32], offsets: NDArray[np.int64],
              skip: NDArray[np.int32] | None = None, *, dimensions: int = 0, normalize: int = -1, output: int = 0,
              tolerant: bool = False, second: NDArray[np.int32] | None = None, timeout: float | None = None,
              patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
              fail_fast: bool = False, uncounted: bool = False, policy: str = "default") -> NDArray[np.float32]:
        """submit_embed, wait and vectors() in one call: the GIL is released once."""
    def submit_images(self, key: str, pixels: NDArray[np.uint8], sizes: NDArray[np.int32], *, dimensions: int = 0,
                      normalize: int = -1, output: int = 0, tolerant: bool = False, timeout: float | None = None,
                      patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
                      tenant: int = 0, fail_fast: bool = False, uncounted: bool = False,
                      policy: str = "default") -> Ticket:
        """Images [height, width, 3] behind each other, as flat pixels (copied), and their heights and widths in turn.
        output 1: all rows of the last layer, before the last norm."""
    def embed_images(self, key: str, pixels: NDArray[np.uint8], sizes: NDArray[np.int32], *, dimensions: int = 0,
                     normalize: int = -1, output: int = 0, tolerant: bool = False, timeout: float | None = None,
                     patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
                     tenant: int = 0, fail_fast: bool = False, uncounted: bool = False,
                     policy: str = "default") -> NDArray[np.float32]:
        """submit_images, wait and vectors() in one call: the GIL is released once."""
    def submit_text(self, key: str, prompt: NDArray[np.int32], *, temperature: float, top_k: int, top_p: float,
                    min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float,
                    seed: int, max_tokens: int, min_tokens: int, logprobs: int, ignore_eos: bool, n: int,
                    stop: Sequence[bytes], stop_ids: Sequence[int], bias_ids: Sequence[int], bias: Sequence[float],
                    prompt_logits: bool = False, vision: bool = False, images: tuple[Any, ...] | None = None,
                    mask: bytes | None = None, capture_values: int = 0, capture_records: int = 0,
                    timeout: float | None = None, patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2,
                    service_class: int = 0, tenant: int = 0, fail_fast: bool = False, uncounted: bool = False,
                    policy: str = "default") -> Ticket:
        """vision: a call to a model that reads images, which ``images`` may have: pixels, sizes, tile_keys, runs,
        run_keys, sources, as of ``mpool.seeing.Images``. mask: which tokens may come first; those for later ones have
        to follow (``Ticket.mask``). capture_values: of each record of what the layers give out, 0 for none;
        capture_records: how many there may be memory for."""
    def submit_image_generation(self, key: str, width: int, height: int,
        ids: Sequence[Sequence[NDArray[np.int32] | None]], counts: tuple[int, int, int], noise: NDArray[np.float32],
        times: NDArray[np.float32], sigmas: NDArray[np.float32], *, n: int = 1, guidance: float = 0.0,
        preview_every: int = 0, keep: bool = False, timeout: float | None = None, patience: float = -1.0,
        keep_alive: float = -1.0, priority: int = 2, service_class: int = 0, tenant: int = 0, fail_fast: bool = False,
        uncounted: bool = False, policy: str = "default") -> Ticket:
        """ids: of each text (one, or two: the second is guided away from), of each encoder; counts: how many ids of
        each encoder."""
    def number(self) -> int:
        """Unlike that of any other registry of the process."""
    def maintain(self) -> None:
        """Start the maintenance thread now; idempotent."""
    def begin_shutdown(self) -> None: ...
    def close(self) -> None:
        """Drain and join; idempotent; from any thread."""
    def after_fork(self) -> None:
        """In a forked child: signals are now seen by its only thread. Everything else the core does by itself in every
        fork of the process: loaded models stay loaded, calls in flight are Cancelled, threads start on first use."""
