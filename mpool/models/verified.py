"""Supported models and their reference implementations: the table of ``mpool models`` and of the documentation.

There is one row per architecture of the core. ``folder`` and ``gguf`` name the public implementation that tests compare
mpool with, on the same weights. ``tests`` lists these tests; ``tests/python/documents/test_verified.py`` fails if a row
has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import _core


@dataclass(frozen=True)
class Verified:
    """A row of the table.

    Attributes:
        architecture: name in ``mpool._core.architectures()``.
        models: published models of the family, as text for users.
        folder: reference implementation for safetensors folders; empty if they are not supported.
        gguf: reference implementation for GGUF files; empty if they are not supported.
        tests: pairs of a test file and a text that it contains: the name of the test or of the compared model.
    """

    architecture: str
    models: str
    folder: str
    gguf: str
    tests: tuple[tuple[str, str], ...]


_ENCODERS, _DECODERS, _IMAGES = "encodermodels.py", "paritymodels.py", "test_parity_images.py"
_GGUF, _LLAMA_CPP = "test_parity_gguf_tiny.py", "transformers, llama.cpp"


def _decoder(architecture: str, models: str, *, folder: str = "transformers", gguf: str = _LLAMA_CPP) -> Verified:
    """Return the row of a decoder. Its folders and GGUF files are tested with the models of one table; the expected
    results for GGUF files were recorded with llama.cpp on the same files."""
    return Verified(architecture, models, folder, gguf, ((_DECODERS, f'"{architecture}"'), (_GGUF, "llama_cpp")))


ROWS = (
    Verified("bert", "all-MiniLM, bge, e5, gte and other BERTs; RoBERTa; XLM-RoBERTa: multilingual-e5, bge-m3 (dense)",
             "sentence-transformers, transformers", "transformers",
             (("test_parity_minilm.py", "test_real_sentences"), (_ENCODERS, '"bert_xlm_roberta"'),
              (_GGUF, "test_bert"))),
    Verified("nomic_bert", "nomic-embed-text v1, v1.5", "transformers", "transformers",
             ((_ENCODERS, '"nomic_bert_published"'), (_GGUF, '"nomic_bert_published"'))),
    Verified("nomic_bert_moe", "nomic-embed-text v2 moe", "torch, from the paper", "torch, from the paper",
             ((_ENCODERS, '"nomic_bert_moe"'), ("tinygguf.py", '"nomic_bert_moe"'))),
    Verified("mpnet", "all-mpnet-base-v2", "transformers", "", ((_ENCODERS, '"mpnet"'),)),
    Verified("modern_bert", "ModernBERT, nomic modernbert-embed, gte-modernbert", "transformers", "transformers",
             ((_ENCODERS, '"modern_bert"'), ("tinygguf.py", '"modern_bert"'))),
    Verified("gte", "gte v1.5 and multilingual, Stella 400M v5", "transformers", "", ((_ENCODERS, '"gte_published"'),)),
    Verified("jina_bert_v2", "jina-embeddings-v2, jina-reranker-v1", "torch, from the paper",
             "torch, from the paper", ((_ENCODERS, '"jina_bert_v2"'), ("tinygguf.py", '"jina_bert_v2"'))),
    Verified("jina_bert_v2_code", "jina-embeddings-v2-base-code", "torch, from its tensors", "torch, from its tensors",
             ((_ENCODERS, '"jina_bert_v2_code"'), ("tinygguf.py", '"jina_bert_v2_code"'))),
    Verified("clip_text", "text encoder of CLIP", "transformers", "", ((_IMAGES, "test_image_texts"),)),
    Verified("siglip_text", "text encoder of SigLIP and SigLIP 2", "transformers", "",
             ((_IMAGES, "test_image_texts"),)),
    Verified("llama_embedding", "gte-Qwen2, Stella 1.5B v5, embedding models based on Llama and Mistral",
             "transformers", "transformers",
             ((_ENCODERS, '"llama_embedding_qwen2"'), ("test_embedding_models.py", "test_stella_sizes"),
              ("test_embedding_models.py", "test_gguf_of_a_decoder"))),
    Verified("qwen3_embedding", "Qwen3-Embedding, Qwen3-Reranker", "sentence-transformers, transformers",
             "transformers", ((_ENCODERS, '"qwen3_embedding"'), ("test_embedding_models.py", "test_gguf_of_a_decoder"),
                              ("test_rerank_answers.py", "test_scores_match_cross_encoder"))),
    Verified("gemma_embedding", "EmbeddingGemma", "sentence-transformers, transformers", "transformers",
             ((_ENCODERS, '"gemma_embedding"'), ("test_embedding_models.py", "test_gguf_of_embedding_gemma"))),
    Verified("nv_embed", "NV-Embed v2", "torch, from the paper", "", ((_ENCODERS, '"nv_embed"'),)),
    Verified("llama", "Llama 2 and 3, SmolLM2, TinyLlama, Mistral", "transformers", _LLAMA_CPP,
             ((_DECODERS, '"llama"'), (_DECODERS, '"llama_mistral"'), (_GGUF, "llama_cpp"),
              ("test_parity_gguf.py", "test_divergence_is_no_larger_than_llama_cpps"))),
    Verified("qwen2", "Qwen2, Qwen2.5 and its Coder", "transformers", _LLAMA_CPP,
             ((_DECODERS, '"qwen2"'), (_GGUF, "llama_cpp"),
              ("test_parity_gguf.py", "test_divergence_is_no_larger_than_llama_cpps"))),
    _decoder("qwen3", "Qwen3"),
    _decoder("qwen3moe", "Qwen3 MoE, Qwen3-Coder"),
    _decoder("gpt_oss", "GPT-OSS"),
    _decoder("deepseek2", "DeepSeek-V2, V3 and R1, Kimi K2"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("granite", "Granite 3, and 4 without Mamba layers"),
    _decoder("phi3", "Phi-3, Phi-4"),
    _decoder("gemma2", "Gemma 2"),
    _decoder("gemma3", "Gemma 3 (text only)"),
    Verified("dinov2", "DINOv2", "transformers, ONNX Runtime", "",
             ((_IMAGES, "test_image_layers"), ("test_parity_dino.py", "test_real_dino_against_onnx_runtime"))),
    Verified("dinov2_with_registers", "DINOv2 with registers", "transformers", "",
             (("imagemodels.py", '"dinov2_with_registers"'),)),
    Verified("clip", "CLIP, ViT-B/32 to L/14-336", "transformers", "", (("imagemodels.py", '"clip"'),)),
    Verified("siglip", "SigLIP, SigLIP 2 with fixed image sizes", "transformers", "",
             (("imagemodels.py", '"siglip"'),)),
    Verified("llava", "LLaVA 1.5 and 1.6, with CLIP or SigLIP and Llama, Mistral or Qwen2", "transformers",
             "transformers",
             (("test_vision_gguf.py", "test_gguf_pair_is_the_folder"),
              ("test_parity_vision.py", "test_rows_and_logits"), ("visionmodels.py", '"llava"'),
              ("visionmodels.py", '"llava_next"'))),
    Verified("idefics3", "SmolVLM, Idefics3", "transformers", "transformers",
             (("test_vision_gguf.py", "test_gguf_pair_is_the_folder"),
              ("test_parity_vision.py", "test_rows_and_logits"), ("visionmodels.py", '"smolvlm"'),
              ("visionmodels.py", '"idefics3"'))),
    Verified("qwen2_5_vl", "Qwen2.5-VL", "transformers", "transformers",
             (("test_vision_gguf.py", "test_gguf_pair_is_the_folder"),
              ("test_parity_vision.py", "test_rows_and_logits"), ("visionmodels.py", '"qwen2_5_vl"'))),
    Verified("flux", "FLUX.1-schnell and dev", "diffusers", "diffusers",
             (("test_parity_image_generation.py", "test_every_stage_and_step"),
              ("test_parity_image_generation.py", "test_gguf_is_the_same_transformer"))),
    Verified("sd3", "Stable Diffusion 3, 3.5 large, turbo and medium", "diffusers", "diffusers",
             (("test_parity_image_generation.py", "test_every_stage_and_step"),
              ("test_parity_image_generation.py", "test_gguf_is_the_same_transformer"))),
)


def table() -> list[tuple[str, str, str, str, str]]:
    """Return the rows in the core's order.

    Returns:
        tuples of architecture, capability, models, reference for folders, reference for GGUF files.

    Raises:
        KeyError: an architecture of the core has no row.
    """
    rows = {row.architecture: row for row in ROWS}
    missing = [name for name, _ in _core.architectures() if name not in rows]
    if missing:
        raise KeyError(f"ROWS of mpool/models/verified.py has no row for {', '.join(missing)}")
    return [(name, capability, rows[name].models, rows[name].folder, rows[name].gguf)
            for name, capability in _core.architectures()]
