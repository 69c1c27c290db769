"""Imports inside functions: every one that the package may have, counted, each with its reason.

A row of :data:`ROWS` is "module  imported  count  reason". `python tests/python/api/test_tiers.py` prints the rows that
the package has now; the reason of a new row is for a person to choose.
"""

from __future__ import annotations

#: Reason -> explanation. A late import without one of these reasons belongs at the top of its module.
REASONS = {
    "optional": "the package is an extra; the import fails with a hint where it is not installed",
    "core": "`import mpool` and its dataclasses load neither NumPy nor the compiled core",
    "start-up": "the library or module takes milliseconds to import, and most processes never need it",
    "facade": "a package's `__getattr__` loads a public name on first use",
}

#: Top-level parts of the package whose rows are not listed yet.
PENDING = ("_calls", "_runtime", "aio", "cli", "debug", "integrations", "model", "pool", "server", "tasks")

ROWS = """
mpool  warnings  1  facade
mpool.checks  difflib  1  start-up
mpool.conversation.grammar  llguidance  3  optional
mpool.conversation.grammar  mpool._core  2  core
mpool.conversation.messages  mpool.conversation.tools  1  start-up
mpool.conversation.template  jinja2  3  start-up
mpool.conversation.template  jinja2.exceptions  1  start-up
mpool.conversation.template  mpool.conversation.sandbox  3  start-up
mpool.images.loading  PIL  5  start-up
mpool.images.loading  mpool.images.fetching  1  start-up
mpool.images.preparing  PIL  1  start-up
mpool.models.describing  mpool.models.formats  1  start-up
mpool.models.describing  mpool.models.formats.gguf_model  1  start-up
mpool.models.describing  mpool.models.formats.hf_folder  1  start-up
mpool.models.describing  mpool.models.sources  5  start-up
mpool.models.sources.hub  huggingface_hub  5  start-up
mpool.models.sources.hub  huggingface_hub.utils  1  start-up
mpool.models.sources.pip  importlib.metadata  1  start-up
mpool.models.sources.progress  tqdm  1  start-up
mpool.models.store  filelock  1  start-up
mpool.runtime.entry  hashlib  1  start-up
mpool.runtime.entry  mpool._core  1  core
mpool.runtime.entry  mpool.conversation.template  1  start-up
mpool.runtime.entry  mpool.models  1  start-up
mpool.runtime.entry  mpool.models.files  1  start-up
mpool.runtime.entry  mpool.tokenizers  1  start-up
mpool.runtime.entry  mpool.tokenizers.gguf_vocab  1  start-up
mpool.runtime.entry  numpy  1  core
mpool.runtime.events  mpool._core  3  core
mpool.runtime.health  mpool._core  2  core
mpool.runtime.health  numpy  1  core
mpool.runtime.isolation  mpool._core  1  core
mpool.runtime.logs  mpool._core  2  core
mpool.runtime.metrics  mpool._core  1  core
mpool.runtime.prometheus  prometheus_client  1  optional
mpool.runtime.prometheus  prometheus_client.core  1  optional
mpool.tokenizers  mpool.tokenizers.opening  1  facade
mpool.tokenizers  mpool.tokenizers.tokenizer  1  facade
mpool.tokenizers.gguf_build  tokenizers  6  start-up
mpool.tokenizers.gguf_part  mpool.tokenizers.gguf_build  1  start-up
mpool.tokenizers.gguf_part  tokenizers  1  start-up
mpool.tokenizers.json_tokenizer  tokenizers  4  start-up
mpool.tokenizers.older_files  tokenizers  3  start-up
mpool.tokenizers.opening  mpool.tokenizers.gguf_tokenizer  1  start-up
mpool.tokenizers.opening  mpool.tokenizers.json_tokenizer  1  start-up
mpool.tokenizers.threads  concurrent.futures  1  start-up
"""
