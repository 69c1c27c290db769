"""Limits of the text side. Each is a module attribute, read when it is needed: assign to it to raise or lower it.

Files of a model and the messages of a caller are not trusted; input beyond a limit raises
:class:`mpool.errors.LimitError` (files) or :class:`mpool.errors.TemplateError` (rendering), which names the
attribute of this module that raises the limit.
"""

from __future__ import annotations

#: Characters of one text that a caller gives; no setting raises it.
MAX_CHARS = 1_000_000

#: Tokens in a vocabulary.
max_vocab_tokens: int = 1 << 20

#: Bytes of one token. The longest in published vocabularies are runs of spaces of 256 bytes.
max_token_bytes: int = 4096

#: Bytes of a ``tokenizer.json``.
max_tokenizer_json_bytes: int = 64 << 20

#: Characters of a chat template's source.
max_template_chars: int = 1 << 20

#: Words of a chat template, and nodes of its syntax tree.
max_template_nodes: int = 50_000

#: Steps of one rendering: loop iterations, calls, filters, operations, values inspected. Grows by 200 for every value
#: in the caller's messages and tools.
max_template_steps: int = 300_000

#: Characters that one rendering may produce, intermediate strings included. Grows by 32 for every character in the
#: caller's messages and tools.
max_template_text: int = 16 << 20

#: Seconds of one rendering: a second limit; normally the steps end a runaway template.
max_template_seconds: float = 10.0

#: Depth of nested calls (macros, recursive loops) in one rendering.
max_template_depth: int = 64

#: Nesting of lists and dicts in what a caller gives a template.
max_data_depth: int = 64
