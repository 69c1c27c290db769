"""``SentenceTransformer`` and ``CrossEncoder`` with the interface of sentence-transformers, computed by mpool.

The classes need neither sentence-transformers nor torch. Methods return NumPy arrays; ``convert_to_tensor=True`` and
``convert_to_numpy=False`` return tensors and need torch. Vectors are computed in float32 by default, as
sentence-transformers does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from ..api.functions import pool_of
from ..checks import integer, is_table, items_of, missing_attribute, one_of, refuse
from ..errors import InvalidArgument, Unsupported, WrongCapability
from ..model import Model
from ..names import COMPUTE, SIMILARITIES
from ..records import logger
from ..runtime import overrides
from ..runtime.swapping import for_current
from ..search import similarity as _similarity
from ..tasks import options as _options
from ..tasks import requests
from ..tasks import text_embedding as embedding
from ..tasks.options import PRECISIONS, EmbedOptions
from ..tasks.rerank import function_of
from ..tasks.text_embedding import TASKS
from ..tasks.vectors import activate, quantize
from . import _requests
from . import sentence_transformers_util as util
from ._tensors import array_of, has_tensor, load_torch, tensor_of

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
#: Output mask of the core for the ``token_embeddings`` of :meth:`SentenceTransformer.encode`: ``MP_EMBED_TOKENS``.
_HIDDEN_STATES = 2
_log = logger("mpool")
F = TypeVar("F", bound=Callable[..., Any])


def _renamed(method: F) -> F:
    """Accept former arguments, as sentence-transformers does: ``sentences`` for ``inputs``, ``activation_fct`` for
    ``activation_fn``, and ``num_workers``, which has no effect."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        options.pop("num_workers", None)
        for former, name in (("sentences", "inputs"), ("activation_fct", "activation_fn")):
            if former in options:
                options[name] = options.pop(former)
        return method(self, *args, **options)

    return call  # type: ignore[return-value]


def _named_sentences(method: F) -> F:
    """Accept ``inputs``, the name of the texts in other methods, for ``sentences``."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if "inputs" in options:
            options["sentences"] = options.pop("inputs")
        return method(self, *args, **options)

    return call  # type: ignore[return-value]


#: Hint in place of the modules of a model of sentence-transformers.
_MODULES = ("The core of mpool computes the model. Use `max_seq_length` and `tokenize` of the object itself; "
            "output_value=\"token_embeddings\" returns the vectors before pooling")


class _Device(str):
    """A name of a device that equals a ``torch.device`` of this name."""

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return str(self) != str(other)

    __hash__ = str.__hash__

    @property
    def type(self) -> str:
        """Name of the device without its index."""
        return str(self)


class _ModelCard:
    """The part of a model card that the evaluators of sentence-transformers call."""

    def set_evaluation_metrics(self, *args: Any, **options: Any) -> None:
        """Do nothing: mpool writes no model cards."""


class _Base:
    """Base of both classes: the model and the arguments that mpool does not need.

    Attributes:
        model_card_data: takes the metrics of evaluators, and drops them.
    """

    _scores: ClassVar[bool]  # True: the model must be a reranker or classifier
    model_card_data: ClassVar[_ModelCard] = _ModelCard()

    def __init__(self, model_name_or_path: str | os.PathLike[str] | Model, rest: tuple[Any, ...], device: Any,
                 compute: str, options: Mapping[str, Any]) -> None:
        if rest:  # as in sentence-transformers 6; 5 takes modules second and device third
            raise TypeError(f"{type(self).__name__}() takes one positional argument, the model, got {1 + len(rest)}. "
                            "Pass the others by name, such as device='cpu'")
        _check_device(device)
        one_of("compute", compute, COMPUTE)
        for name, value in options.items():
            if name not in _CONSTRUCTOR:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
            unset = value is None or value is False or isinstance(value, Mapping) and not value
            if not unset and (name, value) not in (("backend", "torch"), ("num_labels", 1)):
                raise Unsupported(f"`{name}` is not available here", param=name, hint=_CONSTRUCTOR[name])
        pool = pool_of(model_name_or_path)
        self._model = pool.get(model_name_or_path, "text_embedding").with_compute(compute)
        settings = self._settings()
        if ("vectors" in settings.outputs) == self._scores:
            raise WrongCapability(f"is {settings.kind}, not a reranker or classifier" if self._scores else
                                  f"is {settings.kind}, which returns no vectors", key=self._model.key,
                                  hint="Use " + ("SentenceTransformer" if self._scores else "CrossEncoder"))

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

    def __getitem__(self, index: Any) -> Any:
        """Raise Unsupported: the object has no modules of torch."""
        raise Unsupported("the modules of the model are not available here", hint=_MODULES)

    def _description(self) -> Any:
        return self._model.description_of("text_embedding")

    def _settings(self) -> Any:
        return self._description().embedding

    @property
    def device(self) -> str:
        """``"cpu"``, which equals ``torch.device("cpu")``."""
        return _Device("cpu")

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text, or of a pair of texts; longer inputs are truncated."""
        return self._model.context_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        raise Unsupported("`max_seq_length` cannot be set", hint=_CONSTRUCTOR["max_length"])

    def get_max_seq_length(self) -> int:
        """Return :attr:`max_seq_length`."""
        return self.max_seq_length

    def to(self, device: Any) -> Any:
        """Return the object: it computes on the CPU."""
        _check_device(device)
        return self

    def cpu(self) -> Any:
        """Return the object: it computes on the CPU."""
        return self

    def eval(self) -> Any:
        """Return the object: it never trains."""
        return self

    def start_multi_process_pool(self, target_devices: list[str] | None = None) -> dict[str, Any]:
        """Return an empty pool: the threads of this process already use all CPUs and share one copy of the weights."""
        _check_device(target_devices)
        return {"input": None, "output": None, "processes": []}

    @staticmethod
    def stop_multi_process_pool(pool: dict[str, Any]) -> None:
        """Do nothing."""


#: Arguments of the constructors that mpool does not have, and what to do instead.
_CONSTRUCTOR = {
    "modules": "Save the model to a folder and pass its path", "trust_remote_code": "mpool never runs code of models",
    "revision": "Write the revision into the reference: owner/name@revision",
    "cache_folder": "Set HF_HOME", "local_files_only": "Set HF_HUB_OFFLINE=1 or PoolConfig(offline=True)",
    "token": "Set HF_TOKEN", "use_auth_token": "Set HF_TOKEN", "model_kwargs": "Pass compute=",
    "tokenizer_kwargs": "Change the files of the tokenizer", "processor_kwargs": "Change the files of the tokenizer",
    "config_kwargs": "Change the files of the model", "model_card_data": "mpool does not train models",
    "backend": "mpool is the backend", "num_labels": "The files of the model say how many labels it has",
    "keep_in_fp32_modules": "Pass compute=\"float32\"",
    "max_length": "Register the model: mpool.register(name, model, max_length=...)",
    "prompts": "Pass prompt= to predict",
    "default_prompt_name": "Pass prompt_name= to predict",
}


class SentenceTransformer(_Base):
    """A text embedding model with the interface of ``sentence_transformers.SentenceTransformer``.

    Args:
        model_name_or_path: as ``model`` of :func:`mpool.embed`.
        device: None or ``"cpu"``.
        prompts: prompt name -> text, in place of those of the model's files.
        default_prompt_name: name of the prompt for inputs without one.
        similarity_fn_name: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``; None: as the files say.
        truncate_dim: number of leading components to keep; None: as the model's files say, or all.
        compute: compute type, as for :func:`mpool.embed`; ``"auto"`` is faster.
        **options: other arguments of sentence-transformers, which must have their defaults.

    Raises:
        InvalidArgument: an argument is not allowed.
        Unsupported: an argument that mpool does not have is used; the hint says what to do.

    Example:
        >>> from mpool.integrations.sentence_transformers import SentenceTransformer
        >>> SentenceTransformer("all-MiniLM-L6-v2").encode(["A sentence.", "Another one."]).shape
        (2, 384)
    """

    _scores = False

    def __init__(self, model_name_or_path: str | os.PathLike[str] | Model, *rest: Any, device: Any = None,
                 prompts: Mapping[str, str] | None = None, default_prompt_name: str | None = None,
                 similarity_fn_name: str | None = None, truncate_dim: int | None = None, compute: str = "float32",
                 **options: Any) -> None:
        self.truncate_dim = _checked_dim(truncate_dim)
        self.similarity_fn_name = similarity_fn_name
        overrides.check({"prompts": prompts})
        if not isinstance(default_prompt_name, str | None):
            refuse("default_prompt_name", default_prompt_name, "a name in prompts, or None")
        super().__init__(model_name_or_path, rest, device, compute, options)
        settings = self._settings()
        self.prompts: dict[str, str] = {"query": "", "document": "", **settings.prompts, **(prompts or {})}
        self.default_prompt_name = settings.default_prompt_name if default_prompt_name is None else default_prompt_name
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            raise InvalidArgument(param="default_prompt_name", got=self.default_prompt_name,
                                  allowed="one of " + ", ".join(self.prompts))
        if truncate_dim is None:
            self.truncate_dim = settings.truncate_dim
        if similarity_fn_name is None:
            self.similarity_fn_name = settings.similarity

    # ---- embedding -------------------------------------------------------------------------------------------------

    @_renamed
    def encode(self, inputs: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None,
               batch_size: int = 32, show_progress_bar: bool | None = None,
               output_value: Literal["sentence_embedding", "token_embeddings"] | None = "sentence_embedding",
               precision: Precision = "float32", convert_to_numpy: bool = True, convert_to_tensor: bool = False,
               device: Any = None, normalize_embeddings: bool = False, truncate_dim: int | None = None,
               pool: Any = None, chunk_size: int | None = None, **unused: Any) -> Any:
        """Embed texts.

        Args:
            inputs: a text, or a sequence of texts. With a model of texts and images also Pillow images, and dicts with
                ``"text"``, ``"image"`` or both, as for :func:`mpool.embed`.
            prompt_name: name of the prompt that is put before each text; None: the default prompt, if there is one.
            prompt: text that is put before each text, instead of a named prompt.
            batch_size: ignored: mpool packs the texts of all callers.
            show_progress_bar: True: show one; None: if the logger ``mpool`` is at INFO or DEBUG.
            output_value: ``"sentence_embedding"``, or ``"token_embeddings"``: a tensor ``(tokens, width)`` per text,
                before pooling.
            precision: ``"float32"``, ``"int8"``, ``"uint8"``, ``"binary"`` or ``"ubinary"``.
            convert_to_numpy: True: return an array; False: a list of tensors.
            convert_to_tensor: True: return one tensor.
            device, pool, chunk_size: ignored; ``device`` must name CPUs.
            normalize_embeddings: True: scale vectors to length 1.
            truncate_dim: number of leading components to keep; None: as set in the constructor.
            task: ``"query"`` or ``"document"``: use the model's encoder or adapter for it, if it has one. Or the name
                of an adapter in the model's files (jina-embeddings-v3). It chooses no prompt.

        Returns:
            Array ``(n, d)``, or ``(d,)`` for a single text; float32, or int8 or uint8 with another precision. The shape
            of no texts is ``(0,)``.

        Raises:
            InvalidArgument: an argument is not allowed; a ValueError, as in sentence-transformers.
            Unsupported: torch is not installed, but the result is a tensor.
        """
        task = unused.pop("task", None)
        _check_call(batch_size, device, unused)
        cut = _checked_dim(self.truncate_dim if truncate_dim is None else truncate_dim)
        route = self._route(task)
        prompt = self._prompt(prompt, prompt_name)
        if precision is not None and precision not in PRECISIONS:
            raise InvalidArgument(param="precision", got=repr(precision), allowed="one of " + ", ".join(PRECISIONS))
        if output_value not in ("sentence_embedding", "token_embeddings"):
            raise InvalidArgument(param="output_value", got=repr(output_value),
                                  allowed="sentence_embedding or token_embeddings")
        texts, single = _texts_of(inputs)
        if convert_to_tensor or not convert_to_numpy:
            load_torch()  # before the model computes
        if output_value == "token_embeddings":
            found: Any = [tensor_of(rows) for rows in self._token_rows(texts, {"prompt": prompt, **route})]
            return found[0] if single else found
        if not texts:
            rows: Any = np.array([])
        else:
            # all components: the number that the files state is only the default of `truncate_dim`
            rows = self._model.embed(texts, prompt=prompt, dimensions=self._settings().output_size,
                                     max_inputs=len(texts), allow_token_ids=False,
                                     progress=_progress(show_progress_bar), **route)
            rows = rows if cut is None else np.ascontiguousarray(rows[:, :cut])
            if normalize_embeddings:
                rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
            rows = quantize(rows, precision or "float32")
        if convert_to_tensor:
            rows = tensor_of(rows if len(texts) else np.empty(0, dtype=np.float32))
        elif not convert_to_numpy:
            rows = [tensor_of(row) for row in rows]
        return rows[0] if single else rows

    @_renamed
    def encode_query(self, inputs: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None,
                     batch_size: int = 32, show_progress_bar: bool | None = None,
                     output_value: Literal["sentence_embedding", "token_embeddings"] | None = "sentence_embedding",
                     precision: Precision = "float32", convert_to_numpy: bool = True,
                     convert_to_tensor: bool = False, device: Any = None, normalize_embeddings: bool = False,
                     truncate_dim: int | None = None, pool: Any = None, chunk_size: int | None = None,
                     **unused: Any) -> Any:
        """Embed queries: as :meth:`encode`, with the task ``"query"`` and its prompt, which is empty if the model has
        none."""
        if prompt is None and prompt_name is None:
            prompt_name = self._prompt_of("query", "query")
        # pass the texts by position: the `encode` of a subclass may name them `sentences`
        return self.encode(inputs, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size,
                           show_progress_bar=show_progress_bar, output_value=output_value, precision=precision,
                           convert_to_numpy=convert_to_numpy, convert_to_tensor=convert_to_tensor, device=device,
                           normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim, pool=pool,
                           chunk_size=chunk_size, **{"task": "query", **unused})

    @_renamed
    def encode_document(self, inputs: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None,
                        batch_size: int = 32, show_progress_bar: bool | None = None,
                        output_value: Literal["sentence_embedding", "token_embeddings"] | None = "sentence_embedding",
                        precision: Precision = "float32", convert_to_numpy: bool = True,
                        convert_to_tensor: bool = False, device: Any = None, normalize_embeddings: bool = False,
                        truncate_dim: int | None = None, pool: Any = None, chunk_size: int | None = None,
                        **unused: Any) -> Any:
        """Embed documents: as :meth:`encode`, with the task ``"document"`` and its prompt, which is empty if the model
        has none.

        If :attr:`prompts` was replaced and has no ``"document"``, the prompt is ``"passage"`` or ``"corpus"``.
        """
        if prompt is None and prompt_name is None:
            prompt_name = self._prompt_of("document", "document", "passage", "corpus")
        return self.encode(inputs, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size,
                           show_progress_bar=show_progress_bar, output_value=output_value, precision=precision,
                           convert_to_numpy=convert_to_numpy, convert_to_tensor=convert_to_tensor, device=device,
                           normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim, pool=pool,
                           chunk_size=chunk_size, **{"task": "document", **unused})

    def _prompt_of(self, task: str, *names: str) -> str | None:
        """Return the name of the prompt for a task: the first one of ``names`` that exists, or that of the task's
        adapter."""
        found = next((name for name in names if name in self.prompts), None)
        adapter = self._settings().task_adapters.get(task)
        return adapter if adapter in self.prompts and not (found and self.prompts[found]) else found

    def _route(self, task: Any) -> dict[str, Any]:
        """Return the option of :func:`mpool.embed` for a ``task`` of sentence-transformers.

        As in sentence-transformers, a model without routes and adapters ignores the task.
        """
        adapters = self._settings().adapters
        if task is None or isinstance(task, str) and task in TASKS:
            return {"task": task}
        if isinstance(task, str) and task in adapters:
            return {"adapter": task}
        if not isinstance(task, str) or adapters or any(part.task for part in self._description().networks):
            refuse("task", task, "one of " + ", ".join((*TASKS, *adapters)) + " or None", key=self._model.key)
        return {}

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        if prompt is not None:
            if name is not None:
                _log.warning("`prompt` and `prompt_name` are both given: `prompt_name` is ignored")
            return prompt
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            raise InvalidArgument(param="prompt_name", got=name, allowed="one of " + ", ".join(self.prompts))
        return self.prompts[name]

    def _token_rows(self, texts: list[str], given: dict[str, Any]) -> list[NDArray[np.float32]]:
        """Return the last hidden states of each text, float32 ``(tokens, width)``. One model computes all arrays,
        even if the model is replaced meanwhile."""
        options = _options.parse_options(EmbedOptions, "embed", given)
        return for_current(lambda: _Tokens(requests.text_plan(self._model.pool, self._model, options)),
                           lambda request: list(request.rows(texts)))

    @_named_sentences
    def encode_multi_process(self, sentences: Sequence[str], pool: Any, prompt_name: str | None = None,
                             prompt: str | None = None, batch_size: int = 32, chunk_size: int | None = None,
                             show_progress_bar: bool | None = None, precision: Precision = "float32",
                             normalize_embeddings: bool = False, truncate_dim: int | None = None) -> Any:
        """Same as :meth:`encode`, which already uses all CPUs."""
        return self.encode(sentences, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size,
                           show_progress_bar=show_progress_bar, precision=precision,
                           normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim)

    # ---- similarity ------------------------------------------------------------------------------------------------

    @property
    def similarity_fn_name(self) -> str:
        """``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``."""
        return self._metric

    @similarity_fn_name.setter
    def similarity_fn_name(self, value: Any) -> None:
        name = getattr(value, "value", value) or "cosine"
        if name not in SIMILARITIES:
            raise InvalidArgument(param="similarity_fn_name", got=repr(value),
                                  allowed="one of " + ", ".join(SIMILARITIES))
        self._metric: Any = name

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Compute the similarity of every vector of one array to every vector of the other.

        Returns:
            ``(n, m)``: a tensor if an argument is a tensor, else an array.
        """
        return self._compare(embeddings1, embeddings2, False)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Compute the similarity of row i of one array to row i of the other. Returns ``(n,)``, as :meth:`similarity`.
        """
        return self._compare(embeddings1, embeddings2, True)

    def _compare(self, one: Any, other: Any, pairwise: bool) -> Any:
        left, right = (np.atleast_2d(array_of(value)) for value in (one, other))
        found = np.atleast_1d(_similarity(left, right, metric=self._metric, pairwise=pairwise))
        return tensor_of(found) if has_tensor(one) or has_tensor(other) else found

    # ---- facts -----------------------------------------------------------------------------------------------------

    def get_sentence_embedding_dimension(self) -> int:
        """Return the number of components of a vector."""
        width: int = self._settings().output_size
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    get_embedding_dimension = get_sentence_embedding_dimension

    @contextlib.contextmanager
    def truncate_sentence_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Set :attr:`truncate_dim` for the duration of a ``with`` block."""
        before, self.truncate_dim = self.truncate_dim, _checked_dim(truncate_dim)
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_embeddings = truncate_sentence_embeddings

    def tokenize(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask``, tensors int64 ``(n, tokens)``, padded with 0."""
        most = self.max_seq_length
        rows = [self._model.tokenize(text) for text in texts]
        rows = [ids if len(ids) <= most else [*ids[:most - 1], ids[-1]] for ids in rows]
        width = max(map(len, rows), default=0)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, :len(row)], mask[at, :len(row)] = row, 1
        return {"input_ids": tensor_of(ids), "attention_mask": tensor_of(mask)}

    def __repr__(self) -> str:
        return f"SentenceTransformer({self._model.key!r})"


class CrossEncoder(_Base):
    """A reranker or classifier of pairs with the interface of ``sentence_transformers.CrossEncoder``.

    Args:
        model_name_or_path: as ``model`` of :func:`mpool.rerank`.
        device: None or ``"cpu"``.
        compute: compute type, as for :func:`mpool.rerank`; ``"auto"`` is faster.
        activation_fn: function of a tensor of logits in place of the activation that the model's files name.
        **options: other arguments of sentence-transformers, which must have their defaults.

    Raises:
        WrongCapability: the model is an embedding model.
        Unsupported: an argument that mpool does not have is used; the hint says what to do.
    """

    _scores = True

    def __init__(self, model_name_or_path: str | os.PathLike[str] | Model, *rest: Any, device: Any = None,
                 compute: str = "float32", activation_fn: Any = None, **options: Any) -> None:
        length = options.pop("max_length", None)
        former = options.pop("default_activation_function", None)
        self.activation_fn = former if activation_fn is None else activation_fn
        if self.activation_fn is not None and not callable(self.activation_fn):
            refuse("activation_fn", self.activation_fn, "a function of a tensor, such as torch.nn.Identity(), or None")
        if length is not None and not (integer(length) or 0) > 0:
            refuse("max_length", length, "the maximum length of the model, or None", hint=_CONSTRUCTOR["max_length"])
        super().__init__(model_name_or_path, rest, device, compute, options)
        if length not in (None, self._model.context_length):
            raise Unsupported(f"`max_length` must be that of the model, {self._model.context_length}, or None, "
                              f"got {length}", hint=_CONSTRUCTOR["max_length"])

    max_length = _Base.max_seq_length

    @property
    def num_labels(self) -> int:
        """Number of scores of a pair; 1 for a reranker."""
        classifier = self._settings().classifier
        return len(classifier.labels) if classifier is not None else 1

    @_renamed
    def predict(self, inputs: Any, prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32,
                show_progress_bar: bool | None = None, activation_fn: Any = None, apply_softmax: bool | None = False,
                convert_to_numpy: bool = True, convert_to_tensor: bool = False, device: Any = None, pool: Any = None,
                chunk_size: int | None = None, **unused: Any) -> Any:
        """Score pairs of texts.

        Args:
            inputs: a pair of texts, or a sequence of pairs.
            prompt_name, prompt: as for :func:`mpool.rerank`.
            batch_size, show_progress_bar, pool, chunk_size: ignored.
            activation_fn: function of a tensor of logits ``(n, labels)``, such as ``torch.nn.Identity()``, in place of
                the activation of the constructor or of the model's files.
            apply_softmax: True: return the softmax of each row, only for models with several labels; else logits.
            convert_to_numpy: True: return an array; False: a list of tensors.
            convert_to_tensor: True: return one tensor.
            device: ignored; must name CPUs.

        Returns:
            Scores, float32 ``(n,)``, or one number for a single pair. For a model with several labels, ``(n, labels)``,
            or ``(labels,)`` for a single pair.

        Raises:
            InvalidArgument: an argument is not allowed, or an input is not a pair of texts.
        """
        _check_call(batch_size, device, unused)
        pairs, single = _pairs_of(inputs)
        if convert_to_tensor or not convert_to_numpy:
            load_torch()  # before the model computes
        scores = self._scores_of(self._logits(pairs, prompt, prompt_name), activation_fn, apply_softmax)
        found: Any = tensor_of(scores) if convert_to_tensor else scores if convert_to_numpy \
            else [tensor_of(score) for score in scores]
        return found[0] if single else found

    @_renamed
    def rank(self, query: str, documents: Sequence[str], top_k: int | None = None, return_documents: bool = False,
             prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32,
             show_progress_bar: bool | None = None, activation_fn: Any = None, device: Any = None, pool: Any = None,
             chunk_size: int | None = None) -> list[dict[str, Any]]:
        """Rank documents by their relevance to a query, the best first.

        Args:
            query, documents: texts.
            top_k: number of documents to return; None: all.
            return_documents: True: the results have a ``"text"``.
            prompt_name, prompt, batch_size, show_progress_bar, activation_fn, device, pool, chunk_size: as for
                :meth:`predict`.

        Returns:
            Dicts with ``"corpus_id"``, ``"score"`` and, if asked for, ``"text"``.

        Raises:
            WrongCapability: the model has several labels.
        """
        if not self._settings().scores:
            raise WrongCapability(f"is {self._settings().kind}: its files do not say which label means relevance",
                                  key=self._model.key, hint="Use predict, and sort by the score of a label")
        _check_call(batch_size, device, {})
        count = integer(top_k)
        if top_k is not None and (count is None or count < 0):
            refuse("top_k", top_k, "an integer of 0 or more, or None")
        texts = list(items_of("documents", documents, "a sequence of texts"))
        pairs, _ = _pairs_of([(query, text) for text in texts])
        logits = self._logits(pairs, prompt, prompt_name)
        scores = self._scores_of(logits, activation_fn, False).tolist()
        # by logits if the files name the activation: scores of different logits are equal where a sigmoid saturates
        by = logits[:, 0].tolist() if activation_fn is None and self.activation_fn is None else scores
        order = sorted(range(len(texts)), key=lambda at: -by[at])[:top_k]
        return [{"corpus_id": at, "score": scores[at], **({"text": texts[at]} if return_documents else {})}
                for at in order]

    def _logits(self, pairs: list[tuple[str, str]], prompt: str | None, prompt_name: str | None) -> NDArray[np.float32]:
        """Return the logits of pairs, float32 ``(n, labels)``."""
        if self._settings().scores:
            found = np.empty((len(pairs), 1), dtype=np.float32)
            by_query: dict[str, list[int]] = {}
            for at, pair in enumerate(pairs):
                by_query.setdefault(pair[0], []).append(at)
            for query, places in by_query.items():
                found[places, 0] = _requests.scores(self._model, query, [pairs[at][1] for at in places],
                                                    {"prompt": prompt, "prompt_name": prompt_name}).logits
            return found
        for name, value in (("prompt", prompt), ("prompt_name", prompt_name)):
            if value is not None:
                raise InvalidArgument(param=name, got=repr(value), allowed="None for a classifier")
        return np.concatenate([self._model.classify(pairs[start:start + _requests.SLICE],
                                                    function_to_apply="none").scores
                               for start in range(0, max(len(pairs), 1), _requests.SLICE)])

    def _scores_of(self, logits: NDArray[np.float32], activation_fn: Any, apply_softmax: bool | None) -> NDArray[Any]:
        """Return the scores of logits: ``(n,)`` for a model with one score, else ``(n, labels)``."""
        settings, given = self._settings(), self.activation_fn if activation_fn is None else activation_fn
        if apply_softmax and settings.scores:
            refuse("apply_softmax", apply_softmax, "False for a model with one score",
                   hint="The files of the model name the activation of its scores")
        if given is None:
            found = activate(logits, function_of(settings)) if settings.scores else logits
        else:
            if not callable(given):
                refuse("activation_fn", given, "a function of a tensor, such as torch.nn.Identity(), or None")
            found = np.asarray(array_of(given(tensor_of(logits))), dtype=np.float32)
        if apply_softmax:
            found = activate(found, "softmax")
        return found[:, 0] if settings.scores and found.ndim == 2 else found

    def __repr__(self) -> str:
        return f"CrossEncoder({self._model.key!r})"


@dataclass
class _Tokens:
    """A request for the last hidden states of texts."""

    plan: embedding.Plan

    def rows(self, texts: list[str]) -> Iterator[NDArray[np.float32]]:
        plan, call = self.plan, _options.PLAIN
        for start, part in embedding.slices(texts):
            pack = embedding.packed(plan, part, start, False, call)
            ticket = plan.registry.submit_embed(plan.core_key, pack.ids, pack.offsets, adapter=plan.adapter,
                                                outputs=_HIDDEN_STATES, **call.keywords(plan.entry))
            ticket.wait()
            rows = ticket.states()
            for begin, end in zip(pack.offsets, pack.offsets[1:]):
                yield rows[begin:end].copy()


def _pairs_of(inputs: Any) -> tuple[list[tuple[str, str]], bool]:
    """Return the pairs of ``predict``, and True if the argument is one pair instead of a sequence.

    Raises:
        InvalidArgument: the argument is neither.
    """
    allowed = "a pair of texts, or a sequence of pairs"
    if is_table(inputs):
        raise InvalidArgument(param="inputs", got=f"a table ({type(inputs).__name__})", allowed=allowed,
                              hint="Pass list(zip(table['query'], table['document']))")
    if isinstance(inputs, str):
        refuse("inputs", inputs, allowed)
    rows = inputs.tolist() if isinstance(inputs, np.ndarray) and inputs.ndim == 2 else inputs
    given = list(items_of("inputs", rows, allowed))
    single = bool(given) and isinstance(given[0], str)
    found: list[tuple[str, str]] = []
    for at, pair in enumerate([given] if single else given):
        pair = pair.tolist() if isinstance(pair, np.ndarray) else pair
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InvalidArgument(param="inputs", got=f"an item that is not a pair of texts at index {at}",
                                  allowed=allowed)
        found.append((pair[0], pair[1]))
    return found, single


def _checked_dim(value: Any) -> int | None:
    """Return a ``truncate_dim`` as an integer.

    Raises:
        InvalidArgument: it is not an integer of 1 or more, or None.
    """
    number = integer(value)
    if value is not None and (number is None or number < 1):
        refuse("truncate_dim", value, "an integer of 1 or more, or None")
    return number


def _check_device(device: Any) -> None:
    for one in device if isinstance(device, (list, tuple)) else (device,):
        if one is not None and not str(one).startswith("cpu"):
            raise InvalidArgument(param="device", got=str(one), allowed="None or cpu: mpool computes on CPUs")


def _texts_of(inputs: Any) -> tuple[list[Any], bool]:
    """Return the texts of ``encode``, and True if the argument is one text instead of a sequence.

    Raises:
        InvalidArgument: the argument is neither. The pool checks each text.
    """
    if isinstance(inputs, (str, Mapping)) or _is_image(inputs):
        return [_text_of(inputs)], True
    items = items_of("inputs", inputs, "a text, or a sequence of texts")
    return [_text_of(one) for one in items], False


def _text_of(value: Any) -> Any:
    """Return the text of ``{"text": ...}``, ``{"image": ...}`` for a Pillow image, or any other value unchanged."""
    if isinstance(value, Mapping):
        return value["text"] if set(value) == {"text"} and isinstance(value["text"], str) else value
    return {"image": value} if _is_image(value) else value


def _is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")


def _check_call(batch_size: Any, device: Any, unused: Mapping[str, Any]) -> None:
    _check_device(device)
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size <= 0:
        raise InvalidArgument(param="batch_size", got=repr(batch_size), allowed="a positive integer")
    if unused:
        name = next(iter(unused))
        raise InvalidArgument(f"`{name}` is not an argument of this method", param=name,
                              hint="Leave it out: further arguments are for models that mpool does not have")


def _progress(show: bool | None) -> bool:
    return _log.getEffectiveLevel() in (logging.INFO, logging.DEBUG) if show is None else bool(show)


__all__ = ["CrossEncoder", "SentenceTransformer", "util"]
