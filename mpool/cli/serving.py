"""``mpool serve`` and ``mpool worker``."""

from __future__ import annotations

import argparse
import os

from ..errors import InvalidArgument, MpoolError
from ..host import native_calls
from ..records import to_standard_error
from ..server.settings import Settings, TokenFile, is_loopback, token_of
from .common import note, packages, say
from .parser import SERVER_LIMITS

#: Environment variables that prevent numpy's BLAS and tokenizers from starting threads. A worker does no linear algebra
#: with numpy, and tokenizes one prompt at a time.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def settings_of(arguments: argparse.Namespace) -> tuple[Settings, TokenFile | None]:
    """Return the server settings for the options, and the token with its file; None: the server needs no token.

    A new token is in no file yet: see :meth:`mpool.server.settings.TokenFile.write`.
    """
    file = None
    if arguments.token_file is not None:
        file = TokenFile.named(arguments.token_file)
    elif not is_loopback(arguments.host):
        file = TokenFile.default()
    limits = {name: getattr(arguments, name) for name, _, _ in SERVER_LIMITS if hasattr(arguments, name)}
    return Settings(host=arguments.host, port=arguments.port, token=None if file is None else file.token,
                    allowed_hosts=tuple(arguments.allow_host), allowed_origins=tuple(arguments.allow_origin),
                    **limits), file


def notes_of(settings: Settings, port: int, file: TokenFile | None) -> list[str]:
    """Return what a user must know to reach the server: its addresses, and the token.

    Args:
        settings: Settings of the server.
        port: Port that it listens on.
        file: The token and its file; None: there is no token. A server that other machines can reach prints a new
            token once; later it is only in the file.
    """
    from ..server.interfaces import addresses

    found = []
    if settings.on_all_addresses:
        listed = [f"http://{f'[{one}]' if ':' in one else one}:{port}"
                  for one in addresses(6 if settings.host == "::" else 4)]
        found.append("other machines reach the server at " + (", ".join(listed) or f"port {port} of this machine"))
    if file is not None:
        found.append(f"clients must send the token in {file.path} with each request: Authorization: Bearer TOKEN")
        if file.is_new and not is_loopback(settings.host):
            found.append(f"the new token is {file.token}")
    return found


def serve(arguments: argparse.Namespace) -> int:
    """Run ``mpool serve`` until SIGTERM or Ctrl-C. Active requests then get ``--grace`` seconds to complete."""
    from ..config import PoolConfig, same_queue_capacities
    from ..pool import Pool

    with packages("the server", "server"):
        from ..server.serving import Serving
    to_standard_error()  # without --verbose: warnings
    models = [*arguments.model, *arguments.names]
    settings, file = settings_of(arguments)
    failures: list[MpoolError] = []
    pool = Pool(PoolConfig(threads=arguments.threads, offline=arguments.offline or None, weights=arguments.weights,
                           shutdown_grace=settings.grace, keep_alive=arguments.keep_alive, kv_dtype=arguments.kv_dtype,
                           **same_queue_capacities(arguments.queue_capacity)))
    with pool:
        if arguments.draft is not None and len(models) != 1:
            raise InvalidArgument(param="draft", got=f"{len(models)} models", allowed="used with exactly one --model")
        if arguments.draft is not None:  # its faults are errors before the model is read
            try:
                pool.get(arguments.draft, "text_to_text")
            except MpoolError as error:
                error.rename({"model": "draft"})
                raise
        server = Serving(settings, pool, models, not arguments.only, arguments.compute,
                         adapters=arguments.adapter)
        if arguments.load or arguments.draft is not None:
            for served in server.state.models.all():
                pool.load(served.model, draft=arguments.draft)
        names = server.state.models.names()

        def ready() -> None:
            try:
                if file is not None:
                    file.write()
            except MpoolError as error:  # the event loop, which calls this function, would only log it
                failures.append(error)
                server.stop()
                return
            say(f"mpool serves {', '.join(names) or 'the downloaded models of the catalogue'} on {server.url}")
            for line in notes_of(settings, server.port, file):
                note(f"mpool: {line}")

        server.run(ready)
    if failures:
        raise failures[0]
    native_calls.end_process_if_busy(0)
    return 0


def worker(arguments: argparse.Namespace) -> int:
    """Run ``mpool worker`` until SIGTERM, Ctrl-C or ``POST /shutdown``.

    Prints the loading progress to standard error and the address to standard output.
    """
    for name, value in _NO_THREADS.items():
        os.environ.setdefault(name, value)
    from ..tasks.captures import Capture

    with packages("the server", "server"):
        from ..server.errors import refusal_of, worker_code
        from ..server.worker import Worker, worker_config, worker_settings
    to_standard_error()
    token = None if arguments.token_file is None else token_of(arguments.token_file)
    capture = None if arguments.capture is None else Capture(arguments.capture)
    try:
        made = Worker(arguments.model, worker_settings(arguments.port, token),
                      worker_config(arguments.threads, arguments.offline or None, weights=arguments.weights),
                      arguments.compute, arguments.busy, arguments.timeout, capture,
                      lambda share, what: note(f"mpool: loading {share} %: {what}"))
    except MpoolError as error:
        note(f"mpool: {worker_code(refusal_of(error, 'load'))}")
        raise
    with made.pool:
        made.run(lambda: say(f"mpool serves {made.name} on {made.serving.url}"))
    native_calls.end_process_if_busy(0)
    return 0
