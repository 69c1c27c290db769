"""``mpool serve`` and ``mpool worker``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ..checks import refuse
from ..errors import InvalidArgument, MpoolError
from ..host import native_calls
from ..models.catalogue import estimate
from ..models.catalogue import load as load_catalogue
from ..records import fields, logger, to_standard_error
from ..runtime.logs import pool_log
from ..server.configuring import Configuration, configure
from ..server.option_table import OPTIONS
from ..server.settings import Settings, TokenFile, token_of
from .common import note, packages, say

if TYPE_CHECKING:
    from ..pool import Pool
    from ..server.serving import Serving

log = logger("mpool.serve")
log.setLevel("INFO")  # also without -v: the operator has asked
#: Maximum number of models that the start block lists.
_LISTED = 20

#: Environment variables that prevent numpy's BLAS and tokenizers from starting threads. A worker does no linear algebra
#: with numpy, and tokenizes one prompt at a time.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def configured(arguments: argparse.Namespace) -> Configuration:
    """Return the configuration of a server: these options, the variables of the environment, and the file of
    ``--config``. Sets up the log.

    Raises:
        InvalidArgument: A value has the wrong type, or the file has an unknown name.
        FileError: The file cannot be read.
    """
    given = {name: getattr(arguments, option.dest) for name, option in OPTIONS.items()
             if hasattr(arguments, option.dest) and option.dest != "verbose"}
    models = [*given.pop("models", ()), *arguments.names]
    if models:
        given["models"] = models
    to_standard_error(arguments.verbose)  # for warnings about the configuration itself
    found = configure(given, arguments.config)
    verbose = arguments.verbose or found.get("verbose", 0)
    if not 0 <= verbose <= 2 and not arguments.verbose:
        with found.named():
            refuse("verbose", verbose, "an integer from 0 to 2")
    to_standard_error(verbose, found.get("log_format", "text"))
    return found


def _announce(server: Serving, file: TokenFile | None, as_json: bool) -> None:
    """Print what an operator wants to know of a server that accepts connections: addresses, dashboard, the place of the
    token, the memory limit, and the models with the memory that each will need."""
    from ..server.interfaces import addresses

    state, settings = server.state, server.state.settings
    pool, names = state.pool, state.models.names()
    say(f"mpool serves {', '.join(names) or 'the downloaded models of the catalogue'} on {server.url}")
    models = [(served.name, *_needs(served)) for served in state.models.here()]
    limit, threads = pool.health().memory.limit, pool.metrics()["compute_threads"]
    if as_json:
        log.info("mpool serves on %s", server.url, extra=fields(
            event="started", url=server.url, token_file=None if file is None else file.path, memory_limit_bytes=limit,
            threads=threads, models=[{"name": name, "capability": capability, "needs_bytes": need * 10**6}
                                     for name, capability, need in models]))
        return
    rows = [("dashboard", f"http://localhost:{server.port}/" if settings.on_all_addresses else f"{server.url}/")]
    if settings.on_all_addresses:
        found = [f"http://{f'[{one}]' if ':' in one else one}:{server.port}"
                 for one in addresses(6 if settings.host == "::" else 4)]
        rows.append(("network", "other machines reach the server at "
                                + (", ".join(found) or f"port {server.port} of this machine")))
    rows.append(("token", "none: every program of this machine can use the server" if file is None else
                 f"in {file.path}; clients send it as Authorization: Bearer TOKEN"))
    if file is not None and file.is_new and sys.stderr.isatty():  # a log must not have it
        rows.append(("", f"the new token is {file.token}"))
    rows += [("memory", f"{limit / 1e6:,.0f} MB for models, caches and queues"
                        + (" (--memory)" if pool.config.memory_bytes else "; --memory sets another limit")),
             ("threads", f"{threads}" + (" (--threads)" if pool.config.threads else ""))]
    if models:
        wide = max(len(name) for name, _, _ in models[:_LISTED])
        rows += [("" if at else "models", f"{name:{wide}}  {capability:{len('text_embedding')}}  "
                                          f"needs up to {need:,} MB with one request")
                 for at, (name, capability, need) in enumerate(models[:_LISTED])]
    else:
        rows.append(("models", "none yet: mpool pull MODEL downloads one"))
    if len(models) > _LISTED:
        rows.append(("", f"and {len(models) - _LISTED} more: mpool list"))
    for name, text in rows:
        note(f"  {name:9}  {text}")


def _needs(served: Any) -> tuple[str, int]:
    """Return the capability of a model, and the estimate of its memory in MB. Reads no files of the catalogue's."""
    row = load_catalogue().get(served.model.key)
    if row is not None:
        return row.capability, row.est_memory_allocation_mb
    described = served.model.description
    return described.capability, estimate(described)


def serve(arguments: argparse.Namespace) -> int:
    """Run ``mpool serve`` until SIGTERM or Ctrl-C. Active requests then get ``--grace`` seconds to complete."""
    from ..pool import Pool

    with packages("the server", "server"):
        from ..server.serving import Serving
    given = configured(arguments)
    models, draft = given.get("models", []), given.get("draft")
    config = given.pool_config(shutdown_grace=Settings.grace)
    settings, file = given.settings()
    if draft is not None and len(models) != 1:
        raise InvalidArgument(param="draft", got=f"{len(models)} models", allowed="used with exactly one --model")
    failures: list[MpoolError] = []
    with Pool(config) as pool:
        if draft is not None:  # its faults are errors before the model is read
            try:
                pool.get(draft, "text_to_text")
            except MpoolError as error:
                error.rename({"model": "draft"})
                raise
        server = Serving(settings, pool, models, not given.get("only", False), given.get("compute", "auto"),
                         adapters=given.get("adapters", []))
        with given.named():
            pinned = server.state.models.at_start(given.get("pin", []), "pin")
        if given.get("load", False) or draft is not None:
            for served in server.state.models.all():
                _load(pool, served.model, draft=draft)
        for served in pinned:
            _load(pool, served.model, pin=True)

        def ready() -> None:
            try:
                if file is not None:
                    file.write()
            except MpoolError as error:  # the event loop, which calls this function, would only log it
                failures.append(error)
                server.stop()
                return
            _announce(server, file, given.get("log_format") == "json")

        server.run(ready)
    if failures:
        raise failures[0]
    native_calls.end_process_if_busy(0)
    return 0


def _load(pool: Pool, model: Any, **options: Any) -> None:
    """Load a model. If that fails, the command ends with the error, and the log has no record of each attempt."""
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(f"Loading {model.key} failed ")

    pool_log.addFilter(keep)
    pool.load(model, **options)  # after an error the filter stays: the records may come later
    pool_log.removeFilter(keep)


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
    to_standard_error(arguments.verbose, arguments.log_format)
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
