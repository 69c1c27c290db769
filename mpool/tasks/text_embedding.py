"""Text embedding up to the core: the plan, prompts, checks, packing, slices. vectors.py has the part that images share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, shown
from ..errors import ContextOverflow, FormatError, InvalidArgument, LimitError, MpoolError, WrongCapability
from ..runtime import threads as _threads
from ..tokenizers.limits import MAX_CHARS as MAX_CHARS
from .options import PRECISIONS
from .sampling import check_id
from .steps import Cutter
from .vectors import CHOICES, Kind, VectorPlan, check, choice, plan_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..conversation.template import ChatTemplate
    from ..models.spec import EmbeddingSettings
    from ..runtime.entry import Entry
    from ..tokenizers import Tokenizer
    from .options import Call

#: Largest slice in characters and in texts, whichever comes first: about 20 ms of tokenising.
SLICE_CHARS, SLICE_TEXTS = 1 << 16, 1024
#: Task -> names under which models keep its prompt, the first that exists counts.
TASKS = {"query": ("query",), "document": ("document", "passage", "corpus")}
_CHOICES = {"task": (None, *TASKS), **CHOICES, "truncate": (True, False)}


# ---- options -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Plan(VectorPlan):
    """Settings that follow from the options and the model.

    Attributes:
        prompt: text put before every text.
        skip: leading tokens that pooling leaves out, 0 if none.
        cut: components kept of what the core gives.
        query: the text that each text is scored with, for a reranker; else None.
        padding: the side at which texts are filled up to max_tokens; "": they are not.
        template: chat template that renders a pair, for a reranker that is a language model; else None.
        answering: the rendered pair ends with the start of an answer.
    """

    tokenizer: Tokenizer
    prompt: str
    skip: int
    cut: int
    max_tokens: int
    truncate: bool
    query: str | None = None
    padding: str = ""
    template: ChatTemplate | None = None
    answering: bool = False


def plan(entry: Entry, options: Any) -> Plan:
    """Checks options against the model; loads its files and tokenizer, and has the core load it, on first use."""
    return plan_of(entry, options, (options.dimensions, options.normalize, options.truncate), _make_plan)


def _make_plan(entry: Entry, options: Any) -> Plan:
    check(entry, options, _CHOICES)
    description = entry.describe()
    settings = description.embedding
    assert settings is not None, "entries of another capability are refused before"
    if settings.scores != options.scores:
        raise WrongCapability("is a reranker, which scores pairs of texts and has no vectors" if settings.scores
                              else "is a model of vectors, not one that scores pairs of texts", key=entry.key,
                              hint="mpool.rerank(query, documents, model) takes it" if settings.scores else
                              "mpool.embed and mpool.similarity rank with it; mpool.rerank takes cross-encoders")
    if settings.scores and settings.answering is None and (options.prompt, options.prompt_name) != (None, None):
        raise InvalidArgument("prompt is for rerankers that are told what to look for", key=entry.key,
                              hint="This model reads the query and the document alone")
    width = settings.output_size
    dimensions, cut = 0, settings.truncate_dim or width
    if options.dimensions is not None:
        dimensions = cut = _dimensions(options.dimensions, width, settings, entry.key)
    prompt = _prompt(options, settings.prompts, settings.default_prompt_name, entry.key)
    core_key = entry.core_key(options.compute)  # from here on the core loads beside us
    tokenizer = entry.tokenizer()
    skip = 0
    if prompt and not settings.include_prompt:
        skip = tokenizer.count(prompt) - len(tokenizer.suffix_ids)
    return Plan(entry=entry, registry=entry.pool.registry, core_key=core_key, tokenizer=tokenizer, prompt=prompt,
                skip=skip, dimensions=0 if dimensions == width else dimensions, cut=cut,
                width=cut if cut in settings.sizes else min(cut, width),
                normalize=-1 if options.normalize is None else int(options.normalize), max_tokens=settings.max_tokens,
                truncate=options.truncate, null=options.on_error == "null", precision=options.precision,
                padding=settings.padding, template=None if settings.answering is None else _pairs_of(entry),
                answering=bool(settings.answering))


def _pairs_of(entry: Entry) -> ChatTemplate:
    """The template that makes a text of a pair.

    Raises:
        FormatError: it does not write both.
    """
    template, marks = entry.template(), ("the query", "the document")
    text = template.render(_pair("", *marks), add_generation_prompt=False)
    for mark in marks:
        if mark not in text:
            raise FormatError(file=entry.ref, field="chat_template", got=f"a template that leaves out {mark}",
                              allowed="one that writes messages of the roles query and document")
    return template


def _pair(prompt: str, query: str, document: str) -> list[dict[str, str]]:
    told = [{"role": "system", "content": prompt}] if prompt else []
    return [*told, {"role": "query", "content": query}, {"role": "document", "content": document}]


def _dimensions(value: Any, width: int, settings: EmbeddingSettings, key: str) -> int:
    named = {*settings.sizes, width} if settings.sizes else {*settings.dimensions, width} if settings.dimensions else ()
    allowed = ", ".join(map(str, sorted(named))) if named else f"1 to {width}"
    number = integer(value)
    if number is None or (number not in named if named else not 1 <= number <= width):
        raise InvalidArgument(f"dimensions is {shown(value)}, allowed: {allowed}", key=key)
    return number


def _prompt(options: Any, prompts: Mapping[str, str], default: str | None, key: str) -> str:
    if options.prompt is not None:
        if options.prompt_name is not None:
            raise InvalidArgument("prompt and prompt_name are both given", hint="Give one of them", key=key)
        if not isinstance(options.prompt, str) or len(options.prompt) > MAX_CHARS:
            raise InvalidArgument(f"prompt is {shown(options.prompt)}, allowed: text of at most {MAX_CHARS:,} "
                                  "characters", key=key)
        fault = surrogate_of(options.prompt, "prompt")
        if fault is not None:
            fault.key = key
            raise fault
        return options.prompt
    name = options.prompt_name
    if name is not None:
        if not isinstance(name, str) or name not in prompts:
            from ..checks import nearest

            near = nearest(name, list(prompts)) if isinstance(name, str) else []
            raise InvalidArgument(f"prompt_name is {shown(name)}"
                                  + (f"; the nearest is {near[0]}" if near else "") + ", allowed: "
                                  + (", ".join(prompts) or "none, since the model has no prompts"), key=key)
        return prompts[name]
    if options.task is not None:
        # as sentence-transformers: a task without a prompt has none, whatever the default is
        return next((prompts[name] for name in TASKS[options.task] if name in prompts), "")
    return prompts.get(default, "") if default is not None else ""


# ---- texts ---------------------------------------------------------------------------------------------------------

def texts_of(inputs: Any, most: int, name: str = "inputs") -> list[Any]:
    """The texts of a call that is not a single str; ``name`` is what errors call them.

    Raises:
        InvalidArgument: not a list of texts.
        LimitError: more than ``most``.
    """
    if isinstance(inputs, (bytes, bytearray, Mapping, Set)) or not hasattr(inputs, "__len__") \
            or not hasattr(inputs, "__iter__") or getattr(inputs, "ndim", 1) != 1:
        raise InvalidArgument(f"{name} is {type(inputs).__name__}, allowed: "
                              + ("a str or a list of str" if name == "inputs" else "a list of str"),
                              hint="embed_iter takes any iterable" if name == "inputs" else None)
    if len(inputs) > most:
        more = "embed_iter takes any number; max_inputs= or PoolConfig.max_embed_inputs raises the limit"
        raise LimitError(f"{name} has {len(inputs):,} texts, one call takes at most {most:,}",
                         hint=more if name == "inputs" else "PoolConfig.max_embed_inputs raises the limit")
    return list(inputs)


def fault_of(text: Any, name: str) -> MpoolError | None:
    """Why a text cannot be embedded, before anything is known of its tokens."""
    if not isinstance(text, str):
        return InvalidArgument(f"{name} is {type(text).__name__}, allowed: str")
    if not text:
        return InvalidArgument(f"{name} is empty, allowed: 1 to {MAX_CHARS:,} characters",
                               hint="on_error='null' gives NaN for it")
    if len(text) > MAX_CHARS:
        return InvalidArgument(f"{name} has {len(text):,} characters, allowed: 1 to {MAX_CHARS:,}",
                               hint="Split it; on_error='null' gives NaN for it")
    return None


def surrogate_of(text: str, name: str) -> MpoolError | None:
    """The error for a text with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return InvalidArgument(f"{name} has half of a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                               f"{error.start}, allowed: Unicode text",
                               hint="text.encode('utf-8', 'replace').decode() makes it valid")
    return None


def cutter() -> Cutter:
    """The cutter of texts."""
    return Cutter(SLICE_CHARS, SLICE_TEXTS)


def slices(items: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Cuts an iterable: (number of the first text, texts)."""
    cut = cutter()
    for item in items:
        if (full := cut.add(item)) is not None:
            yield full
    if (full := cut.rest()) is not None:
        yield full


@dataclass(frozen=True, slots=True)
class Pack:
    """Texts as the core takes them.

    Attributes:
        ids: token ids, int32 ``[tokens]``.
        offsets: int64 ``[good texts + 1]``.
        skip: int32 ``[good texts]`` or None.
        second: where the second text of each pair begins, int32 ``[good texts]``; None if they are no pairs.
        count: texts, those with a fault included.
        faults: (place in the slice, error) of texts without a vector.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    skip: NDArray[np.int32] | None
    count: int
    faults: tuple[tuple[int, MpoolError], ...] = ()
    second: NDArray[np.int32] | None = None


def pack(plan: Plan, texts: list[Any], start: int = 0, single: bool = False) -> Pack:
    """Checks and tokenises texts, the first of which is number ``start`` of its call.

    Raises:
        InvalidArgument: a text is not a str, empty, too long or not Unicode, unless the plan says null.
        ContextOverflow: a text has more tokens than the model takes and is not to be cut, unless the plan says null.
    """
    if plan.query is not None:
        return _pack_pairs(plan, texts, start)
    faults = [(at, fault) for at, text in enumerate(texts)
              if (fault := fault_of(text, _name(start + at, single))) is not None]
    if faults and not plan.null:
        raise _keyed(faults[0][1], plan)
    bad = {at for at, _ in faults}
    good = [text for at, text in enumerate(texts) if at not in bad] if bad else texts
    prompted = [plan.prompt + text for text in good] if plan.prompt else good
    try:
        ids, offsets = plan.tokenizer.encode_batch(prompted, max_tokens=plan.max_tokens, truncate=plan.truncate)
    except (InvalidArgument, ContextOverflow):
        late = [(at, fault) for at, text in enumerate(texts) if at not in bad
                and (fault := _late_fault(plan, plan.prompt + text, _name(start + at, single))) is not None]
        if not late:
            raise
        if not plan.null:
            raise _keyed(late[0][1], plan) from None
        faults = sorted([*faults, *late], key=lambda fault: fault[0])
        bad = {at for at, _ in faults}
        prompted = [plan.prompt + text for at, text in enumerate(texts) if at not in bad]
        ids, offsets = plan.tokenizer.encode_batch(prompted, max_tokens=plan.max_tokens, truncate=plan.truncate)
    if plan.padding:
        ids, offsets = _padded(plan, ids, offsets)
    skip = None
    if plan.skip:
        # a text that was cut down to its prompt still has to be pooled over something
        skip = np.minimum(plan.skip, np.diff(offsets) - 1).astype(np.int32)
    return Pack(ids, offsets, skip, len(texts), tuple(faults))


def _are_ids(inputs: list[Any]) -> bool:
    """True for lists of token ids, in place of texts."""
    first = inputs[0] if inputs else None
    return isinstance(first, list) and bool(first) and integer(first[0]) is not None


def pack_ids(plan: Plan, sequences: list[list[int]], start: int = 0) -> Pack:
    """Checks token ids, which are taken as they are: no prompt, nothing put around them, nothing cut.

    Raises:
        InvalidArgument: there are none, or one is not in the vocabulary.
        ContextOverflow: more than the model takes.
    """
    ids: list[int] = []
    offsets = [0]
    for at, sequence in enumerate(sequences, start):
        if not sequence or len(sequence) > plan.max_tokens:
            raise _keyed(ContextOverflow(f"text {at} has {len(sequence)} tokens, the model takes 1 to "
                                         f"{plan.max_tokens}", tokens=len(sequence), limit=plan.max_tokens), plan)
        try:
            ids += [check_id(f"a token of text {at}", token, plan.tokenizer.vocab_size) for token in sequence]
        except InvalidArgument as error:
            raise _keyed(error, plan) from None
        offsets.append(len(ids))
    return Pack(np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64), None, len(sequences))


def _pack_pairs(plan: Plan, documents: list[Any], start: int) -> Pack:
    assert plan.query is not None
    for at, text in enumerate(documents, start):
        fault = fault_of(text, f"documents[{at}]")
        if fault is not None:
            fault.hint = "Leave it out: there is nothing in it to score" if text == "" else None
            raise _keyed(fault, plan)
    try:
        if plan.template is not None:
            return _pack_rendered(plan, plan.template, documents, start)
        found = plan.tokenizer.encode_pairs(plan.query, documents, max_tokens=plan.max_tokens, truncate=plan.truncate)
    except (InvalidArgument, ContextOverflow) as error:
        for at, text in enumerate(documents, start):
            fault = surrogate_of(text, f"documents[{at}]")
            if fault is not None:
                raise _keyed(fault, plan) from None
        raise _keyed(error, plan) from None
    return Pack(found.ids, found.offsets, None, len(documents), (), found.second)


def _pack_rendered(plan: Plan, template: ChatTemplate, documents: list[Any], start: int) -> Pack:
    """Pairs as the template writes them. What is too long loses the end of its document, not what stands behind it."""
    def rendered(document: str) -> list[int]:
        assert plan.query is not None
        return template.prompt(_pair(plan.prompt, plan.query, document), plan.tokenizer,
                               add_generation_prompt=plan.answering).ids.tolist()

    ids: list[int] = []
    offsets = [0]
    behind: list[int] = []
    for at, document in enumerate(documents, start):
        mine = rendered(document)
        if len(mine) > plan.max_tokens:
            if not plan.truncate:
                raise ContextOverflow(f"document {at} with the query has {len(mine)} tokens, the limit is "
                                      f"{plan.max_tokens}", tokens=len(mine), limit=plan.max_tokens,
                                      hint="Shorten it, or set truncate=True")
            behind = behind or _common_end(rendered("0"), rendered("a"))
            if len(behind) >= plan.max_tokens:
                raise InvalidArgument(f"max_tokens is {plan.max_tokens}, but what stands behind a document is "
                                      f"{len(behind)}")
            mine = mine[:plan.max_tokens - len(behind)] + behind
        ids += mine
        offsets.append(len(ids))
    return Pack(np.array(ids, np.int32), np.array(offsets, np.int64), None, len(documents))


def _common_end(a: list[int], b: list[int]) -> list[int]:
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return a[len(a) - same:]


def _padded(plan: Plan, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> tuple[Any, Any]:
    """Texts of the same length, with the padding token."""
    token = plan.tokenizer.special.get("pad")
    if token is None:
        raise FormatError(file=plan.entry.ref, field="pad_token", got="missing", allowed="the "
                          "token that fills texts up, which this model attends to")
    lengths, most = np.diff(offsets), plan.max_tokens
    filled = np.full((len(lengths), most), token, dtype=np.int32)
    columns = np.arange(most)
    mine = columns >= most - lengths[:, None] if plan.padding == "left" else columns < lengths[:, None]
    filled[mine] = ids
    return filled.reshape(-1), np.arange(len(lengths) + 1, dtype=np.int64) * most


def _name(at: int, single: bool) -> str:
    return "the text" if single else f"text {at}"


def _keyed(error: MpoolError, plan: Plan) -> MpoolError:
    error.key = error.key or plan.entry.key
    return error


def _late_fault(plan: Plan, text: str, name: str) -> MpoolError | None:
    fault = surrogate_of(text, name)
    if fault is None and not plan.truncate:
        tokens = plan.tokenizer.count(text)
        if tokens > plan.max_tokens:
            fault = ContextOverflow(f"{name} has {tokens} tokens, the model takes {plan.max_tokens}", tokens=tokens,
                                    limit=plan.max_tokens, hint="Shorten it, or set truncate=True")
    return fault


def halves(pack: Pack) -> tuple[Pack, ...]:
    """The good texts of a pack as two packs; none if there is one."""
    middle = (len(pack.offsets) - 1) // 2
    if not middle:
        return ()
    edge = int(pack.offsets[middle])
    first, last = pack.offsets[:middle + 1], pack.offsets[middle:] - edge
    skips = (None, None) if pack.skip is None else (pack.skip[:middle], pack.skip[middle:])
    seconds = (None, None) if pack.second is None else (pack.second[:middle], pack.second[middle:])
    return (Pack(pack.ids[:edge], first, skips[0], middle, (), seconds[0]),
            Pack(pack.ids[edge:], last, skips[1], len(last) - 1, (), seconds[1]))


def packed(plan: Plan, texts: list[Any], start: int, single: bool, call: Call) -> Pack:
    """As :func:`pack`; off the main thread if there is much to tokenise."""
    if _are_ids(texts):
        return pack_ids(plan, texts, start)
    chars = sum(len(text) for text in texts if isinstance(text, str))
    return _threads.interruptible(pack, plan, texts, start, single, chars=chars)


def _good(pack: Pack) -> int:
    return len(pack.offsets) - 1


def _embed(plan: Plan, pack: Pack, **keywords: Any) -> NDArray[np.float32]:
    return plan.registry.embed(plan.core_key, pack.ids, pack.offsets, pack.skip, second=pack.second, **keywords)


def _start(plan: Plan, pack: Pack, **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_embed(plan.core_key, pack.ids, pack.offsets, pack.skip, second=pack.second, **keywords)


def _heavy(inputs: list[Any]) -> bool:
    return not _are_ids(inputs) and sum(len(text) for text in inputs if isinstance(text, str)) >= _threads.LONG // 4


def _tokens(pack: Pack) -> int:
    return int(pack.offsets[-1])


TEXTS = Kind("text", packed, _good, _embed, _start, halves, _heavy, _tokens)


# ---- many texts ----------------------------------------------------------------------------------------------------

def check_streamable(options: Any, batch_size: Any) -> int | None:
    """Checks what :func:`mpool.embed_iter` does not share with :func:`mpool.embed`; the batch size.

    Raises:
        InvalidArgument: a precision whose ranges would need all vectors at once, or a batch_size that is none.
    """
    choice("precision", options.precision, PRECISIONS)
    if options.precision in ("int8", "uint8"):
        raise InvalidArgument(f"precision is {options.precision!r}, allowed in embed_iter: float32, binary, ubinary",
                              hint="The range of each component is known only when all vectors are")
    size = integer(batch_size)
    if batch_size is not None and (size is None or size < 1):
        raise InvalidArgument(f"batch_size is {shown(batch_size)}, allowed: 1 or more, or None for single vectors")
    return size
