"""Every store of a server that its clients can fill, with its limits. ``mpool show`` and docs/settings.md list them.

Modules take the limits of their stores from this table. Two kinds state them too, and a test compares: the options of
the server, and the history, which a first request needs without this table.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 1 << 20


class Store(NamedTuple):
    """A store.

    Attributes:
        what: its entries, in the plural.
        entries: maximum number of entries; None: only their bytes are limited.
        bytes: maximum bytes of all entries; None: their number or ``setting`` limits them.
        setting: option or variable that changes the limit; "": it is fixed.
        full: what happens when the store is full.
    """

    what: str
    entries: int | None
    bytes: int | None
    setting: str
    full: str


_OLDEST, _503 = "the least recently used is dropped", "status 503"

#: Name -> store.
STORES = {
    "connections": Store("open connections", 2048, None, "--max-connections", _503),
    "bodies": Store("bodies of requests that arrive or are served, with the values parsed out of them", None, 512 * MIB,
                    "--max-bodies", _503),
    "streams": Store("streamed responses", 512, None, "--max-streams", _503),
    "responses": Store("conversations that `previous_response_id` continues", 1000, 64 * MIB, "", _OLDEST),
    "aliases": Store("names of `/api/create` and `/api/copy`, with system messages and options", 1000, 64 * MIB, "",
                     "status 400"),
    "history": Store("requests that ended, for the dashboard, with 256 characters of the model's name", 1000, 2 * MIB,
                     "", "the oldest is dropped"),
    "events": Store("events and refused requests, for the dashboard, with 300 characters of the reason", 400, MIB, "",
                    "the oldest is dropped"),
    "ignored": Store("names of unknown fields that the log has named, of 100 characters", 1000, MIB, "",
                     "further ones are not logged"),
    "series": Store("models with plots on the dashboard", 32, 16 * MIB, "",
                    "the one that was idle for longest is dropped"),
    "formats": Store("compiled formats of structured output and tools, per tokenizer", 32, 128 * MIB, "", _OLDEST),
    "schemas": Store("JSON schemas of structured output and tools, in the form that a grammar enforces", 256, 16 * MIB,
                     "", _OLDEST),
    "images": Store("images that are being decoded", None, 1024 * MIB, "", "they wait"),
    "queues": Store("waiting requests of a model", None, None, "PoolConfig.prompt_queue_capacity, ...", _503),
    "models": Store("models in memory, those of the catalogue included, their queues, adapters, caches and recent "
                    "vectors", None, None, "MPOOL_MEMORY_MB", "idle ones are unloaded, then status 503"),
    "prefixes": Store("prefixes of prompts and encoded images of a language model", None, None, "MPOOL_PREFIX_PERCENT",
                      "the one that saves least is dropped"),
    "snapshots": Store("states of recurrent layers after messages of prompts", None, None, "MPOOL_SNAPSHOT_PERCENT",
                       "the one that saves least is dropped"),
}

__all__ = ["STORES", "Store"]
