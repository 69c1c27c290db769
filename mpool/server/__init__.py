"""``mpool serve``: the pool over HTTP, and what else needs the packages of the extra ``server``.

The pool does the work: there is no queue and no word about a model here. From outside to inside:

- ``settings``: where, for whom, how much; the token. ``serving``: socket, uvicorn, signals, the end.
- ``protocol``: HTTP on a connection by httptools, what it leaves open closed, limits of time, clients that leave.
- ``app``: the routes behind the door (``guard``: Host and Origin, then the token). ``state``: what requests share.
- ``operations``: from a route to its handler and back; a row of :class:`operations.Operation` is all that a route is,
  and ``openapi`` makes the published document of the rows. ``bodies``: strict JSON. ``errors``: all that can go wrong.
- ``streaming``: events and lines with one end. ``models``: names that clients may use.
- A protocol a module: ``openai``, ``ollama``, ``operational``, ``dashboard``.
  A further one is a tuple of operations in ``app``.
- ``worker``: ``mpool worker``, a server of its own for one model, which has one job at a time.
"""
