"""Embedding and reranking of inputs that are texts, images, or both together.

A vision model such as Qwen3-VL-Embedding or Qwen3-VL-Reranker reads an input, or a pair of query and document, as a
prompt that the chat template renders. Each input is one request to the core, which captures the hidden state of the
last token (the vector) or its logits (the score; the vector of a model whose head projects the mean of the hidden
states, as that of EmbeddingGemma 2). Beginnings of prompts and rows of images are cached as for chats. A
model with two encoders, such as CLIP, embeds texts and images apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse, shown, surrogate_of
from ..conversation.messages import NamedImage
from ..errors import ContextOverflow, InvalidArgument, MpoolError
from ..host import native_calls
from ..images.tiling import TiledImage
from . import chat_prompt, image_embedding, vision
from . import text_embedding as embedding
from .options import ImageOptions
from .steps import Cutter, IterRequest, SeveralJob, Steps, VectorRequest
from .vectors import Bar, Kind, VectorPlan, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .. import _core
    from ..conversation.template import ChatTemplate
    from ..runtime.entry import Entry
    from ..runtime.history import TrackedRequest
    from ..runtime.hosts import Host
    from ..tokenizers import Tokenizer
    from .jobs import Job
    from .options import Call, EmbedOptions
    from .vision import Images

_ALLOWED = 'a str, or a dict with "text", "image" or both'
_HINT = 'For example {"text": "A cat", "image": "cat.png"}; each may also be a list'
_OTHER_HINT = 'mpool embeds no audio and no videos; frames of a video are images: {"image": [...]}'
#: Arguments of the core for a request whose completion is not used.
_SAMPLING: dict[str, Any] = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": 0, "max_tokens": 1, "min_tokens": 0, "logprobs": -1, "ignore_eos": False, "n": 1,
    "stop": (), "stop_ids": (), "bias_ids": (), "bias": (), "reasoning_starts": (), "reasoning_ends": (),
    "call_starts": ()}


# ---- inputs ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Parts:
    """An input: the parts of a message's content in order, and its images.

    Attributes:
        content: ``{"type": "image"}`` for an image, ``{"type": "text", "text": ...}`` for a text.
        images: the images.
    """

    content: list[dict[str, Any]]
    images: list[NamedImage]

    @property
    def text(self) -> str:
        """The texts, one after another."""
        return "".join(part.get("text", "") for part in self.content)


def parts_of(given: Any, name: str) -> Parts:
    """Check an input and return its parts, in the order of the dict. ``name``: its parameter, with an index.

    Raises:
        InvalidArgument: it is neither a text nor a dict with texts or images, or is empty.
    """
    if not isinstance(given, Mapping):
        given, names = {"text": given}, {"text": name}
    else:
        names = {"text": f"{name}.text", "image": f"{name}.image"}
        wrong = next((key for key in given if key not in names), None)
        if wrong is not None:
            texts = all(isinstance(value, str) for value in given.values())
            raise InvalidArgument(param=name, got=f"a dict with the key {shown(wrong)}", allowed=_ALLOWED, hint=(
                _OTHER_HINT if wrong in ("audio", "video") else
                "Pass list(d.values()) for the values of a dict of texts" if texts else _HINT))
        if all(given[key] is None for key in given):
            refuse(name, given, _ALLOWED, hint=_HINT)
    content: list[dict[str, Any]] = []
    images: list[NamedImage] = []
    for key, value in given.items():
        several = isinstance(value, (list, tuple))
        for at, one in enumerate(value if several else () if value is None else (value,)):
            where = f"{names[key]}[{at}]" if several else names[key]
            if key == "image":
                images.append(one if isinstance(one, NamedImage) else NamedImage(one, where))
                content.append({"type": "image"})
                continue
            fault = embedding.fault_of(one, where, 0) or surrogate_of(one, where)
            if fault is not None:
                raise fault
            content.append({"type": "text", "text": one})
    if not content:
        refuse(name, given, _ALLOWED, hint=_HINT)
    return Parts(content, images)


def are_images(inputs: list[Any]) -> bool:
    """Return True if all inputs are dicts of images without texts."""
    return all(isinstance(one, Mapping) and one.get("image") is not None and one.get("text") is None for one in inputs)


def of_images(images: list[Any], single: bool) -> list[Any]:
    """Return the inputs for images alone; errors name the parameter ``images``."""
    return [{"image": NamedImage(one, "images" if single else f"images[{at}]")} for at, one in enumerate(images)]


def check(inputs: list[Any], name: str, single: bool, allow_urls: bool, call: Call, full: bool) -> None:
    """Check inputs before their model is known. ``full``: True: also the images, as far as reading the first ones.

    Raises:
        InvalidArgument, FileError: an input is invalid, or an image cannot be read.
    """
    for at, one in enumerate(inputs):
        parts = parts_of(one, name if single else f"{name}[{at}]")
        if full and at < image_embedding.SLICE:
            vision.check_images(parts.images, allow_urls, call)


# ---- vision models: plans --------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class MixedPlan(VectorPlan):
    """Settings of a request to a vision model, derived from the options and the model.

    Attributes:
        tokenizer: tokenizer of the model.
        template: chat template that renders an input, or a pair.
        prompt: the system message, or "" for none.
        generation_prompt: True if a rendered prompt ends with the start of the assistant's message.
        max_tokens: longest prompt that the model accepts.
        truncate: True if longer prompts are truncated, False if they raise ContextOverflow.
        allow_ids: True if inputs may be token ids whatever the vocabulary is.
        layers: number of layers of the decoder.
        values: number of leading values that the core captures.
        score_tokens: for a reranker, the tokens whose logits give the score.
        projects: True if the vector is the output of the head.
        cut: number of components to keep before vectors are normalised; None: all.
        allow_urls: option ``allow_urls``.
        query, query_cuts: for a reranker, the query and its images, prepared for the model.
        adapter: id of the adapter in the core; 0: none. Not part of cached plans.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    prompt: str
    generation_prompt: bool
    max_tokens: int
    truncate: bool
    allow_ids: bool
    layers: int
    values: int
    score_tokens: tuple[int, ...]
    projects: bool
    cut: int | None
    allow_urls: bool
    query: Parts | None = None
    query_cuts: tuple[TiledImage, ...] = ()
    adapter: int = 0


def plan(entry: Entry, options: Any) -> MixedPlan:
    """Return the plan for the options of a request to a vision model.

    Raises:
        InvalidArgument: an option is invalid for this model, or the model has no adapter of the name.
        WrongCapability: the model is a reranker and the request is for vectors, or the reverse.
    """
    found = plan_of(entry, options, (options.dimensions, options.normalize, getattr(options, "truncate", True),
                                     getattr(options, "parse_special", False), getattr(options, "allow_urls", False),
                                     getattr(options, "allow_token_ids", True)), _make_plan)
    name = getattr(options, "adapter", None)
    return found if name is None else replace(found, adapter=entry.setup.adapter_id(name))


def _make_plan(entry: Entry, options: Any) -> MixedPlan:
    """Validate the options and build a plan; :func:`plan_of` caches it."""
    description = entry.describe()
    settings, spec = description.embedding, description.spec
    assert settings is not None, "the caller has checked the capability"
    result = getattr(options, "result", "vectors")
    if result not in settings.outputs:
        error = embedding.wrong_output(settings, result, entry.key)
        error.wanted = result
        raise error
    if getattr(options, "parse_special", False):
        refuse("parse_special", True, "False for this model, whose chat template writes the control tokens",
               key=entry.key)
    width = settings.output_size
    dimensions = None if options.dimensions is None else \
        embedding.dimensions_of(options.dimensions, width, settings, entry.key)
    normalize = settings.normalize if options.normalize is None else options.normalize
    layers = spec.kv[f"{spec.architecture}.block_count"]
    assert isinstance(layers, int)
    tokens, projects = settings.score_tokens, settings.pooling == ("mean",)
    return MixedPlan(
        entry=entry, registry=entry.pool.registry, core_key=entry.core_key(options.compute), dimensions=0,
        width=dimensions or settings.truncate_dim or width, normalize=int(normalize), null=options.on_error == "null",
        precision=options.precision, tokenizer=entry.tokenizer(), template=entry.template(),
        prompt=embedding.prompt_of(options, settings, entry.key) if hasattr(options, "prompt") else
        settings.prompts.get(settings.default_prompt_name or "", ""),
        generation_prompt=bool(settings.answering), max_tokens=settings.max_tokens,
        truncate=getattr(options, "truncate", True), allow_ids=getattr(options, "allow_token_ids", True),
        layers=layers, values=max(tokens) + 1 if tokens else width if projects else settings.hidden_size,
        score_tokens=tokens, projects=projects, cut=dimensions, allow_urls=getattr(options, "allow_urls", False))


def with_query(plan: MixedPlan, given: Any, call: Call) -> MixedPlan:
    """Return the plan of one request for a ranking: the cached plan of its options, with its query."""
    query = parts_of(given, "query")
    cuts = vision.read_images(plan.entry, query.images, plan.allow_urls, call.deadline)
    return replace(plan, query=query, query_cuts=tuple(cuts))


# ---- vision models: requests -----------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class MixedPack:
    """An input in the form that the core accepts; its token ids and images. ``faults``: as those of other packs."""

    ids: NDArray[np.int32]
    images: Images | None = None
    faults: tuple[tuple[int, MpoolError], ...] = ()
    count: int = 1


def pack(plan: MixedPlan, inputs: list[Any], start: int, single: bool, call: Call) -> MixedPack:
    """Render and tokenize an input, and prepare its images. ``inputs`` has one input.

    Raises:
        MpoolError: the input is invalid, too long, or an image cannot be read, and ``plan.null`` is False.
    """
    name = "documents" if plan.query is not None else "inputs"
    try:
        with native_calls.limited(call.deadline):
            return _pack(plan, inputs[0], name if single else f"{name}[{start}]", start, call)
    except MpoolError as error:
        error.key = error.key or plan.entry.key
        if not plan.null or image_embedding.of_request(error, call):
            raise
        return MixedPack(np.empty(0, np.int32), None, ((0, error),))


def _pack(plan: MixedPlan, given: Any, name: str, start: int, call: Call) -> MixedPack:
    if plan.query is None and embedding.are_token_ids([given]):
        ids = embedding.pack_ids(plan, [given], start).ids
        vision.check_raw(plan.entry, ids, name, 'Pass images as {"image": ...}')
        return MixedPack(ids)
    parts = parts_of(given, name)
    if plan.null and not parts.images and not parts.text:
        raise InvalidArgument(param=name, got="an empty text", allowed=_ALLOWED)
    cuts = [*plan.query_cuts, *vision.read_images(plan.entry, parts.images, plan.allow_urls, call.deadline)]
    render = partial(_rendered, plan, deadline=call.deadline)
    ids, images = render(parts.content, cuts)
    if len(ids) <= plan.max_tokens:
        return MixedPack(ids, images)
    if not plan.truncate:
        raise embedding.too_long(name, len(ids), plan)
    suffix = _suffix(plan, render)
    kept, last = plan.max_tokens - len(suffix), 0 if images is None else int(images.runs[-3:-1].sum())
    if kept <= last:
        raise ContextOverflow(f"`{name}` has {len(ids)} tokens, the model accepts at most {plan.max_tokens}, and "
                              "truncation removes no images", tokens=len(ids), limit=plan.max_tokens, param=name,
                              hint="Pass fewer or smaller images", key=plan.entry.key)
    return MixedPack(np.concatenate([ids[:kept], suffix]), images)


def _rendered(plan: MixedPlan, content: list[dict[str, Any]], cuts: list[TiledImage],
              deadline: float | None) -> tuple[NDArray[np.int32], Images | None]:
    """Return the token ids of the prompt for the content of an input, and its images."""
    messages: list[dict[str, Any]] = []
    if plan.prompt:
        messages.append({"role": "system", "content": [{"type": "text", "text": plan.prompt}]})
    if plan.query is not None:
        messages += [{"role": "query", "content": plan.query.content}, {"role": "document", "content": content}]
    else:
        messages.append({"role": "user", "content": content})
    prompt, images = chat_prompt.place_images(plan.entry, messages, cuts, deadline, probe=False,
                                              check_context=False, add_generation_prompt=plan.generation_prompt)
    suffix = np.array(plan.tokenizer.suffix_ids, np.int32)  # as processors of transformers add it to a rendered prompt
    return np.concatenate([prompt.ids, suffix]), images


def _suffix(plan: MixedPlan, render: Callable[..., Any]) -> NDArray[np.int32]:
    """Return the tokens after an input, which truncation keeps."""
    ends = [render([{"type": "text", "text": text}], list(plan.query_cuts))[0].tolist() for text in ("0", "a")]
    return np.array(embedding.common_end(*ends), np.int32)


def _valid(pack: MixedPack) -> int:
    return 0 if pack.faults else 1


def _start(plan: MixedPlan, pack: MixedPack, *, dimensions: int, normalize: int, tolerant: bool,
           **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_text(
        plan.core_key, pack.ids, **_SAMPLING, vision=True, images=None if pack.images is None else pack.images.arrays(),
        adapter=plan.adapter, capture_values=plan.values, capture_records=plan.layers + 3, **keywords)


def _compute(plan: MixedPlan, pack: MixedPack, **keywords: Any) -> NDArray[np.float32]:
    ticket = _start(plan, pack, **keywords)
    try:
        ticket.wait()
    except BaseException:
        ticket.cancel()
        raise
    return _result(plan, ticket)


def _result(plan: MixedPlan, ticket: _core.Ticket) -> NDArray[np.float32]:
    """Return the vector or score of a finished ticket, float32 ``(1, width)``, from the captured values of its last
    token: the records of the embedding, of each layer and of the final norm, then the logits."""
    ticket.check()
    data, layers, hidden, _, _ = ticket.capture()
    kept = min(plan.values, hidden)
    end = (layers + 2) * kept
    if plan.score_tokens:
        yes, *no = data[0, end:][list(plan.score_tokens)]
        return np.array([[yes - no[0] if no else yes]], np.float32)
    vector = (data[0, end:] if plan.projects else data[0, end - kept:end])[:plan.cut].astype(np.float64)
    if plan.normalize:
        length = float(np.sqrt(np.add.accumulate(vector * vector)[-1]))
        vector = vector / max(length, 1e-12)
    return vector[None, :plan.width].astype(np.float32)


def _halves(pack: MixedPack) -> tuple[MixedPack, ...]:
    return ()


def _heavy(plan: MixedPlan, inputs: list[Any]) -> bool:
    return True  # the chat template is rendered by another process


def _tokens(pack: MixedPack) -> int:
    return len(pack.ids)


INPUTS = Kind("input", pack, _valid, _compute, _start, _halves, _heavy, _tokens, native_calls.IMAGE_REQUESTS,
              _result, True)


def slices(inputs: list[Any]) -> list[tuple[int, list[Any]]]:
    """Cut a list of inputs into slices of one input; returns the index of each, and the list with it."""
    return [(at, [one]) for at, one in enumerate(inputs)]


def request(plan: MixedPlan, inputs: list[Any], single: bool, progress: Any, call: Call,
            finish: Callable[[Any], Any]) -> VectorRequest:
    """Return the request for a list of inputs; arguments are those of :class:`VectorRequest`."""
    return VectorRequest(INPUTS, plan, inputs, slices, single, progress, call, finish)


def iter_request(plan: MixedPlan, items: Any, batch_size: int | None, bar: Bar, call: Call) -> IterRequest:
    """Return the request for the vectors of an iterable of inputs."""
    return IterRequest(INPUTS, plan, items, Cutter(1, 1), batch_size, bar, call)


# ---- models with two encoders ----------------------------------------------------------------------------------------

def split(inputs: list[Any], single: bool, key: str, null: bool) -> tuple[dict[int, Any], dict[int, NamedImage]]:
    """Return the inputs that are texts and those that are images, by their indices.

    Args:
        inputs: the inputs.
        single: True if the input is the whole request and not in a list.
        key: key of the model, for errors.
        null: True if an invalid input is no error: it stays as it is, so that packing it gives a row of NaN.

    Raises:
        InvalidArgument: an input is invalid, or has several texts and images, and ``null`` is False or
            the input is the whole request.
    """
    texts: dict[int, Any] = {}
    images: dict[int, NamedImage] = {}
    for at, one in enumerate(inputs):
        name = "inputs" if single else f"inputs[{at}]"
        try:
            parts = parts_of(one, name)
            if len(parts.content) > 1:
                raise InvalidArgument(param=name, got=f"{len(parts.content)} texts and images", key=key,
                                      allowed="one text or one image, which this model embeds",
                                      hint="Pass several inputs, or use a model such as Qwen3-VL-Embedding")
        except MpoolError:
            if single or not null:
                raise
            if are_images(inputs):  # the model may have no encoder of texts
                images[at] = NamedImage(one, name)
            else:
                texts[at] = one
            continue
        if parts.images:
            images[at] = parts.images[0]
        else:
            texts[at] = parts.text
    return texts, images


@dataclass(slots=True)
class SplitRequest:
    """A request whose texts and images different encoders embed.

    Attributes:
        plan: plan of the first of the requests, which names the model.
        requests: request of the texts, and request of the images.
        places: index in the result of each of their rows.
        finish: function from all rows to the result that the caller gets.
    """

    plan: VectorPlan
    requests: list[VectorRequest]
    places: list[int]
    finish: Callable[[Any], Any]

    def steps(self) -> Steps:
        """Return the generator. Its result is a pair: the caller's result and the number of prompt tokens."""
        rows, tokens = [], 0
        for one in self.requests:
            found, count = yield from one.steps()
            rows.append(found)
            tokens += count
        return self._joined(np.concatenate(rows)), tokens

    def _joined(self, rows: NDArray[Any]) -> Any:
        ordered = np.empty_like(rows)
        ordered[self.places] = rows
        return self.finish(ordered)

    def job(self, capability: str, again: Callable[[], Any], running: TrackedRequest) -> Job:
        """Submit the request and return its handle. ``again`` is not used."""
        return SeveralJob(capability, self.requests, running, lambda parts: self._joined(np.concatenate(parts)))


def split_request(pool: Host, entry: Entry, inputs: list[Any], single: bool, options: EmbedOptions, call: Call,
                  finish: Callable[[Any], Any]) -> SplitRequest:
    """Return the request for texts and images to a model with an encoder for each, such as CLIP.

    Raises:
        WrongCapability: the model embeds no images.
    """
    texts, images = split(inputs, single, entry.key, options.on_error == "null")
    options = replace(options, precision="float32")
    found = []
    if texts:
        found.append(VectorRequest(embedding.TEXTS, embedding.plan(entry, options), list(texts.values()),
                                   embedding.slices, False, False, call, lambda rows: rows))
    if images:
        own = ImageOptions(**{one.name: getattr(options, one.name) for one in fields(ImageOptions)})
        plan = image_embedding.plan(pool._find(entry.main, "image_embedding"), own)
        found.append(VectorRequest(image_embedding.IMAGES, plan, list(images.values()), image_embedding.slices, False,
                                   False, call, lambda rows: rows))
    return SplitRequest(found[0].plan, found, [*texts, *images], finish)
