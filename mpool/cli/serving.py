"""``mpool serve``."""

from __future__ import annotations

import argparse

from .common import note, say
from .parser import SERVER_LIMITS


def serve(arguments: argparse.Namespace) -> int:
    """Runs ``mpool serve``: until SIGTERM or Ctrl-C, after which requests get some seconds to end."""
    from ..config import PoolConfig
    from ..errors import Unsupported
    from ..pool import Pool

    try:
        from ..server.serving import Serving
        from ..server.settings import Settings, is_loopback, new_token_file, token_of
    except ImportError as error:
        raise Unsupported(f"the server needs the package {error.name}",
                          hint='pip install "mpool[server]" installs it') from None
    token, path = None, arguments.token_file
    if path is not None:
        token = token_of(path)
    elif not is_loopback(arguments.host):
        path, token = new_token_file()
    limits = {name: getattr(arguments, name) for name, _, _ in SERVER_LIMITS if hasattr(arguments, name)}
    settings = Settings(host=arguments.host, port=arguments.port, token=token,
                        allowed_hosts=tuple(arguments.allow_host),
                        allowed_origins=tuple(arguments.allow_origin), **limits)
    pool = Pool(PoolConfig(threads=arguments.threads, offline=arguments.offline or None,
                           shutdown_grace=settings.grace))
    with pool:
        server = Serving(settings, pool, arguments.model, not arguments.only, arguments.compute)
        if arguments.load:
            for served in server.state.models.all():
                pool.load(served.model)
        names = server.state.models.names()

        def ready() -> None:
            say(f"mpool serves {', '.join(names) or 'the models of the catalogue that are here'} on {server.url}")
            if path is not None:
                note(f"mpool: clients need the token in {path}: Authorization: Bearer TOKEN")

        server.run(ready)
    return 0
