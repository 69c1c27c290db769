"""Limits of tokenizers and chat templates. To change a limit, assign to the module attribute; it is read on every use.

A model's files and a caller's messages are not trusted. Input beyond a limit raises :class:`mpool.errors.LimitError`
(files and arguments) or :class:`mpool.errors.TemplateError` (rendering); the message names the attribute.
"""

from __future__ import annotations

#: Characters of one text of a caller. This limit is fixed.
MAX_CHARS = 1_000_000

#: Tokens in a vocabulary.
max_vocab_tokens: int = 1 << 20

#: Bytes of one token. The longest tokens in published vocabularies are runs of spaces of 256 bytes.
max_token_bytes: int = 4096

#: Characters of all tokens that are searched for in a text before any other step: the added tokens of a
#: ``tokenizer.json``, the user-defined tokens of a GGUF file. Models of speech have 65,000 of 11 characters.
max_added_chars: int = 1 << 20

#: Characters of all control tokens, for which mpool compiles a regular expression, and of the longest one. Published
#: vocabularies have up to 80,000 characters (the 6,242 unused tokens of Gemma), and control tokens of up to 50.
max_control_chars: int = 256 << 10
max_control_token_chars: int = 256

#: Bytes of a ``tokenizer.json``.
max_tokenizer_json_bytes: int = 64 << 20

#: Values in a ``tokenizer.json``, counted by its commas and brackets. The largest published vocabularies, those of
#: Gemma, have 262,144 tokens and 580,604 merges, which are 2,000,000 values.
max_tokenizer_json_values: int = 6 << 20

#: Characters of a chat template's source.
max_template_chars: int = 1 << 20

#: Tokens of a chat template's source, and nodes of its syntax tree.
max_template_nodes: int = 20_000

#: Characters that one rendering may return. Raised by 32 for every byte of the caller's messages and tools.
max_template_text: int = 16 << 20

#: CPU time of one rendering, and of compiling the template before the first one, in seconds. Raised by 1 for every
#: 1,000,000 bytes of the caller's messages and tools. A rendering that takes longer is killed.
max_template_seconds: float = 0.4

#: Memory that one rendering may use, in bytes. Raised by 64 for every byte of the caller's messages and tools.
max_template_memory: int = 256 << 20

#: Nesting depth of lists and dicts that a caller passes to a template.
max_data_depth: int = 64

#: Steps of a section of a ``tokenizer.json`` (normalizer, pre-tokenizer, post-processor or decoder), counted with the
#: lists of steps. Each step reads the whole text. Published files have up to 20.
max_tokenizer_steps: int = 64

#: How many times as long the normalizer, pre-tokenizer or post-processor of a ``tokenizer.json`` may make a text, in
#: the worst case. Published ones stay below 1,300.
max_growth: int = 4096

#: Characters of the texts of one call after the normalizer and the pre-tokenizer. Where the pre-tokenizer splits a text
#: into bytes, each byte counts. A text of MAX_CHARS characters has at most this many with every published tokenizer,
#: unless it consists of characters with long decompositions.
max_normalized_chars: int = 5_000_000

#: CPU time of tokenizing in a process of its own, in seconds; see :mod:`mpool.tokenizers.isolated`.
max_tokenizing_seconds: float = 10.0
