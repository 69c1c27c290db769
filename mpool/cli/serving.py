"""``mpool serve`` and ``mpool worker``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import native_calls
from .common import note, say
from .parser import SERVER_LIMITS

if TYPE_CHECKING:
    from ..server.settings import Settings

#: Environment variables that prevent numpy's BLAS and tokenizers from starting threads. A worker does no linear algebra
#: with numpy, and tokenizes one prompt at a time.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _packages() -> Iterator[None]:
    """Raise Unsupported with installation instructions if a package of the server is missing."""
    from ..errors import Unsupported

    try:
        yield
    except ImportError as error:
        raise Unsupported(f"the server needs the package {error.name}",
                          hint='Run pip install "mpool[server]"') from None


def settings_of(arguments: argparse.Namespace) -> tuple[Settings, str | None]:
    """Return the server settings for the options, and the path of the token file or None."""
    with _packages():
        from ..server.settings import Settings, is_loopback, new_token_file, token_of
    token, path = None, arguments.token_file
    if path is not None:
        token = token_of(path)
    elif not is_loopback(arguments.host):
        path, token = new_token_file()
    limits = {name: getattr(arguments, name) for name, _, _ in SERVER_LIMITS if hasattr(arguments, name)}
    return Settings(host=arguments.host, port=arguments.port, token=token, allowed_hosts=tuple(arguments.allow_host),
                    allowed_origins=tuple(arguments.allow_origin), **limits), path


def serve(arguments: argparse.Namespace) -> int:
    """Run ``mpool serve`` until SIGTERM or Ctrl-C. Active requests then get ``--grace`` seconds to complete."""
    from ..config import PoolConfig
    from ..errors import InvalidArgument
    from ..pool import Pool

    with _packages():
        from ..server.serving import Serving
    settings, path = settings_of(arguments)
    pool = Pool(PoolConfig(threads=arguments.threads, offline=arguments.offline or None, weights=arguments.weights,
                           shutdown_grace=settings.grace))
    with pool:
        if arguments.draft is not None and len(arguments.model) != 1:
            raise InvalidArgument("`draft` needs exactly one model", param="draft", got=arguments.draft,
                                  allowed="the draft model of one --model")
        server = Serving(settings, pool, arguments.model, not arguments.only, arguments.compute)
        if arguments.load or arguments.draft is not None:
            for served in server.state.models.all():
                pool.load(served.model, draft=arguments.draft)
        names = server.state.models.names()

        def ready() -> None:
            say(f"mpool serves {', '.join(names) or 'the downloaded models of the catalogue'} on {server.url}")
            if path is not None:
                note(f"mpool: clients must send the token in {path} with each request: Authorization: Bearer TOKEN")

        server.run(ready)
    native_calls.end_process_if_busy(0)
    return 0


def worker(arguments: argparse.Namespace) -> int:
    """Run ``mpool worker`` until SIGTERM, Ctrl-C or ``POST /shutdown``.

    Prints the loading progress to standard error and the address to standard output.
    """
    for name, value in _NO_THREADS.items():
        os.environ.setdefault(name, value)
    from ..errors import MpoolError
    from ..tasks.captures import Capture

    with _packages():
        from ..server.errors import refusal_of, worker_code
        from ..server.settings import token_of
        from ..server.worker import Worker, worker_config, worker_settings
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
        made.run(lambda: say(f"mpool works with {made.name} on {made.serving.url}"))
    native_calls.end_process_if_busy(0)
    return 0
