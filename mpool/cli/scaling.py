"""``mpool ray``."""

from __future__ import annotations

import argparse

from .common import note, packages, say
from .serving import settings_of


def serve(arguments: argparse.Namespace) -> int:
    """Run ``mpool ray serve`` until SIGTERM or Ctrl-C."""
    with packages("`mpool ray`", "ray"):
        from ..integrations.ray.serving import Plan, run
    settings, path, _ = settings_of(arguments)
    plan = Plan((*arguments.model, *arguments.names), arguments.only, arguments.load, arguments.compute,
                arguments.offline or None,
                arguments.replicas, arguments.max_replicas, arguments.calls, arguments.cpus, arguments.memory_mb,
                arguments.fronts, settings, arguments.weights, tuple(arguments.adapter), arguments.keep_alive,
                arguments.kv_dtype, arguments.queue_capacity)

    def ready(url: str) -> None:
        say(f"mpool serves {arguments.replicas} pools on {url}")
        if path is not None:
            note(f"mpool: clients must send the token in {path} with each request: Authorization: Bearer TOKEN")

    run(plan, arguments.address, ready)
    return 0


#: Value of ``--vectors`` -> the options of the command that apply to it.
_OPTIONS = {"dense": ("task", "compute", "dimensions", "on_error"), "sparse": ("task", "compute", "max_active"),
            "tokens": ("task", "compute"), "all": ("task", "compute"), "labels": ("compute", "top_k"),
            "spans": ("compute", "aggregation")}


def embed(arguments: argparse.Namespace) -> int:
    """Run ``mpool ray embed``."""
    from ..errors import InvalidArgument

    with packages("`mpool ray`", "ray"):
        from ..integrations.ray.parquet import embed_parquet
    options = {name: getattr(arguments, name) for name in _OPTIONS[arguments.vectors]}
    for name, default in (("task", None), ("dimensions", None), ("on_error", "raise"), ("max_active", None),
                          ("top_k", None), ("aggregation", "none")):
        if name not in options and getattr(arguments, name) != default:
            raise InvalidArgument(f"--{name.replace('_', '-')} and --vectors {arguments.vectors} exclude each other",
                                  param=name)
    done = embed_parquet(arguments.source, arguments.target, column=arguments.column, output=arguments.output,
                         model=arguments.model, cpus=arguments.cpus, actors=arguments.actors,
                         memory_mb=arguments.memory_mb, weights=arguments.weights, address=arguments.address,
                         progress=not arguments.quiet, overwrite=arguments.overwrite, vectors=arguments.vectors,
                         **options)
    say(f"embedded {done.rows:,} rows of {done.files} files"
        + (f"; skipped {done.skipped} files that exist in the target folder" if done.skipped else ""))
    return 0
