"""Conversations with a model of a running server: ``mpool chat --server`` and ``mpool run --server``."""

from __future__ import annotations

import argparse
import base64
import json
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from ..completions import Choice, Chunk, Completion, FinishReason, Timings, Usage
from ..errors import ModelError
from .remote import Server, server_of

#: Time limit of each wait for a part of a reply, in seconds. The server may load the model first.
_SECONDS = 600.0
_CHAT = ("text_to_text", "vision")


class Remote:
    """A model of a server, for a conversation. See :class:`mpool.cli.chatting.Backend`.

    Args:
        server: the server.
        name: name of the model there; None: the first one that can chat.
    """

    def __init__(self, server: Server, name: str | None) -> None:
        if name is None:
            listed = server.request("/v1/models", "data")["data"]
            name = next((card["id"] for card in listed if set(_CHAT) & set(card["capabilities"])), None)
        if name is None:
            raise ModelError(f"no model of {server.url} can chat", hint="Start it with: mpool serve MODEL")
        card = server.request(f"/v1/models/{urllib.parse.quote(name)}", "capabilities")
        found = card["capabilities"]
        self.name, self.capability = name, "vision" if "vision" in found else str(found[0])
        self._server, self._context = server, card.get("max_model_len")

    @property
    def context_length(self) -> int | None:
        """Tokens in the context; None: unknown."""
        return self._context

    def embed(self, text: str) -> list[float]:
        """Return the vector of a text."""
        found = self._server.request("/v1/embeddings", "data", {"model": self.name, "input": text})
        return list(found["data"][0]["embedding"])

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> RemoteStream:
        """Start a reply."""
        given = {name: value for name, value in options.items() if value is not None and name != "template_options"}
        body = {"model": self.name, "messages": list(map(_message, messages)), **given, "stream": True,
                "stream_options": {"include_usage": True}}
        if "template_options" in options:
            body["chat_template_kwargs"] = options["template_options"]
        return RemoteStream(self._server, body)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's format: images are data URLs, whose type the server reads from their bytes."""
    images = [one if isinstance(one, str) else base64.b64encode(one).decode() for one in message.get("images", ())]
    if not images:
        return message
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}}
                                   for one in images]
    return {"role": message["role"], "content": [*parts, {"type": "text", "text": message["content"]}]}


class RemoteStream:
    """A reply that a server generates: an iterator of chunks.

    Args:
        server: the server.
        body: body of the request.
    """

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._server, self._body = server, body
        self._text = self._reasoning = ""
        self._reason: FinishReason = "cancelled"
        self._usage = Usage(0, 0)
        self._start = time.monotonic()
        self._first = self._end = 0.0
        self._open = ExitStack()
        # a refusal, such as one of a conversation that is too long, is an error of this call
        self._response = self._open.enter_context(server.open("/v1/chat/completions", body, _SECONDS))

    def __iter__(self) -> Iterator[Chunk]:
        with self._open:
            for line in self._response:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data:"):])
                if "error" in event:
                    raise ModelError(str(event["error"]["message"]))
                if event.get("usage"):
                    self._usage = _usage(event["usage"])
                for choice in event["choices"]:
                    delta = choice["delta"]
                    self._reason = choice["finish_reason"] or self._reason
                    chunk = Chunk(delta.get("content") or "", reasoning=delta.get("reasoning_content") or "")
                    if chunk.text or chunk.reasoning:
                        self._first = self._first or time.monotonic()
                        self._text += chunk.text
                        self._reasoning += chunk.reasoning
                        yield chunk
        self._end = time.monotonic()

    def close(self) -> None:
        """End the reply: the server stops when the connection closes."""
        self._open.close()

    def result(self) -> Completion:
        """Return the completion, or what was received of it."""
        end = self._end or time.monotonic()
        first = self._first or end
        reasoning = self._reasoning or None
        return Completion(
            text=self._text, finish_reason=self._reason, stop=None, token_ids=(), logprobs=None, usage=self._usage,
            timings=Timings(0.0, first - self._start, end - first, end - self._start), model=self._body["model"],
            seed=0, choices=(Choice(0, self._text, self._reason, reasoning=reasoning),), reasoning=reasoning)


def _usage(found: dict[str, Any]) -> Usage:
    details = found.get("prompt_tokens_details") or {}
    return Usage(found["prompt_tokens"], found["completion_tokens"], details.get("cached_tokens") or 0)


def connect(arguments: argparse.Namespace, name: str | None) -> Remote:
    """Return a model of the server that ``--url`` and ``--token-file`` name."""
    return Remote(server_of(arguments), name)


__all__ = ["Remote", "connect"]
