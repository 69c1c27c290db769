"""HTTP server: OpenAI's, Anthropic's and Ollama's protocols as an ASGI application. Requires the extra ``server``.

``mpool serve`` runs the application with limits on every connection. Any other ASGI server can run it too::

    uvicorn mpool.server:app --factory

The server only translates protocols: the pool queues and runs the requests. The modules, from the socket to the
handler:

- ``settings``: address, access control, limits and the token file. ``serving``: socket, uvicorn, signals, shutdown.
- ``protocol``: optional protocol class for uvicorn with limits on sizes and times, and detection of disconnects.
- ``application``: routes behind the guards (``guard``: Host and Origin, then the token); :func:`create_app`.
  ``state``: state that all requests share. ``disconnects``: detection of disconnects on other ASGI servers.
- ``operations``: calls the handler of a route. Each route is defined by an :class:`operations.Operation`, from which
  ``openapi`` generates the OpenAPI document. ``bodies``: strict JSON. ``invalid``: search for the invalid field of a
  body. ``errors``: all error responses.
- ``streaming``: server-sent events and JSON lines with exactly one final event. ``models``: names of the served models.
- One module per protocol: ``openai``, ``anthropic``, ``ollama``, ``operational``, ``dashboard``. To add a protocol,
  add its tuple of operations in ``application``. ``model_list``: ``/v1/models``. ``scoring``, ``pooling``, ``tokens``:
  routes of vLLM. ``text_embeddings_inference``: its routes. ``classifying``: routes of both. ``labelling``: labels of
  tokens. ``swapping``: replacement of a model. ``sampling``, ``formats``, ``thinking``, ``fill_in``, ``image_urls``:
  options that several protocols share.
- ``request_history``, ``series``, ``response_memory``: past requests, plots, and conversations that a request can
  continue. ``interfaces``: addresses of this machine. ``peers``: the user that owns a client's connection.
- ``worker``: ``mpool worker``, a server for one model that runs one job at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import Application


def create_app(*args: Any, **options: Any) -> Application:
    """Create the ASGI application of the server; see :func:`mpool.server.application.create_app`."""
    from .application import create_app as create  # starlette and msgspec are optional packages

    return create(*args, **options)


#: Alias of :func:`create_app` for ``uvicorn mpool.server:app --factory``.
app = create_app

__all__ = ["app", "create_app"]
