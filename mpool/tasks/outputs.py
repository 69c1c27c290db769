"""Requests for sparse vectors, token vectors, or all outputs of a model: plans, markers and results.

They run like requests for vectors (vectors.py, steps.py) with other outputs of the core.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..checks import integer, refuse, surrogate_of
from ..errors import ContextOverflow, FormatError, LimitError
from ..host import native_calls
from ..models.files import close, open_regular, read_exactly
from . import text_embedding as embedding
from .embedding_results import SparseVectors, TextEmbeddings, TokenVectors, rows_at
from .jobs import Job
from .steps import END, Cutter, IterRequest, Out, Rebatch, Start, Steps, Take, run_slices
from .steps import Pack as PackStep
from .text_embedding import Pack, Plan
from .token_labels import LabelledSpan, size_of
from .vectors import Bar, Kind, naming_idle, note_wait, service_class_of, submit, tenant_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..models.spec import StoredVector, TokenVectorSettings
    from ..runtime.entry import Entry
    from ..runtime.history import TrackedRequest
    from ..tokenizers import Tokenizer
    from .options import Call

#: Bits of the core's mask of outputs.
DENSE, STATES, ROWS, SPARSE = 1, 2, 4, 8
#: A result may take 1 / RESULT_SHARE of the pool's memory limit. The caller holds the result in addition to models and
#: caches, and joining slices needs a second copy of it.
RESULT_SHARE = 4
#: Maximum size in bytes of the token vectors of a slice of :func:`mpool.embed_iter`, of which a few are in memory.
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Markers:
    """How a text becomes the tokens of a model of token vectors.

    Attributes:
        marker: id of the token after the first special tokens; None: none.
        length: number of tokens to which a text is padded; 0: no padding.
        fill: id of the token that pads the text (in ColBERT, the mask token).
        attend: True if the other tokens attend to these padding tokens.
        skipped: ids that get no vector, ascending.
        skip_first: number of leading tokens that get no vector.
    """

    marker: int | None
    length: int
    fill: int
    attend: bool
    skipped: NDArray[np.int32]
    skip_first: int


@dataclass(frozen=True, slots=True)
class OutputPlan(Plan):
    """A plan with the outputs that are asked for.

    Attributes:
        mask: outputs of the core.
        vocab: number of tokens of the vocabulary.
        markers: how texts become tokens; None: as for dense vectors.
        query_weights: weight of each token, for models whose queries need no pass through the network; else None.
        most: maximum number of weights of a sparse vector; None: all.
        parameter: name of the inputs, for messages.
    """

    parameter: ClassVar[str] = "inputs"

    mask: int = DENSE
    vocab: int = 0
    markers: Markers | None = None
    query_weights: NDArray[np.float32] | None = None
    most: int | None = None

    @property
    def row_size(self) -> int:
        """Number of components of the vector of a token."""
        settings = self.entry.describe().embedding
        assert settings is not None
        return settings.tokens.size if settings.tokens is not None else settings.hidden_size

    def part(self, pack: Pack, ticket: _core.Ticket | None) -> Part:
        """Return the outputs of a finished ticket. ``ticket`` is None if no text of the pack has tokens."""
        assert ticket is not None, "every text has tokens"
        return part_of(self, pack, ticket)


# ---- plans ---------------------------------------------------------------------------------------------------------

def plan(entry: Entry, options: Any) -> OutputPlan:
    """Return the plan for the options of a request; ``options.embedding`` names the function.

    Raises:
        InvalidArgument: an option is invalid for this model.
        WrongCapability: the model does not have the output.
    """
    most = getattr(options, "max_active", None)
    if most is not None and ((integer(most) or 0) < 1):
        refuse("max_active", most, "an integer of 1 or more, or None", key=entry.key)
    found = embedding.plan(entry, options)
    # a prompt of the request that equals the model's own is inserted as text, and the model's own as its marker
    explicit = options.prompt is not None or options.prompt_name is not None
    key = "outputs", tenant_of(options), found, options.embedding, options.task, explicit
    made = entry.plans.get(key)
    if made is None:
        made = _make(found, options)
        entry.keep_plan(key, made)
    return made if most is None else replace(made, most=most)


def _make(found: Plan, options: Any) -> OutputPlan:
    entry, output = found.entry, options.embedding
    description = entry.describe()
    settings = description.embedding
    assert settings is not None
    vocab = next(one.shape[0] for one in description.spec.tensors if one.name == "token_embd.weight")
    if output == "tokens" and options.task == "query" and settings.query_weights is not None:
        refuse("task", "query", "document or None: this model looks the weights of queries up in a table, and computes "
               "no vectors of their tokens", key=entry.key, hint="Use mpool.embed_sparse(texts, model, task=\"query\")")
    bits = {"dense": DENSE, "sparse": SPARSE, "tokens": ROWS}
    if output == "all":
        mask = sum(bits[one] for one in settings.embeddings)
    else:
        mask = SPARSE if output == "sparse" else ROWS if settings.tokens is not None else STATES
    weights = None
    if mask == SPARSE and options.task == "query" and settings.query_weights is not None:
        weights = _read_weights(settings.query_weights)
    changes: dict[str, Any] = {}
    markers = None
    if settings.tokens is not None and mask & ROWS:
        markers, changes = _markers(found, settings.tokens, options)
    values = {name: getattr(found, name) for name in Plan.__dataclass_fields__} | changes
    return OutputPlan(**values, mask=mask, vocab=vocab, markers=markers, query_weights=weights)


def _read_weights(stored: StoredVector) -> NDArray[np.float32]:
    handle, _ = open_regular(stored.path)
    try:
        values = np.frombuffer(read_exactly(handle, stored.offset, 4 * stored.size, path=stored.path), dtype="<f4")
    finally:
        close(handle)
    if not np.isfinite(values).all():
        raise FormatError(file=stored.path, field="weight", got="NaN or infinity", allowed="finite weights")
    return values


def _markers(found: Plan, late: TokenVectorSettings, options: Any) -> tuple[Markers, dict[str, Any]]:
    """Return the markers of the task, and two changes of the plan: the prompt without the marker, and the maximum
    number of tokens beside it.

    A prompt that is a token of the vocabulary is inserted as this token, as in training; any other one is text.
    """
    tokenizer, query = found.tokenizer, options.task == "query"
    legacy = late.query_marker if query else late.document_marker
    prompt, marker = found.prompt, None
    if options.prompt is None and options.prompt_name is None:
        first = legacy or prompt
        marker = _token(tokenizer, first)
        if legacy:
            rest = prompt.removeprefix(legacy)
            prompt = rest if marker is not None else legacy + rest
        elif marker is not None:
            prompt = ""
    limit = found.max_tokens
    length = late.query_length if query else late.document_length
    limit = min(limit, length or limit)
    fill, filled = 0, 0
    if query and late.expansion is not None:
        mask = tokenizer.special.get("mask") if late.expansion == "" else tokenizer.token_id(late.expansion)
        if mask is None:
            mask = tokenizer.token_id("[MASK]") if late.expansion == "" else None
        if mask is None:
            raise FormatError(file=found.entry.ref, field="mask_token", got="missing",
                              allowed="a mask token, because this model pads queries with it")
        fill, filled = mask, limit
    skips = late.skipped if not query or late.skips_queries else ()
    unknown = tokenizer.special.get("unk")
    ids = {token for word in skips if (token := tokenizer.token_id(word)) is not None and token != unknown}
    around = len(tokenizer.prefix_ids) + len(tokenizer.suffix_ids) + (marker is not None)
    if limit <= around:
        raise FormatError(file=found.entry.ref, field="query_length" if query else "document_length", got=limit,
                          allowed=f"more than {around}, the number of special tokens")
    return (Markers(marker, filled, fill, late.attend, np.array(sorted(ids), dtype=np.int32), late.skip_first),
            {"prompt": prompt, "max_tokens": limit - (marker is not None)})


def _token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the token that is this text, or this text without spaces around it; None if there is none."""
    if not text.strip():
        return None
    found = tokenizer.token_id(text)
    return tokenizer.token_id(text.strip()) if found is None else found


# ---- packs ---------------------------------------------------------------------------------------------------------

def packed(plan: OutputPlan, texts: list[Any], start: int, single: bool, call: Call) -> Pack:
    """Pack texts as for dense vectors, then add the marker and fill queries up."""
    found = embedding.packed(plan, texts, start, single, call)
    markers = plan.markers
    if markers is None or embedding.are_token_ids(texts) or (markers.marker is None and not markers.length):
        return found
    at = len(plan.tokenizer.prefix_ids)
    rows: list[NDArray[np.int32]] = []
    attended: list[int] = []
    for first, end in zip(found.offsets, found.offsets[1:]):
        ids = found.ids[first:end]
        if markers.marker is not None:
            ids = np.insert(ids, at, markers.marker)
        attended.append(len(ids))
        if len(ids) < markers.length:
            ids = np.concatenate([ids, np.full(markers.length - len(ids), markers.fill, dtype=np.int32)])
        rows.append(ids.astype(np.int32, copy=False))
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    limited = markers.length > 0 and not markers.attend
    return replace(found, ids=np.concatenate(rows) if rows else found.ids, offsets=offsets,
                   attended=np.array(attended, dtype=np.int32) if limited else None)


def _start(plan: OutputPlan, pack: Pack, **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_embed(plan.core_key, pack.ids, pack.offsets, pack.skip, outputs=plan.mask,
                                      attended=pack.attended, adapter=plan.adapter, **keywords)


def _no_halves(pack: Pack) -> tuple[Pack, ...]:
    return ()


def _embed(plan: OutputPlan, pack: Pack, **keywords: Any) -> NDArray[np.float32]:
    raise NotImplementedError("requests for outputs wait for a ticket")


TEXTS = Kind("text", packed, embedding.TEXTS.valid, _embed, _start, _no_halves, embedding.TEXTS.heavy,
             embedding.TEXTS.tokens, native_calls.TEXTS)


# ---- results -------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Part:
    """Outputs of a slice. Outputs that were not asked for are None. ``part[i:j]`` has those of some of its texts."""

    dense: NDArray[np.float32] | None = None
    sparse: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]] | None = None
    tokens: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None
    spans: list[tuple[LabelledSpan, ...]] | None = None

    def __len__(self) -> int:
        if self.sparse is not None:
            return len(self.sparse[0]) - 1
        if self.tokens is not None:
            return len(self.tokens[1]) - 1
        found = self.spans if self.dense is None else self.dense
        return 0 if found is None else len(found)

    def __getitem__(self, at: slice) -> Part:
        part = Part(dense=None if self.dense is None else self.dense[at],
                    spans=None if self.spans is None else self.spans[at])
        if self.sparse is not None:
            indptr, found = rows_at(self.sparse[0], at)
            part.sparse = indptr, self.sparse[1][found], self.sparse[2][found]
        if self.tokens is not None:
            offsets, found = rows_at(self.tokens[1], at)
            part.tokens = self.tokens[0][found], offsets
        return part

    def copied(self) -> Part:
        """Return the part with arrays of its own."""
        part = Part(dense=None if self.dense is None else self.dense.copy(), spans=self.spans)
        if self.sparse is not None:
            indptr, indices, values = self.sparse
            part.sparse = indptr.copy(), indices.copy(), values.copy()
        if self.tokens is not None:
            part.tokens = self.tokens[0].copy(), self.tokens[1].copy()
        return part


def part_of(plan: OutputPlan, pack: Pack, ticket: _core.Ticket) -> Part:
    """Return the outputs of a finished ticket."""
    part = Part()
    if plan.mask & DENSE:
        part.dense = ticket.vectors()[:, :plan.width]
    if plan.mask & SPARSE:
        indptr, ids, values, _ = ticket.sparse()
        part.sparse = _largest(indptr, ids, values, plan.most)
    if plan.mask & (ROWS | STATES):
        part.tokens = _kept(plan, pack, ticket.rows() if plan.mask & ROWS else ticket.states())
    return part


def _largest(indptr: Any, ids: Any, values: Any, most: int | None) -> tuple[Any, Any, Any]:
    """Keep the ``most`` largest weights of each text; among equal weights, those with the smallest ids."""
    if most is None or (np.diff(indptr) <= most).all():
        return indptr, ids, values
    keep = np.zeros(len(ids), dtype=bool)
    for first, end in zip(indptr, indptr[1:]):
        keep[first + np.argsort(-values[first:end], kind="stable")[:most]] = True
    kept = np.concatenate([[0], np.cumsum(keep)])[indptr]
    return kept.astype(np.int64), ids[keep], values[keep]


def _kept(plan: OutputPlan, pack: Pack, rows: Any) -> tuple[Any, Any]:
    """Drop the rows of tokens that get no vector."""
    markers = plan.markers
    if markers is None or (not len(markers.skipped) and not markers.skip_first):
        return rows, pack.offsets
    keep = ~np.isin(pack.ids, markers.skipped)
    for at in range(markers.skip_first):
        keep[np.minimum(pack.offsets[:-1] + at, pack.offsets[1:] - 1)] = False
    offsets = np.concatenate([[0], np.cumsum(keep)])[pack.offsets]
    return rows[keep], offsets.astype(np.int64)


def of_queries(plan: OutputPlan, texts: list[Any], start: int, call: Call) -> Part:
    """Return the sparse vectors of queries from the table of weights: no token counts twice.

    Queries are texts, or sequences of token ids as for :func:`mpool.embed`. Long texts are tokenized on threads for
    native calls.

    Args:
        plan: plan of the request.
        texts: queries of the slice.
        start: index of the first query in the request.
        call: the deadline.

    Raises:
        InvalidArgument, ContextOverflow: as for :func:`mpool.tasks.text_embedding.pack`, except that a query may have
            no token.
        Timeout: the deadline has passed.
    """
    chars = sum(len(text) for text in texts if isinstance(text, str))
    return native_calls.tokenized(chars, _looked_up, plan, texts, start, deadline=call.deadline)


def _looked_up(plan: OutputPlan, texts: list[Any], start: int) -> Part:
    assert plan.query_weights is not None
    found = embedding.pack_ids(plan, texts, start) if embedding.are_token_ids(texts) else _query_ids(plan, texts, start)
    size, largest = len(plan.query_weights), int(found.ids.max(initial=0))
    if largest >= size:
        refuse("inputs", f"token id {largest:,}", f"tokens below {size:,}, the size of the table of query weights",
               key=plan.entry.key)
    ids, values, indptr = [], [], [0]
    for first, end in zip(found.offsets, found.offsets[1:]):
        once = np.unique(found.ids[first:end])
        once = once[plan.query_weights[once] != 0]
        ids.append(once)
        values.append(plan.query_weights[once])
        indptr.append(indptr[-1] + len(once))
    whole = (np.array(indptr, dtype=np.int64), np.concatenate(ids or [np.zeros(0, np.int32)]).astype(np.int32),
             np.concatenate(values or [np.zeros(0, np.float32)]).astype(np.float32))
    return Part(sparse=_largest(*whole, plan.most))


def _query_ids(plan: OutputPlan, texts: list[Any], start: int) -> Any:
    """Return the token ids of queries, without special tokens."""
    for at, text in enumerate(texts, start):
        fault = embedding.fault_of(text, f"inputs[{at}]", 0) or surrogate_of(text, f"inputs[{at}]")
        if fault is not None:
            fault.key = plan.entry.key
            raise fault
    try:
        return plan.tokenizer.encode_batch([plan.prompt + text for text in texts], add_special=False,
                                           parse_special=plan.parse_special, max_tokens=plan.max_tokens,
                                           truncate=plan.truncate)
    except ContextOverflow as error:
        for at, text in enumerate(texts, start):
            tokens = plan.tokenizer.count(plan.prompt + text, add_special=False, parse_special=plan.parse_special)
            if tokens > plan.max_tokens:
                raise embedding.too_long(f"inputs[{at}]", tokens, plan) from None
        raise error


@dataclass(slots=True)
class Sizes:
    """Counts the bytes of a result, which may have at most a quarter of the pool's memory limit.

    Attributes:
        plan: plan of the request.
        most: maximum size in bytes, if less than this quarter; None: the quarter alone applies.
        used: bytes of the parts so far.
    """

    plan: OutputPlan
    most: int | None = None
    used: int = 0

    def expect(self, pack: Pack) -> None:
        """Raise LimitError if the vectors of a pack's tokens, before it is computed, exceed the limit."""
        if self.plan.mask & (ROWS | STATES):
            self.expect_rows(len(pack.ids))

    def expect_rows(self, tokens: int) -> None:
        """Raise LimitError if the vectors of this number of tokens exceed the limit."""
        self._check(self.used + 4 * self.plan.row_size * tokens)

    def add(self, part: Part) -> None:
        """Add the arrays of a part. Raises LimitError if they exceed the limit."""
        arrays = [part.dense, *(part.sparse or ()), *(part.tokens or ())]
        self.used += sum(array.nbytes for array in arrays if array is not None)
        if part.spans is not None:
            self.used += sum(map(size_of, part.spans))
        self._check(self.used)

    def _check(self, size: int) -> None:
        plan = self.plan
        limit = int(plan.registry.stats()["memory_limit"]) // RESULT_SHARE
        source = ", a quarter of the pool's memory limit"
        if self.most is not None and self.most < limit:
            limit, source = self.most, " of this route"
        if size > limit:
            raise LimitError(f"`{plan.parameter}` needs at least {size / 1e6:,.1f} MB for its result, the limit is "
                             f"{limit / 1e6:,.1f} MB{source}", param=plan.parameter,
                             key=plan.entry.key, hint="Pass fewer texts per request")


def _join(arrays: list[Any], empty: Any) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else empty


def _offsets(parts: list[Any]) -> Any:
    lengths = [np.diff(part) for part in parts]
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64) if lengths \
        else np.zeros(1, np.int64)


def sparse_vectors(plan: OutputPlan, parts: list[Part]) -> SparseVectors:
    """Join the sparse vectors of slices."""
    found = [part.sparse for part in parts if part.sparse is not None]
    indptr = _offsets([one[0] for one in found])
    return SparseVectors(indptr, _join([one[1] for one in found], np.zeros(0, np.int32)),
                         _join([one[2] for one in found], np.zeros(0, np.float32)), (len(indptr) - 1, plan.vocab),
                         plan.tokenizer.token_text)


def token_vectors(plan: OutputPlan, parts: list[Part]) -> TokenVectors:
    """Join the token vectors of slices."""
    found = [part.tokens for part in parts if part.tokens is not None]
    return TokenVectors(_join([one[0] for one in found], np.zeros((0, plan.row_size), np.float32)),
                        _offsets([one[1] for one in found]))


def all_outputs(plan: OutputPlan, parts: list[Part]) -> TextEmbeddings:
    """Join all outputs of slices."""
    dense = [part.dense for part in parts if part.dense is not None]
    return TextEmbeddings(_join(dense, np.zeros((0, plan.width), np.float32)) if plan.mask & DENSE else None,
                          sparse_vectors(plan, parts) if plan.mask & SPARSE else None,
                          token_vectors(plan, parts) if plan.mask & ROWS else None)


#: Output -> function that joins its slices.
FINISH: dict[str, Callable[[OutputPlan, list[Part]], Any]] = {"sparse": sparse_vectors, "tokens": token_vectors,
                                                              "all": all_outputs}


# ---- requests ------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Fetch:
    """Wait for the ticket of a pack. Returns its outputs."""

    kind: Kind
    plan: OutputPlan
    pack: Pack
    ticket: _core.Ticket | None
    call: Call

    def now(self) -> Part:
        with naming_idle(self.plan):
            if self.ticket is not None:
                self.ticket.wait()
                note_wait(self.plan, self.ticket)
            return self.plan.part(self.pack, self.ticket)

    async def later(self) -> Part:
        from ..runtime.watching import watcher

        if self.ticket is None:
            return self.plan.part(self.pack, None)
        await watcher().done(self.ticket)  # the copies of large outputs take long: off the event loop
        note_wait(self.plan, self.ticket)
        with naming_idle(self.plan):
            return await native_calls.REQUESTS.arun(self.plan.part, self.pack, self.ticket)


@dataclass(slots=True)
class Table:
    """Look up the weights of queries."""

    plan: OutputPlan
    texts: list[Any]
    start: int
    call: Call

    def now(self) -> Part:
        return of_queries(self.plan, self.texts, self.start, self.call)

    async def later(self) -> Part:
        return await native_calls.TEXTS.arun(self.now, deadline=self.call.deadline)


@dataclass(slots=True)
class Finish:
    """Join the parts to the result that the caller gets."""

    finish: Callable[[OutputPlan, list[Part]], Any]
    plan: OutputPlan
    parts: list[Part]

    def now(self) -> Any:
        return self.finish(self.plan, self.parts)

    async def later(self) -> Any:
        if len(self.parts) <= 1:  # nothing is copied
            return self.now()
        return await native_calls.REQUESTS.arun(self.now)


@dataclass(slots=True)
class OutputsRequest:
    """A request for outputs of a complete list of texts.

    Attributes:
        finish: function from the plan and the parts to the result that the caller gets.
        most_bytes: maximum size of the result in bytes; None: a quarter of the pool's memory limit.
        kind: functions that pack and submit the inputs.
    """

    plan: OutputPlan
    inputs: list[Any]
    progress: Any
    call: Call
    finish: Callable[[OutputPlan, list[Part]], Any]
    most_bytes: int | None = None
    kind: Kind = TEXTS

    def steps(self) -> Steps:
        """Return the generator. Its result is a pair: the caller's result and the number of prompt tokens."""
        plan, call, kind, total = self.plan, self.call, self.kind, len(self.inputs)
        parts: list[Part] = []
        tokens, bar, sizes = 0, Bar(self.progress, total, plan.entry.key), Sizes(plan, self.most_bytes)
        slices = list(embedding.slices(self.inputs))
        try:
            if plan.query_weights is not None:
                for start, texts in slices:
                    part = yield Table(plan, texts, start, call)
                    sizes.add(part)
                    parts.append(part)
                    bar.add(len(texts))
            elif len(slices) == 1:
                pack = yield PackStep(kind, plan, self.inputs, 0, False, call)
                sizes.expect(pack)
                ticket = yield Start(kind, plan, pack, call, service_class_of(total))
                try:
                    parts.append((yield Fetch(kind, plan, pack, ticket, call)))
                    sizes.add(parts[0])
                finally:
                    if ticket is not None and not ticket.done():
                        ticket.cancel()
                tokens = kind.tokens(pack)
                bar.add(total)
            else:
                def took(start: int, pack: Pack, part: Part) -> Iterable[Any]:
                    nonlocal tokens
                    sizes.add(part)
                    parts.append(part)
                    tokens += kind.tokens(pack)
                    bar.add(pack.count)
                    return ()

                yield from run_slices(kind, plan, iter(slices), call, took, Fetch, known=True)
        finally:
            bar.close()
        return (yield Finish(self.finish, plan, parts)), tokens

    def job(self, capability: str, again: Callable[[], Any], running: TrackedRequest) -> Job:
        """Submit the request and return its handle. ``again`` is not needed: no text of a request is computed twice."""
        return OutputsJob(capability, self, running)


@dataclass(slots=True)
class OutputsIterRequest(IterRequest):
    """A request for outputs of an iterable of texts.

    Attributes:
        finish: function from the plan and the parts to the result of a batch.
    """

    finish: Callable[[OutputPlan, list[Part]], Any] = token_vectors

    def _regrouped(self) -> Rebatch:
        return Rebatch(self.batch_size, self._joined, self._singles)

    def _joined(self, parts: list[Part]) -> Any:
        # a part of a slice is a view, which would keep the whole slice in memory
        return self.finish(self.plan, [parts[0].copied()] if len(parts) == 1 else parts)

    def _singles(self, part: Part) -> Iterator[Any]:
        for at in range(len(part)):
            one = self._joined([part[at:at + 1]])
            yield one if isinstance(one, TextEmbeddings) else one[0]

    def _finished(self, rows: Any) -> Any:
        return rows

    def _computed(self, source: Iterator[Any] | AsyncIterator[Any], took: Callable[[int, Any, Any], Iterable[Any]]
                  ) -> Steps:
        if self.plan.query_weights is not None:
            return self._looked_up(source, took)
        return run_slices(self.kind, self.plan, source, self.call, took, Fetch)

    def _looked_up(self, source: Iterator[Any] | AsyncIterator[Any],
                   took: Callable[[int, Any, Any], Iterable[Any]]) -> Steps:
        while (found := (yield Take(source))) is not END:
            start, texts = found
            part = yield Table(self.plan, texts, start, self.call)
            for value in took(start, None, part):
                yield Out(value)


def cutter(plan: OutputPlan) -> Cutter:
    """Return a :class:`Cutter` whose slices have about 16 MiB of token vectors at most, unless one text has more.

    A token has one character or more in almost all texts. A text also has its special tokens, or the number of tokens
    up to which it is filled.
    """
    if not plan.mask & (ROWS | STATES):
        return embedding.cutter()
    tokens = max(_SLICE_BYTES // (4 * plan.row_size), 1)
    around = len(plan.tokenizer.prefix_ids) + len(plan.tokenizer.suffix_ids) + 1
    filled = 0 if plan.markers is None else plan.markers.length
    return Cutter(max(min(embedding.SLICE_CHARS, tokens // 2), 1),
                  max(min(embedding.SLICE_TEXTS, tokens // 2 // max(around, filled)), 1))


def check_items(items: list[Any], null: bool) -> None:
    """Check the items of a list before the model is known, as :func:`mpool.tasks.text_embedding.check_items`."""
    embedding.check_items(items, null)


def iter_check(options: Any, most: int) -> None:
    """Do nothing: all options of these outputs are checked against the model, by :func:`plan`."""


def iter_plan(entry: Entry, options: Any, checked: None) -> OutputPlan:
    """Return the plan for an iterable of texts. Raises as :func:`plan`."""
    return plan(entry, options)


def iter_request(plan: OutputPlan, items: Any, batch_size: int | None, bar: Bar, options: Any, checked: None,
                 call: Call) -> OutputsIterRequest:
    """Return the request for the outputs of an iterable of texts."""
    return OutputsIterRequest(TEXTS, plan, items, cutter(plan), batch_size, bar, call,
                              finish=FINISH[options.embedding])


def inputs_of(inputs: Any, most: int) -> list[Any]:
    """Return the texts of a request as a list; a single str is a list of one text."""
    return [inputs] if isinstance(inputs, str) else embedding.texts_of(inputs, most)


__all__ = ["FINISH", "OutputPlan", "OutputsIterRequest", "OutputsRequest", "check_items", "cutter", "inputs_of",
           "iter_check", "iter_plan", "iter_request", "plan", "token_vectors"]


class OutputsJob(Job):
    """A job whose result is sparse vectors, token vectors, all outputs of a model, or labels of tokens."""

    def __init__(self, capability: str, request: OutputsRequest, running: TrackedRequest) -> None:
        super().__init__(capability, request.plan.entry.key, running)
        self._request = request
        self._pack: Any = None
        self._started: _core.Ticket | None = None
        self._part: Any = None
        if request.plan.query_weights is not None:
            self._part = of_queries(request.plan, request.inputs, 0, request.call)
        elif request.inputs:
            self._pack = request.kind.pack(request.plan, request.inputs, 0, False, request.call)
            Sizes(request.plan).expect(self._pack)
            service_class = service_class_of(len(request.inputs))
            self._started = submit(request.kind, request.plan, self._pack, request.call, service_class, True)
            if self._started is not None:
                running.follow(self._started, self)

    def _tokens(self) -> int:
        return 0 if self._pack is None else self._request.kind.tokens(self._pack)

    @property
    def _ticket(self) -> _core.Ticket | None:
        return self._started

    def _finish_blocks(self) -> bool:
        return self._started is not None

    def _finish(self) -> Any:
        request, part = self._request, self._part
        if self._pack is not None:
            part = request.plan.part(self._pack, self._started)
        if part is not None:
            Sizes(request.plan).add(part)
        return request.finish(request.plan, [] if part is None else [part])
