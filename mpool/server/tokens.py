"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from starlette.responses import Response

from ..errors import InvalidArgument, sentence
from ..host import native_calls
from ..tasks.running import chat_ids
from . import formats
from .errors import Refusal
from .fields import Fields, ImageTokens, Name, Token
from .image_urls import with_images
from .openai.chat import message_of, prompt_end, template_variables, tokens_per_image
from .openai.structs import Message, Messages, turns_of
from .operations import Context, Operation, check_response, encode_checked
from .sampling import image_tokens

if TYPE_CHECKING:
    from .models import ServedModel

#: Bytes of a token id and of the quotes of its text in a response, at most.
_ID_BYTES = 16


class TokenizeRequest(Fields, kw_only=True):
    """A ``prompt``, or ``messages`` for the chat template of the model. Without ``model``, the server uses the only
    model with a tokenizer among those that it was started with, or, if none of these has a tokenizer, among those that
    requests have used. ``add_special_tokens`` adds the tokens that the model expects around a prompt (default true).
    Names of control tokens in texts are plain text. ``chat_template_kwargs`` are variables of the chat template.
    ``image_tokens`` and ``mm_processor_kwargs`` are as for :class:`ChatRequest`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    image_tokens: ImageTokens | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct):
    """Token ids. ``token_strs``: text of each token, with ``return_token_strs``; empty for control tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Fields, kw_only=True):
    """Token ids. ``model`` as for :class:`TokenizeRequest`."""

    model: Name | None = None
    tokens: Annotated[list[Token], Meta(max_length=1_000_000)]


class DetokenizeResponse(Struct):
    """The text of the tokens, with the names of control tokens."""

    prompt: str


async def tokenize(context: Context, body: TokenizeRequest) -> Response:
    """Convert a prompt or a conversation to token ids."""
    served = await _model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal("invalid_value", "One of `prompt` and `messages` is required, and not both.", "prompt")
    if body.messages is None:
        ids = await _prompt_ids(context, served, body)
    else:
        ids = await _chat_ids(context, served, body, turns_of(body.messages))

    def made() -> bytes:
        field, texts = "messages" if body.prompt is None else "prompt", None
        if body.return_token_strs:
            tokenizer = served.model.tokenizer
            check_response(tokenizer.text_bytes(ids) + _ID_BYTES * len(ids), field)
            texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
        return encode_checked(TokenizeResponse(len(ids), served.model.context_length, ids, texts), field)

    return Response(await native_calls.BODIES.arun(made), media_type="application/json")


async def _prompt_ids(context: Context, served: ServedModel, body: TokenizeRequest) -> list[int]:
    for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs", "image_tokens",
                 "mm_processor_kwargs"):
        if getattr(body, name) is not None:
            raise Refusal("invalid_value", f"`{name}` requires `messages`.", name)
    text = context.check_text(body.prompt or "", "prompt")
    special = body.add_special_tokens is not False
    return await native_calls.REQUESTS.arun(lambda: served.model.tokenize(text, add_special=special))


async def _chat_ids(context: Context, served: ServedModel, body: TokenizeRequest,
                    messages: list[Message]) -> list[int]:
    if body.add_special_tokens:
        raise Refusal("unsupported_parameter", "`add_special_tokens` must not be true with `messages`: the chat "
                                               "template writes these tokens.", "add_special_tokens")
    variables = {**template_variables(body.chat_template_kwargs or {}), **prompt_end(body)}

    def convert() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return ([message_of(context, message, f"messages[{at}]") for at, message in enumerate(messages)],
                formats.tool_options(body.tools))

    converted, options = await context.converted(convert)
    converted = served.with_system(await with_images(context, converted))
    options |= await image_tokens(context, served, *await context.converted(lambda: tokens_per_image(context, body)),
                                  converted)
    return await chat_ids(context.state.pool, converted, served.model, {"template_options": variables, **options})


async def detokenize(context: Context, body: DetokenizeRequest) -> Response:
    """Convert token ids to text."""
    served = await _model(context, body.model)

    def made() -> bytes:
        check_response(served.model.tokenizer.text_bytes(body.tokens, skip_special=False), "tokens")
        return encode_checked(DetokenizeResponse(served.model.detokenize(body.tokens, skip_special=False)), "tokens")

    try:
        data = await native_calls.BODIES.arun(made)
    except InvalidArgument as error:
        error.rename({"ids": "tokens"})
        raise Refusal("invalid_value", sentence(error.message), error.param) from None
    return Response(data, media_type="application/json")


async def _model(context: Context, name: str | None) -> ServedModel:
    if name is not None:
        return await context.model(name)
    return context.only(await native_calls.REQUESTS.arun(context.state.models.with_tokenizer),
                        "model with a tokenizer")


OPERATIONS = (
    Operation("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse,
              "Convert a prompt or a conversation to token ids", name="tokenize"),
    Operation("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse, "Convert token ids to text",
              name="detokenize"),
)

__all__ = ["OPERATIONS"]
