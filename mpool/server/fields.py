"""Types of request fields that several protocols share, and the sampling options that have the library's names."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

#: Name of a model, or ``MODEL:ADAPTER``: two names of 128 characters at most.
Name = Annotated[str, Meta(min_length=1, max_length=257)]
Text = Annotated[str, Meta(min_length=1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Maximum number of tokens of a completion, or -1 for no limit but those of the server and the model, as clients of
#: llama.cpp send it. :func:`mpool.server.sampling.sampling` refuses 0.
MaxTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Stops = Annotated[list[Text], Meta(max_length=64)]
#: Maximum number of tokens of each image, for models that have a choice.
ImageTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Fields(Struct, forbid_unknown_fields=True):
    """Base of every struct of a request. :func:`mpool.server.bodies.parse` decides what happens to unknown fields."""


class SamplingFields(Fields, kw_only=True):
    """Sampling options under the names of the library. A null selects the model's default. With ``top_p`` 0, only the
    most likely token is sampled."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=4096)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None


class ConstraintFields(SamplingFields, kw_only=True):
    """Sampling options, and the fields that constrain a completion; a request has one of these.

    ``response_format`` is text, json_object, json_schema, or (an extension) regex or grammar. ``grammar`` and
    ``json_schema`` of llama.cpp's server, and ``structured_outputs`` and ``guided_*`` of vLLM, constrain the completion
    as ``response_format`` does.
    """

    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[Text], Meta(min_length=1, max_length=1000)] | None = None
    guided_grammar: str | None = None


__all__ = ["ConstraintFields", "Fields", "ImageTokens", "MaxTokens", "Name", "SamplingFields", "Stops", "Text", "Token"]
