"""Fields of the options of all verbs (mpool/tasks/options.py): which ones are part of a cached plan, and choices."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, replace
from typing import Any

import pytest

from mpool.tasks import options
from mpool.tasks.verbs import TOKEN_SCORES, VERBS

ALL = {verb.name: verb.options for verb in (*VERBS.values(), TOKEN_SCORES)}
PLANNED = {name: kind for name, kind in ALL.items() if any(not field.compare for field in fields(kind))
           and not issubclass(kind, options.SamplingOptions)}
#: Verb -> options that do not change its plan. They limit or report the request, or change its result afterwards.
#: Adapters come and go, so the plan does not contain them.
OUTSIDE = {
    "embed": "progress adapter max_inputs",
    "embed_iter": "progress adapter output batch_size max_active labels template multi_label function_to_apply top_k "
                  "aggregation ignore_labels stride",
    "embed_sparse": "progress adapter max_inputs max_active",
    "embed_tokens": "progress adapter max_inputs",
    "embed_all": "progress adapter max_inputs",
    "embed_image": "progress max_inputs",
    "rerank": "top_k function_to_apply adapter",
    "classify": "labels template multi_label function_to_apply top_k adapter max_inputs progress",
    "classify_tokens": "aggregation ignore_labels stride adapter max_inputs progress",
    TOKEN_SCORES.name: "function_to_apply adapter",
}


def values_of(kind: Any) -> set[Any] | None:
    """Return the values of a type whose values can be listed."""
    if typing.get_origin(kind) is typing.Literal:
        return set(typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [values_of(part) for part in typing.get_args(kind)]
        return None if None in found else set().union(*(part for part in found if part is not None))
    return {bool: {True, False}, type(None): {None}}.get(kind)


@pytest.mark.parametrize("verb", PLANNED)
def test_options_of_a_plan(verb: str) -> None:
    """Requests that differ in another option than these never share a plan: its result would be that of the other
    request. Requests that differ only in these share one, which is why the second one is as fast as the hundredth."""
    plain = PLANNED[verb]()
    for field in fields(plain):
        other = replace(plain, **{field.name: "another value"})
        assert (other == plain, hash(other) == hash(plain)) == ((field.name in OUTSIDE[verb].split(),) * 2), field.name
    assert set(OUTSIDE[verb].split()) <= {field.name for field in fields(plain)}


def test_every_verb_with_a_plan_is_listed() -> None:
    """All verbs but those that generate compute vectors or logits by a plan."""
    assert set(PLANNED) == set(OUTSIDE)


@pytest.mark.parametrize("verb", ALL)
def test_choices_are_the_values_of_the_type(verb: str) -> None:
    """Choices are exactly the values of the option's type, each once, and the default is among them."""
    hints = typing.get_type_hints(ALL[verb], {**vars(options), "Capture": object, "CaptureJob": object})
    for field in fields(ALL[verb]):
        choices, values = field.metadata["choices"], values_of(hints[field.name])
        if choices is not None:
            assert len(set(choices)) == len(choices) and set(choices) == values, field.name
            assert field.default in choices, field.name
