"""Allowed imports inside functions, with their number and reason.

A row of :data:`ROWS` is "module  imported  count  reason". `python tests/python/api/test_tiers.py` prints the current
rows of the package; the author of a new row chooses its reason.
"""

from __future__ import annotations

#: Reason -> explanation. A late import without one of these reasons belongs at the top of its module.
REASONS = {
    "optional": "the package is an extra; if it is not installed, the import fails with a hint",
    "core": "`import mpool` and its dataclasses load neither NumPy nor the compiled core",
    "start-up": "the library or module takes milliseconds to import, and most processes never need it",
    "facade": "a package's `__getattr__` loads a public name on first use",
}

ROWS = """
mpool  mpool.resources  1  start-up
mpool._functions  mpool.runtime  1  start-up
mpool._functions  mpool.tasks.running  1  start-up
mpool._methods  mpool.tasks.running  3  start-up
mpool._renamed  warnings  1  start-up
mpool._stubs  mpool._functions  1  start-up
mpool._stubs  mpool.pool  1  start-up
mpool.aio  mpool._renamed  1  start-up
mpool.checks  difflib  1  start-up
mpool.cli  logging  1  start-up
mpool.cli  mpool.cli.parser  1  start-up
mpool.cli  mpool.errors  2  start-up
mpool.cli.capturing  mpool.debug.comparing  1  start-up
mpool.cli.capturing  mpool.errors  1  start-up
mpool.cli.capturing  mpool.tasks.captures  1  start-up
mpool.cli.common  mpool.config  1  start-up
mpool.cli.common  mpool.pool  1  start-up
mpool.cli.common  os  1  start-up
mpool.cli.demo  mpool.cli.common  1  start-up
mpool.cli.demo  mpool.debug.show  1  start-up
mpool.cli.demo  mpool.errors  2  start-up
mpool.cli.demo  mpool.models  2  start-up
mpool.cli.demo  mpool.models.sources.bundled  1  start-up
mpool.cli.demo  mpool.similarity  2  start-up
mpool.cli.embedding  mpool.errors  4  start-up
mpool.cli.embedding  mpool.models  1  start-up
mpool.cli.embedding  numpy  2  core
mpool.cli.embedding  numpy.lib  1  core
mpool.cli.models  mpool.debug.show  2  start-up
mpool.cli.models  mpool.errors  3  start-up
mpool.cli.models  mpool.models  4  start-up
mpool.cli.scaling  mpool.errors  1  start-up
mpool.cli.scaling  mpool.integrations.ray.parquet  1  optional
mpool.cli.scaling  mpool.integrations.ray.serving  1  optional
mpool.cli.serving  mpool.config  1  start-up
mpool.cli.serving  mpool.errors  3  start-up
mpool.cli.serving  mpool.pool  1  start-up
mpool.cli.serving  mpool.server.errors  1  optional
mpool.cli.serving  mpool.server.serving  1  optional
mpool.cli.serving  mpool.server.settings  2  optional
mpool.cli.serving  mpool.server.worker  1  optional
mpool.cli.serving  mpool.tasks.captures  1  start-up
mpool.cli.talking  mpool.errors  2  start-up
mpool.cli.talking  mpool.models  1  start-up
mpool.cli.talking  mpool.tasks.sampling  1  start-up
mpool.cli.talking  readline  1  start-up
mpool.conversation.grammar  llguidance  3  optional
mpool.conversation.grammar  mpool._core  2  core
mpool.conversation.messages  mpool.conversation.tools  1  start-up
mpool.debug.show  importlib.metadata  1  start-up
mpool.debug.show  mpool._core  1  core
mpool.debug.show  platform  1  start-up
mpool.images.loading  PIL  5  start-up
mpool.images.loading  mpool.images.fetching  1  start-up
mpool.images.preparing  PIL  1  start-up
mpool.integrations.llm  mpool.aio  1  start-up
mpool.integrations.ray.parquet  tqdm  1  start-up
mpool.integrations.ray.pools  mpool.integrations.ray._share  1  optional
mpool.integrations.ray.pools  ray.util.metrics  1  optional
mpool.model  mpool._functions  2  start-up
mpool.models.describing  mpool.models.formats  1  start-up
mpool.models.describing  mpool.models.formats.gguf_model  1  start-up
mpool.models.describing  mpool.models.formats.hf_folder  1  start-up
mpool.models.describing  mpool.models.sources  5  start-up
mpool.models.sources.hub  huggingface_hub  5  start-up
mpool.models.sources.hub  huggingface_hub.utils  1  start-up
mpool.models.sources.pip  importlib.metadata  1  start-up
mpool.models.sources.progress  tqdm  1  start-up
mpool.models.store  filelock  1  start-up
mpool.native_calls  asyncio  1  start-up
mpool.pool  mpool._core  1  core
mpool.pool  mpool._functions  1  start-up
mpool.pool  mpool.models  4  start-up
mpool.pool  mpool.models.catalogue  1  start-up
mpool.pool  mpool.runtime  7  start-up
mpool.pool  mpool.runtime.health  1  start-up
mpool.pool  mpool.tasks  2  start-up
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
mpool.server  mpool.server.application  1  optional
mpool.server.application  mpool.config  1  start-up
mpool.server.application  mpool.pool  1  start-up
mpool.server.application  mpool.server.settings  1  optional
mpool.server.application  starlette.middleware.cors  1  optional
mpool.server.models  mpool.model  1  start-up
mpool.server.models  mpool.models  4  start-up
mpool.server.ollama_models  mpool.models  1  start-up
mpool.server.openai.responses  mpool.results  1  start-up
mpool.server.openapi  mpool.server.application  1  optional
mpool.server.operational  mpool.server.openapi  1  optional
mpool.server.serving  resource  1  start-up
mpool.server.settings  mpool.models  1  start-up
mpool.server.settings  mpool.models.store  1  start-up
mpool.tasks.async_streams  mpool._renamed  1  start-up
mpool.tasks.chat_prompt  mpool.conversation  1  start-up
mpool.tasks.chat_prompt  mpool.conversation.tools  2  start-up
mpool.tasks.images_result  PIL  1  start-up
mpool.tasks.images_result  PIL.PngImagePlugin  1  start-up
mpool.tasks.images_result  numpy  1  core
mpool.tasks.jobs  mpool.runtime.watching  1  start-up
mpool.tasks.jobs  mpool.tasks.async_streams  1  start-up
mpool.tasks.jobs  mpool.tasks.vectors  2  start-up
mpool.tasks.options  hashlib  1  start-up
mpool.tasks.requests  mpool.conversation  1  start-up
mpool.tasks.requests  mpool.images  1  start-up
mpool.tasks.requests  mpool.tasks.chat_prompt  2  start-up
mpool.tasks.requests  mpool.tasks.image_embedding  1  start-up
mpool.tasks.requests  mpool.tasks.rerank  1  start-up
mpool.tasks.requests  mpool.tasks.text_to_image  1  start-up
mpool.tasks.requests  mpool.tasks.text_to_text  2  start-up
mpool.tasks.requests  mpool.tasks.verbs  1  start-up
mpool.tasks.requests  mpool.tasks.vision  2  start-up
mpool.tasks.running  mpool.tasks.async_streams  1  start-up
mpool.tasks.running  mpool.tasks.iterating  1  start-up
mpool.tasks.running  mpool.tasks.jobs  1  start-up
mpool.tasks.running  mpool.tasks.streams  1  start-up
mpool.tasks.running  mpool.tasks.text_to_image  1  start-up
mpool.tasks.steps  asyncio  1  start-up
mpool.tasks.steps  mpool.runtime.watching  2  start-up
mpool.tasks.steps  mpool.tasks.jobs  1  start-up
mpool.tasks.text_to_image  mpool._renamed  1  start-up
mpool.tasks.text_to_image  mpool.tokenizers  1  start-up
mpool.tasks.text_to_image  sys  1  start-up
mpool.tasks.text_to_text  mpool.conversation  1  start-up
mpool.tasks.text_to_text  mpool.conversation.tools  3  start-up
mpool.tasks.text_to_text  mpool.tasks.captures  1  start-up
mpool.tasks.vectors  tqdm.auto  1  start-up
mpool.tasks.vision  mpool.images  1  start-up
mpool.tokenizers  mpool.tokenizers.opening  1  facade
mpool.tokenizers  mpool.tokenizers.tokenizer  1  facade
mpool.tokenizers.gguf_build  tokenizers  6  start-up
mpool.tokenizers.gguf_part  mpool.tokenizers.gguf_build  1  start-up
mpool.tokenizers.gguf_part  tokenizers  1  start-up
mpool.tokenizers.json_tokenizer  tokenizers  2  start-up
mpool.tokenizers.native  tokenizers  1  start-up
mpool.tokenizers.older_files  tokenizers  3  start-up
mpool.tokenizers.opening  mpool.tokenizers.gguf_tokenizer  1  start-up
mpool.tokenizers.opening  mpool.tokenizers.json_tokenizer  1  start-up
"""
