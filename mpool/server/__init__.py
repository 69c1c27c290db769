"""The pool over HTTP: OpenAI's and Ollama's protocols as an ASGI application. Needs the extra ``server``.

``mpool serve`` runs the application with limits on every socket. Any other ASGI server runs it too::

    uvicorn mpool.server:app --factory

The pool does the work: the server has no queue and no knowledge of models. From the socket to the handler:

- ``settings``: address, clients and limits; the token. ``serving``: socket, uvicorn, signals, shutdown.
- ``protocol``: an optional protocol class for uvicorn: limits on sizes and times, clients that disconnect.
- ``application``: the routes behind the guards (``guard``: Host and Origin, then the token); :func:`create_app`.
  ``state``: the state that requests share. ``disconnects``: clients that leave, on other ASGI servers.
- ``operations``: from a route to its handler and back. One :class:`operations.Operation` row defines a route;
  ``openapi`` makes the published document from the rows. ``bodies``: strict JSON. ``errors``: every error response.
- ``streaming``: server-sent events and JSON lines with exactly one end. ``models``: the names that clients may use.
- One module per protocol: ``openai``, ``ollama``, ``operational``, ``dashboard``. A further protocol is a tuple of
  operations in ``application``.
- ``worker``: ``mpool worker``, a server for one model that runs one job at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import Application


def create_app(*args: Any, **options: Any) -> Application:
    """Make the server's ASGI application; see :func:`mpool.server.application.create_app`."""
    from .application import create_app as create  # starlette and msgspec are optional packages

    return create(*args, **options)


#: The factory under the name that ASGI servers look for: ``uvicorn mpool.server:app --factory``.
app = create_app

__all__ = ["app", "create_app"]
