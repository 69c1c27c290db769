"""The outputs of text encoders: one row per value of ``output``, read by the API, the command line and Ray."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from .options import (
    AllOptions,
    ClassifyOptions,
    ClassifyTokensOptions,
    EmbedOptions,
    SparseOptions,
    TokenOptions,
)


@dataclass(frozen=True)
class TextOutput:
    """An output of a text encoder.

    Attributes:
        function: name of the function of :mod:`mpool` that computes it.
        options: options of the function.
        module_name: module of this folder that computes it for :func:`mpool.embed_iter`, with four functions:
            ``check_items(items, null)`` checks the items of a list before the model is known,
            ``iter_check(options, most)`` validates options without the model, ``iter_plan(entry, options, checked)``
            returns the plan, and ``iter_request(plan, items, batch_size, bar, options, checked, call)`` the request;
            ``checked`` is the result of ``iter_check``.
        purpose: what a model with this output does, for ``mpool show``.
        needs: what the model must be, for a function without a default model; None: the model is optional.
        token_vectors: True if the result may have a vector per token, so that callers take few texts at a time.
    """

    function: str
    options: Any
    module_name: str
    purpose: str
    needs: str | None = None
    token_vectors: bool = False

    @property
    def option_names(self) -> frozenset[str]:
        """Names of the options of the function."""
        return frozenset(one.name for one in fields(self.options))

    def module(self) -> ModuleType:
        """Import the module that computes the output."""
        return importlib.import_module(f".{self.module_name}", __package__)


#: Value of ``output`` -> the output. The names are those of :data:`mpool.tasks.options.ITERATED`.
OUTPUTS = {
    "dense": TextOutput("embed", EmbedOptions, "text_embedding", "embeds texts"),
    "sparse": TextOutput("embed_sparse", SparseOptions, "outputs", "computes sparse vectors of texts"),
    "tokens": TextOutput("embed_tokens", TokenOptions, "outputs", "computes a vector per token", token_vectors=True),
    "all": TextOutput("embed_all", AllOptions, "outputs", "computes all of these", token_vectors=True),
    "labels": TextOutput("classify", ClassifyOptions, "classification", "classifies texts", "a sequence classifier"),
    "spans": TextOutput("classify_tokens", ClassifyTokensOptions, "token_classification", "labels tokens",
                        "a token classifier"),
}


__all__ = ["OUTPUTS", "TextOutput"]
