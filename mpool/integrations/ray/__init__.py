"""mpool on Ray (extra ``ray``): replicated pools behind one address, and embeddings for folders of Parquet files.

- ``serving``: :func:`application` for ``serve run``, and the command ``mpool ray serve``.
- ``pools``: a replica, which is a pool with the server's routes.
- ``front``: the deployment that checks the requests and forwards each to a replica that has the model loaded.
- ``race``: one request, sent to one replica after the other until one responds; ``responses``: a response that has not
  begun.
- ``proxy``: middleware in Ray's proxies, which repeats a request whose front died.
- ``routing``: selection of replicas, and the number of replicas.
- ``parquet``: :func:`embed_parquet` and the command ``mpool ray embed``; :class:`EmbedBatches` for pipelines of Ray
  Data.

The tests use one machine, with one or two nodes. For a cluster, install mpool and the models' files on all machines,
and set the variables of ``proxy.ENVIRONMENT`` there. Run ``ray start --head`` on one machine and
``ray start --address=HEAD:6379`` on the others. Then run the command of mpool with ``--address auto``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...host.resources import importing

if TYPE_CHECKING:
    from .parquet import EmbedBatches as EmbedBatches
    from .parquet import embed_parquet as embed_parquet
    from .serving import application as application

_HOME = {"application": "serving", "EmbedBatches": "parquet", "embed_parquet": "parquet"}
__all__ = ["EmbedBatches", "application", "embed_parquet"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing("ray"):
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
