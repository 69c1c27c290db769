"""The Python interface of the C core. Private: users import :mod:`mpool` instead.

Conventions: token ids are int32 and offsets int64, in C-contiguous numpy arrays. A timeout is in seconds, and ``None``
means no limit. A function that waits releases the GIL once, checks for signals every 50 ms, and cancels the request
that it submitted if a signal handler raises. Errors are the classes of :mod:`mpool.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

__version__: str

def status_table() -> list[tuple[int, str, str, str, str]]:
    """Rows of status.def: number, name, text, Python class, built-in base."""

def architectures() -> list[tuple[str, str]]:
    """Rows of archs.def: name, capability."""

def capabilities() -> list[tuple[str, tuple[int, int], str]]:
    """Rows of capabilities.def: name, queue capacities (requests of one input, requests of many inputs), policy."""

def options() -> list[tuple[str, str, str, str]]:
    """Rows of options.def: variable, value in use, default, meaning."""

def config() -> dict[str, Any]:
    """Return the configuration of this build and machine, which ``show_config`` prints.

    Keys: cpu (name, level, features), kernels {slot: variant}, blas (core, why, multiply_adds: computed by the
    library since the start of the process), compute_threads, threads_from ("MPOOL_THREADS", "cores", "quota" or "cpus":
    csrc/base/topology.h), cores {packages, source, classes [{cores, cpus, cpu_list, speed, used}]} (csrc/base/cores.h),
    nodes [{number, cpus}], memory_bytes, compiler, version, sanitizer, numpy_abi.
    """

def dequantize(dtype: str, data: bytes, n: int) -> NDArray[np.float32]:
    """Dequantise ``n`` items of a stored row to float32 ``(n,)``."""

def quantize(dtype: str, source: str, data: bytes, n: int) -> bytes:
    """Convert ``n`` items of the stored type ``source`` to the type ``dtype``.

    Types of the result: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.

    Raises:
        InvalidArgument: a type is unknown, or ``n`` does not match the data or a block size.
        FormatError: a value is NaN, infinite, or too large for the type.
    """

def drain_log() -> list[tuple[int, str]]:
    """Take the records of the core's log ring, oldest first: (logging level, text)."""

def set_log_level(level: int) -> None:
    """Record messages of this logging level and above."""

def metrics() -> list[tuple[str, str]]:
    """Rows of metrics.def: name, meaning."""

def event_names() -> list[str]:
    """Kinds of events (csrc/registry/events.h), in the order of their bits."""

def want_events(kinds: int) -> None:
    """Record events of these kinds (one bit each) from now on, and no others."""

def drain_events() -> list[tuple[int, int, str, int, int, str, float, str]]:
    """Take the recorded events, oldest first.

    Fields: registry number, kind, key, worker (0 = none), request (0 = none), status name, seconds of
    ``time.monotonic()``, cause (of ``fail``; else empty).
    """

def events_dropped() -> int:
    """Number of events that were dropped because the ring was full, since the process began."""

def tenant_number(name: bytes) -> int:
    """Return the number of a tenant: a 64-bit hash of its name, under a random key of this process; never 0."""

def are_current(stamps: Mapping[str, tuple[int, ...] | None]) -> bool:
    """Return False if a file or folder has another stamp than the dictionary says (``mpool.models.files``), or if the
    system does not say. Pointers, which have one number, are not compared."""

@final
class GgufFile:
    """A parsed GGUF header.

    Attributes:
        kv: key -> value: str, int, float, bool, or a list of one of these types. A string that is not UTF-8 is bytes;
            a list with such a string is a list of bytes.
        keys: the keys, in file order.
        tensors: (name, dtype, shape outermost first, file index, offset, nbytes) of every tensor.
        files: paths of the file and its splits.
        stamps: stamp (``mpool.models.files``) of each file when it was read.
        architecture: value of ``general.architecture``.
    """

    kv: dict[str, Any]
    keys: list[str]
    tensors: list[tuple[str, str, tuple[int, ...], int, int, int]]
    files: list[str]
    stamps: list[tuple[int, int, int, int]]
    architecture: str
    def spec(self) -> Spec:
        """Return a new, extensible spec with the content of this header. Faster than rebuilding it from ``kv``."""
    def value(self, key: str, /) -> Any:
        """Return ``kv[key]`` as a new object, without converting the other values."""
    def bpe(self) -> Bpe | None:
        """Return the byte-pair vocabulary; None if the file has no suitable one.

        A vocabulary with duplicate tokens is unsuitable, and so is one with a merge that does not join two tokens to a
        third. Takes about 20 ms, without the GIL.
        """

@final
class Bpe:
    """A byte-pair vocabulary with its merges, without a Python object per entry. Tokens are unique."""

    def find(self, text: str, /) -> int | None:
        """Return the id of the token with exactly this text; None if there is none or the text is empty."""

    def part(self, words: Iterable[str], most: int, /) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """Return the tokens and merges that byte-pair encoding needs for these words.

        The tokens are the substrings of the words, with their ids. The merges are those that produce such a token,
        ordered by rank. None: the search needs more than ``most`` look-ups.
        """

@final
class Matrix:
    """A matrix of weights whose scales are separate tensors: AWQ, GPTQ, FP8 (csrc/files/scaled_weights.h).

    Immutable: several threads may use it.
    """

    def __new__(cls, spec: Spec, name: str) -> Matrix:
        """Open the files of a spec, which can then no longer be changed, and check all scales of a matrix."""
    def rows(self, first: int, count: int) -> NDArray[np.float32]:
        """Return rows of the matrix in float32 (count, inputs). FileError if a file was truncated meanwhile."""

def read_gguf(path: str) -> GgufFile:
    """Parse the header of a GGUF file and of its splits."""

@final
class Spec:
    """A model spec under construction: files, values, tensors, tokens (csrc/files/spec.h)."""

    def __new__(cls, architecture: str) -> Spec: ...
    def add_file(self, path: str) -> None:
        """Add a weight file; tensors refer to it by its index."""
    def note_files(self, stamps: dict[str, tuple[int, ...] | None]) -> None:
        """Store the identity of all files, so that a load refuses other files: that of their stamps
        (``mpool.models.files``), else that of now. Call after ``add_file``."""
    def set(self, key: str, value: Any) -> None:
        """Set a key: bool, int, float, str, bytes, or a list or tuple of one type (floats may include integers)."""
    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], file: int, offset: int, nbytes: int) -> None:
        """Add a tensor: its type, its shape, and its position in a file."""
    def set_tokens(self, data: bytes, offsets: NDArray[np.int64], control: bytes, eog: Sequence[int]) -> None:
        """Set the bytes that each token adds to the text.

        Args:
            data: the bytes of all tokens, concatenated.
            offsets: start of each token in ``data``, and the end of the last.
            control: one byte per token; 1: a control token, never part of the text.
            eog: ids of the tokens that end a generation.
        """
    def set_draft(self, draft: Spec) -> None:
        """Set the spec of the draft model, which can then no longer be changed."""
    def weights(self) -> str:
        """Predict ``weights`` of a model's facts after its load in this process, with the compute type ``"auto"``:
        ``"packed"``, ``"mapped"`` or ``"packing"``."""
    def state_bytes(self) -> int:
        """Predict ``sequence_state_bytes`` of a model's facts: bytes of the state of a sequence in recurrent layers."""

@final
class Search:
    """An exact search in arrays of vectors (csrc/vectors/search.h).

    Vectors are numbered from 0 in the order in which they are added. One thread at a time may use a search.
    """

    def __new__(cls, registry: Registry, queries: NDArray[np.float32], most: int, cosine: bool,
                least: float | None = None) -> Search:
        """Create a search for queries [q, d].

        Args:
            registry: owner of the compute threads.
            queries: the queries, which are copied.
            most: nearest vectors to keep for each query.
            cosine: False: the score is the dot product.
            least: also count the vectors with at least this score.
        """
    def add(self, vectors: NDArray[np.float32], /) -> None:
        """Compare the queries with more vectors [n, d]. After an error the search has ended."""
    def nearest(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return numbers and scores [q, min(most, vectors added)], best first, and end the search."""
    def counts(self) -> NDArray[np.int64]:
        """Return the number of vectors with a score of at least ``least``, for each query."""

@final
class MaxSim:
    """Exact late interaction of queries with ragged documents (csrc/vectors/maxsim.h).

    Documents are numbered from 0 in the order in which they are added. One thread at a time may use it.
    """

    def __new__(cls, registry: Registry, tokens: NDArray[np.float32], offsets: NDArray[np.int64],
                most: int) -> MaxSim:
        """Create a search for queries.

        Args:
            registry: owner of the compute threads.
            tokens: the token vectors of all queries [t, d], which are copied.
            offsets: the first token of each query, and t.
            most: best documents to keep for each query.
        """
    def add(self, values: NDArray[Any], offsets: NDArray[np.int64], scales: NDArray[np.float32] | None,
            scores: NDArray[np.float32] | None, /) -> None:
        """Compare the queries with more documents: float32 or int8 [t, d]. After an error the search has ended.

        scores [queries, documents], if given, receives all scores.
        """
    def nearest(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return numbers and scores [q, min(most, documents added)], best first, and end the search."""

@final
class Notifier:
    """Wakes an event loop when tickets progress. Create one per loop (csrc/registry/registry.h)."""

    def __new__(cls) -> Notifier: ...
    def fileno(self) -> int:
        """File descriptor that is readable while ``take`` has tickets to return."""
    def take(self) -> list[int]:
        """Ids of the tickets that finished or progressed since they were last taken."""
    def close(self) -> None:
        """Close the descriptor; tickets bound to the notifier no longer notify it."""

@final
class Waiter:
    """One waiter of a ticket, from :meth:`Ticket.join` on until it leaves or is dropped. Also a context manager."""

    def leave(self, gave_up: bool) -> None:
        """Stop waiting; cancel the request if this waiter gave up and was the last one. Idempotent."""
    def __enter__(self) -> Self:
        """Return the waiter."""
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Leave. The waiter gave up if the block ends with an exception that is no :class:`Exception`."""

@final
class Ticket:
    """A request in flight. Dropping the last reference cancels it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done; False if the timeout passes first (the request continues)."""
    def wait_progress(self, seen: int, timeout: float | None = None) -> int:
        """Wait until the progress counter exceeds ``seen``; return the counter (2**64 - 1 once done)."""
    def done(self) -> bool:
        """True if the request has ended: it is complete, failed or was cancelled."""
    def cancel(self) -> bool:
        """Ask the request to stop; False if it had already ended."""
    def join(self) -> Waiter:
        """Count a waiter, in any thread or event loop. The last waiter that gives up cancels the request."""
    def waiters(self) -> int:
        """Number of waiters that have not left."""
    def check(self) -> None:
        """Raise the error of a failed request. The request must be done."""
    def bind(self, notifier: Notifier, id: int) -> None:
        """Notify ``notifier``, with this id, of all progress; in addition to notifiers bound before."""
    def times(self) -> tuple[float, float, float]:
        """Seconds of ``time.monotonic()``: submitted, started, finished; 0.0 = not yet."""
    def eta(self) -> float:
        """Predicted seconds until the request is done; 0.0 = done, or unknown."""
    def position(self) -> int:
        """Requests ahead in the queue; -1 once running or done."""
    # text_embedding, image_embedding
    def vectors(self) -> NDArray[np.float32]:
        """Return the embeddings: a view of the request's buffer, not copied. Raises the error of a failed request.

        Shape: ``(n_texts, width)``; for images ``(n_images, width)``, or ``(n_rows, width)``.
        """
    def states(self) -> NDArray[np.float32]:
        """Return the hidden states of all tokens, ``(n_tokens, width)``: a view, as :meth:`vectors`."""
    def rows(self) -> NDArray[np.float32]:
        """Return the rows of the model's row head, ``(n_tokens, width)``: a view, as :meth:`vectors`."""
    def sparse(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32], int]:
        """Copies of the sparse vectors as CSR: indptr, ids (ascending in each text), weights; and the vocabulary."""
    def texts_done(self) -> int:
        """Texts finished so far."""
    # text_to_text
    def text(self, choice: int, start: int = 0) -> tuple[bytes, int, int, int]:
        """Return the final text from byte ``start`` on, the number of tokens so far, finish reason, and stop index.

        Final text can no longer become part of a stop string. Finish reasons: 0 none yet, 1 stop, 2 length, 3 eos,
        4 cancelled. The stop index is -1 until the choice is finished.
        """
    def tokens(self, choice: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint32]]:
        """Copies of ids, logprobs and byte_end of the tokens so far, from index ``start`` on."""
    def sampled_ids(self, choice: int, start: int) -> tuple[list[int], bool]:
        """Ids of the tokens from index ``start`` on, and True if no more will follow."""
    def mask(self, choice: int, index: int, bits: bytes) -> None:
        """Set the tokens allowed at ``index`` of a choice, the next one. The choice is blocked until it is set.

        ``bits`` has one bit per id and the length of ``mask`` of ``submit_text``. One thread per choice at a time.
        """
    def top_logprobs(self, choice: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Copies of ids and logprobs ``(tokens, k)`` of the top tokens, from index ``start`` on; None if not asked."""
    def usage(self) -> tuple[int, int, int, float, float, float]:
        """Prompt tokens, generated tokens of all choices, cached tokens; seconds queued, prompt, generation."""
    def prompt_logits(self) -> NDArray[np.float32]:
        """float32 ``(n_prompt, vocab)`` if requested, not copied."""
    def image_rows(self) -> NDArray[np.float32]:
        """float32 (rows of all images, hidden) in order of computation, if prompt_logits was set; not copied."""
    def capture(self) -> tuple[NDArray[np.float32], int, int, int, int]:
        """Return the records of a finished request that set ``capture_values``.

        float32 ``(tokens, values)`` in the layout of csrc/models/capture.h, not copied; layers, hidden and vocab of
        the model; number of tokens whose records did not fit.
        """
    # text_to_image
    def image_progress(self) -> tuple[int, int, int, int]:
        """Steps, previews and images finished so far, counted over all images; previews per image."""
    def preview(self, index: int) -> NDArray[np.uint8]:
        """uint8 ``(height, width, 3)`` of a finished preview, not copied."""
    def generated_images(self) -> dict[str, NDArray[np.float32]]:
        """Return the result as arrays, not copied. Raises the error of a failed request.

        ``pixels`` ``(n, height, width, 3)`` from 0 to 1, and ``latents`` ``(n, channels, high, wide)``. With ``keep``
        also ``texts`` ``(texts, rows, width)``, ``pooled`` ``(texts, width)`` and ``history`` ``(n, steps, channels,
        high, wide)``.
        """

@final
class Registry:
    """Keys, their models, and the workers of the models. Seconds and bytes; see :class:`mpool.PoolConfig`."""

    def __new__(cls, *, threads: int = 0, memory_bytes: int = 0, step_budget: float = ...,
                 shutdown_grace: float = 5.0, load_timeout: float = 30.0, load_ceiling: float = 600.0,
                 stall_timeout: float = 30.0, request_timeout: float = ..., keep_alive: float = 300.0,
                 maintenance_interval: float = 60.0, batch_wait: float = 0.0, breaker_window: float = 60.0,
                 breaker_rest: float = 60.0, breaker_threshold: int = 5, max_workers: int = 4,
                 queue_capacity: dict[str, int | tuple[int, int]] | None = None,
                 policy: dict[str, str] | None = None,
                 chaos: tuple[int, float, float, float, float, float] | None = None,
                 predictive_scaling: bool = False, scale_timeout: bool = False,
                 background: bool = False) -> Registry: ...
    def add(self, key: str, spec: Spec, compute: str = "auto", replace: bool = False,
            command: Sequence[str] | None = None, process_memory: int = 0, revision: int = 0,
            staged: bool = False, environment: Sequence[bytes] = ()) -> None:
        """Register a model under a key without loading it.

        Args:
            key: name of the entry.
            spec: content of the model's files. The key ``mpool.weights`` says how the weights of a text model are used:
                ``auto``, ``mapped`` or ``packed``. ``mpool.float32_fast``: a BLAS library may compute products of
                mapped float32 weights even if its sums differ from those of the kernels.
            compute: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"int8"``.
            replace: allow a key that exists; requests move to the new model once it is loaded.
            command: program and arguments that start a worker process (csrc/isolation); None: workers are threads.
            process_memory: bytes for the engine of each worker process; 0: the core's default.
            revision: number that requests may name, so that they run on no other model of the key.
            staged: allow a key that exists; its model serves until :meth:`commit`, and is not evicted to make room.
            environment: variables of a worker process, ``b"NAME=value"``; those of mpool are set to the values in use.
        """
    def commit(self, keys: tuple[str, ...], revision: int) -> None:
        """Give new requests for up to 16 keys, at one moment, to the models that were staged with this revision.

        Raises:
            SendError: a key has no such model; nothing changed.
        """
    def withdraw(self, key: str, revision: int) -> bool:
        """Drop the model that was staged with this revision. Returns False if it is the current one already."""
    def remove(self, key: str, timeout: float | None = None) -> None:
        """Remove a key after its requests have finished."""
    def wait_removed(self, key: str, timeout: float | None = None) -> None:
        """Wait until the models that were removed from a key are gone."""
    def load(self, key: str, pin: bool = False, timeout: float | None = None) -> None:
        """Load the model now and wait until it is ready."""
    def evict(self, key: str, timeout: float | None = None) -> None:
        """Unload the model but keep the key."""
    def keep_alive(self, key: str, seconds: float, pin: bool | None = None) -> None:
        """Set the idle seconds after which workers, and finally the model, are unloaded; inf = never.

        Args:
            pin: whether the model is pinned from now on; None: as before.
        """
    def entries(self) -> list[dict[str, Any]]:
        """Return one dict per entry, ordered by key.

        - key, capability, state, breaker, policy, pinned, keep_alive (seconds), idle_seconds, last_error.
        - workers, busy, dead: counts of workers.
        - queued, running: counts of requests. waiting and capacity: queued requests and their limit, as (requests of
          one input, requests of many inputs).
        - model_bytes, predicted_bytes (of the model, before it was loaded), engine_bytes.
        - state_bytes, snapshot_bytes, snapshots: memory for states of recurrent layers, which engine_bytes includes;
          bytes and number of their copies.
        - calls, errors: accepted and failed requests.
        - arrivals (requests per second) and predicted_workers: 0 without a forecast.
        - units_in, units_out: tokens and images of completed requests.
        - queue_full_seconds: time for which a queue of the model has been full, added over its two queues.
        - deaths, retries, evictions: reason -> count, of workers that died, requests that were retried, unloads.
        - rows: tokens of all passes: prompt, decode and draft tokens; 0 for models without a decoder.
        - worker: one dict per worker: id, state, running, served, busy_seconds, idle_seconds, engine_bytes,
          predicted_bytes, process (id of its process; 0: it is a thread), node (memory node; -1: the machine has one).
        - latency: seconds of completed requests: count, sum, min, max, buckets [(upper bound, count)].
        - facts: architecture, compute, weights, kv_dtype, kv_token_bytes, sequence_state_bytes,
          context_length, vocab, hidden_size, layers, output_size, parameters, weight_bytes, draft_bytes (weights of
          the draft model; 0: none), experts (None: there are none), expert_bytes (in the files), expert_packed_bytes
          (packed copies now), thrashing; empty until the model is loaded.
        """
    def stats(self) -> dict[str, Any]:
        """Return counters, memory and compute threads.

        The rows of csrc/registry/metrics.def; memory_limit, memory_used, pressure, bytes_by_tag (of the process);
        compute_threads, compute_threads_leased; threads_created, threads_joined (of the process).
        """
    def submit_embed(self, key: str, ids: NDArray[np.int32], offsets: NDArray[np.int64],
                     skip: NDArray[np.int32] | None = None, *, dimensions: int = 0, normalize: int = -1,
                     outputs: int = 1, tolerant: bool = False, second: NDArray[np.int32] | None = None,
                     adapter: int = 0, attended: NDArray[np.int32] | None = None, timeout: float | None = None,
                     patience: float = -1.0, keep_alive: float = -1.0,
                     priority: int = 2, service_class: int = 0, tenant: int = 0, fail_fast: int = 0,
                     uncounted: bool = False, policy: str = "default", revision: int = 0) -> Ticket:
        """Queue a text embedding request.

        Args:
            ids: token ids of all texts, concatenated.
            offsets: start of each text in ``ids``, and the end of the last.
            skip: number of leading tokens of each text that pooling ignores.
            dimensions: leading components to keep; 0: all.
            normalize: 1: vectors of length 1; 0: as computed; -1: as the model says.
            outputs: a mask: 1: one vector per text; 2: hidden states; 4: rows of the row head; 8: sparse vectors.
            tolerant: the caller handles NumericError, so a NaN is not counted as a fault of the workers.
            second: start of the second text of each pair, for models that score pairs.
            adapter: id of an adapter of the model, from the spec's ``mpool.adapters``; 0: none.
            attended: number of leading tokens of each text that its tokens attend to.
            patience: seconds without progress before the request times out; below 0: the registry's default.
            keep_alive: new keep-alive of the model in seconds; below 0: unchanged.
            priority: 0 critical, 1 high, 2 normal, 3 low, 4 batch.
            service_class: 0 interactive, 1 bulk.
            tenant: number of the tenant (:func:`tenant_number`); 0: no tenant. Requests of a tenant get one fair share
                together, and share cached results with no other tenant.
            fail_fast: 1: raise Overloaded at once if the queue is full, or if loads, evictions and other requests hold
                the memory that the request needs; 2: also end the request with Overloaded while the load of its model
                waits for such memory; 0: wait.
            uncounted: leave a request that raises Overloaded out of the metrics, because the caller retries it.
            policy: scheduling policy; ``"default"``: the model's.
            revision: as for :meth:`add`: SendError if the key has a model of another revision; 0: any.
        """
    def embed(self, key: str, ids: NDArray[np.int32], offsets: NDArray[np.int64],
              skip: NDArray[np.int32] | None = None, *, dimensions: int = 0, normalize: int = -1, outputs: int = 1,
              tolerant: bool = False, second: NDArray[np.int32] | None = None, adapter: int = 0,
              attended: NDArray[np.int32] | None = None, timeout: float | None = None,
              patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
              tenant: int = 0, fail_fast: int = 0, uncounted: bool = False,
              policy: str = "default", revision: int = 0) -> NDArray[np.float32]:
        """Submit, wait and return the vectors. Releases the GIL once."""
    def submit_images(self, key: str, pixels: NDArray[np.uint8], sizes: NDArray[np.int32], *, dimensions: int = 0,
                      normalize: int = -1, output: int = 0, tolerant: bool = False, timeout: float | None = None,
                      patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
                      tenant: int = 0, fail_fast: int = 0, uncounted: bool = False,
                      policy: str = "default", revision: int = 0) -> Ticket:
        """Queue an image embedding request. The other arguments are those of ``submit_embed``.

        Args:
            pixels: pixels of all images ``[height, width, 3]``, flattened and concatenated; copied.
            sizes: height and width of each image in turn.
            output: 0: one vector per image; 1: all rows of the last layer, before the final norm.
        """
    def embed_images(self, key: str, pixels: NDArray[np.uint8], sizes: NDArray[np.int32], *, dimensions: int = 0,
                     normalize: int = -1, output: int = 0, tolerant: bool = False, timeout: float | None = None,
                     patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2, service_class: int = 0,
                     tenant: int = 0, fail_fast: int = 0, uncounted: bool = False,
                     policy: str = "default", revision: int = 0) -> NDArray[np.float32]:
        """Submit images, wait and return the vectors. Releases the GIL once."""
    def submit_text(self, key: str, prompt: NDArray[np.int32], *, temperature: float, top_k: int, top_p: float,
                    min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float,
                    seed: int, max_tokens: int, min_tokens: int, logprobs: int, ignore_eos: bool, n: int,
                    stop: Sequence[bytes], stop_ids: Sequence[int], bias_ids: Sequence[int], bias: Sequence[float],
                    reasoning_starts: Sequence[bytes], reasoning_ends: Sequence[bytes], call_starts: Sequence[bytes],
                    in_reasoning: bool = False,
                    prompt_logits: bool = False, vision: bool = False, images: tuple[Any, ...] | None = None,
                    mask: bytes | None = None, capture_values: int = 0, capture_records: int = 0, adapter: int = 0,
                    timeout: float | None = None, patience: float = -1.0, keep_alive: float = -1.0, priority: int = 2,
                    service_class: int = 0, tenant: int = 0, fail_fast: int = 0, uncounted: bool = False,
                    policy: str = "default", revision: int = 0) -> Ticket:
        """Queue a text generation request. The last arguments are those of ``submit_embed``.

        Args:
            reasoning_starts, reasoning_ends, call_starts, in_reasoning: texts around the reasoning and the tool calls
                of a completion, which stop strings do not end (csrc/models/generation/stop_strings.h).
            vision: the model is a vision model.
            images: images of the prompt: pixels, sizes, tile_keys, runs, run_keys, sources, times, as in
                ``mpool.tasks.vision.Images``.
            mask: tokens that may come first, one bit per id. ``Ticket.mask`` must then set the mask of every further
                token.
            capture_values: leading values to capture from each record (csrc/models/capture.h); 0: none.
            capture_records: maximum number of records to allocate memory for.
            adapter: id of an adapter, one of ``mpool.adapters`` of the spec; 0: none.
        """
    def submit_image_generation(self, key: str, width: int, height: int,
        ids: Sequence[Sequence[NDArray[np.int32] | None]], counts: tuple[int, int, int], noise: NDArray[np.float32],
        times: NDArray[np.float32], sigmas: NDArray[np.float32], *, n: int = 1, guidance: float = 0.0,
        preview_every: int = 0, keep: bool = False, timeout: float | None = None, patience: float = -1.0,
        keep_alive: float = -1.0, priority: int = 2, service_class: int = 0, tenant: int = 0, fail_fast: int = 0,
        uncounted: bool = False, policy: str = "default", revision: int = 0) -> Ticket:
        """Queue an image generation request. The last arguments are those of ``submit_embed``.

        Args:
            width, height: pixels of an image.
            ids: token ids of each text and each encoder; None: the encoder is not used. Two texts: the second is the
                negative prompt.
            counts: number of ids of each encoder.
            noise: initial latents ``[n, channels, high, wide]``.
            times: time of each step, 0 to 1000.
            sigmas: noise level of each step, descending.
            n: number of images.
            guidance: guidance scale.
            preview_every: steps between previews; 0: none.
            keep: keep text embeddings and the latents of each step, for tests.
        """
    def number(self) -> int:
        """A number unique among the registries of this process."""
    def maintain(self) -> None:
        """Start the maintenance thread now; idempotent."""
    def begin_shutdown(self) -> None:
        """Refuse new requests from now on."""
    def close(self) -> None:
        """Drain and join; idempotent; thread-safe."""
    def after_fork(self) -> None:
        """Call in a forked child: its only thread becomes the main thread.

        The core does the rest by itself in every fork of the process: loaded models stay loaded, requests in flight
        are Cancelled, and threads start on first use.
        """
