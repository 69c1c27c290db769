"""``mpool ray``."""

from __future__ import annotations

import argparse

from ..errors import InvalidArgument
from ..tasks.output_table import OUTPUTS
from .common import adapter_of, note, packages, say
from .serving import configured

#: Option of ``mpool serve``, which a variable or a file may have -> what to use instead.
_OTHERS = {"threads": "Use --cpus N", "memory": "Use --memory-mb N, for each pool", "pin": "Use --keep-alive -1",
           "draft": "Leave it out"}


def serve(arguments: argparse.Namespace) -> int:
    """Run ``mpool ray serve`` until SIGTERM or Ctrl-C."""
    with packages("`mpool ray`", "ray"):
        from ..integrations.ray.serving import Plan, run
    given = configured(arguments)
    for name, hint in _OTHERS.items():
        if name in given.values:
            raise InvalidArgument(f"{given.labels[name]} has no effect on the pools of Ray", param=name, hint=hint)
    settings, file = given.settings()
    given.pool_config()  # an error here names the option
    pool = {name: value for name, value in given.fields("pool").items() if name != "shutdown_grace"}
    own = {name: pool.pop(name) for name in ("offline", "weights", "keep_alive", "kv_dtype", "queue_capacity")
           if name in pool}
    plan = Plan(tuple(given.get("models", ())), given.get("only", False), given.get("load", False),
                given.get("compute", "auto"), replicas=arguments.replicas, max_replicas=arguments.max_replicas,
                calls=arguments.calls, cpus=arguments.cpus, memory_mb=arguments.memory_mb, fronts=arguments.fronts,
                settings=settings, adapters=tuple(given.get("adapters", ())), pool=pool, **own)

    def ready(url: str) -> None:
        if file is not None:
            file.write()
        say(f"mpool serves {arguments.replicas} pools on {url}")
        if file is not None:
            note(f"mpool: clients must send the token in {file.path} with each request: Authorization: Bearer TOKEN")

    run(plan, arguments.address, ready)
    return 0


#: Option of the command for texts -> its default. Each value of ``--vectors`` has those of its function.
_OPTIONS = {"task": None, "compute": "auto", "dimensions": None, "on_error": "raise", "max_active": None, "top_k": None,
            "aggregation": "none"}


def embed(arguments: argparse.Namespace) -> int:
    """Run ``mpool ray embed``."""
    with packages("`mpool ray`", "ray"):
        from ..integrations.ray.parquet import embed_parquet
    adapters, adapter = adapter_of(arguments)
    having = OUTPUTS[arguments.vectors].option_names
    options = {name: getattr(arguments, name) for name in _OPTIONS if name in having}
    for name, default in _OPTIONS.items():
        if name not in options and getattr(arguments, name) != default:
            raise InvalidArgument(f"--{name.replace('_', '-')} and --vectors {arguments.vectors} exclude each other",
                                  param=name)
    done = embed_parquet(arguments.source, arguments.target, column=arguments.column, output=arguments.output,
                         model=arguments.model, cpus=arguments.cpus, actors=arguments.actors,
                         memory_mb=arguments.memory_mb, weights=arguments.weights, address=arguments.address,
                         progress=not arguments.quiet, overwrite=arguments.overwrite, vectors=arguments.vectors,
                         adapters=adapters, adapter=adapter, **options)
    say(f"embedded {done.rows:,} rows of {done.files} files"
        + (f"; skipped {done.skipped} files that exist in the target folder" if done.skipped else ""))
    return 0
