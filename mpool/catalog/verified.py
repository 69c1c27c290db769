"""What each architecture is known by and what it is held against: the table of ``mpool models`` and of the README.

One row an architecture of the core. ``folder`` and ``gguf`` name the public implementation that a test compares with on
the same weights; ``tests`` are those tests, so that a claim without one is an error (``tests/python/test_verified.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verified:
    """One row.

    Attributes:
        architecture: as in ``mpool._core.architectures()``.
        models: published models of the family, for people.
        folder: reference for folders of safetensors; empty if such folders are not read.
        gguf: reference for GGUF files; empty if such files are not read.
        tests: files of tests, each with a word that stands in it: the name of the compared model or test.
    """

    architecture: str
    models: str
    folder: str
    gguf: str
    tests: tuple[tuple[str, str], ...]


_ENCODERS = "encodermodels.py"
_DECODERS = "paritymodels.py"


def _decoder(architecture: str, models: str, *, folder: str = "transformers", gguf: str = "llama.cpp") -> Verified:
    return Verified(architecture, models, folder, gguf, ((_DECODERS, f'"{architecture}"'),))


_ROWS = (
    Verified("bert", "all-MiniLM, bge, e5, gte and other BERTs; RoBERTa; XLM-RoBERTa: multilingual-e5, bge-m3 (dense)",
             "sentence-transformers, transformers", "transformers",
             (("test_parity_minilm.py", "test_real_sentences"), (_ENCODERS, '"bert_xlm_roberta"'),
              ("test_parity_gguf_tiny.py", "test_bert"))),
    Verified("nomic_bert", "nomic-embed-text v1, v1.5", "transformers", "transformers",
             ((_ENCODERS, '"nomic_bert_published"'), ("test_parity_gguf_tiny.py", '"nomic_bert_published"'))),
    Verified("mpnet", "all-mpnet-base-v2", "transformers", "", ((_ENCODERS, '"mpnet"'),)),
    Verified("modern_bert", "ModernBERT, nomic modernbert-embed, gte-modernbert", "transformers", "transformers",
             ((_ENCODERS, '"modern_bert"'),)),
    Verified("gte", "gte v1.5 and multilingual, Stella 400M v5", "transformers", "", ((_ENCODERS, '"gte_published"'),)),
    Verified("jina_bert_v2", "jina-embeddings-v2", "torch, from the paper", "torch, from the paper",
             ((_ENCODERS, '"jina_bert_v2"'),)),
    Verified("clip_text", "texts of CLIP", "transformers", "", (("test_parity_images.py", "test_image_texts"),)),
    Verified("siglip_text", "texts of SigLIP and SigLIP 2", "transformers", "",
             (("test_parity_images.py", "test_image_texts"),)),
)
