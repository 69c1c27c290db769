"""Published models and references of each architecture: the table of ``mpool models`` and of the README. One row per
architecture of the core. ``folder`` and ``gguf`` name the public implementation that a test compares with
on the same weights; ``tests`` are those tests: a claim without one is an error
(``tests/python/documents/test_verified.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import _core


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


_ENCODERS, _DECODERS, _IMAGES = "encodermodels.py", "paritymodels.py", "test_parity_images.py"
_GGUF, _LLAMA_CPP = "test_parity_gguf_tiny.py", "transformers, llama.cpp"


def _decoder(architecture: str, models: str, *, folder: str = "transformers", gguf: str = _LLAMA_CPP) -> Verified:
    """Both forms are made of the models of one table, and of the same files llama.cpp's results were kept."""
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
    Verified("clip_text", "texts of CLIP", "transformers", "", ((_IMAGES, "test_image_texts"),)),
    Verified("siglip_text", "texts of SigLIP and SigLIP 2", "transformers", "", ((_IMAGES, "test_image_texts"),)),
    Verified("llama_embedding", "gte-Qwen2, Stella 1.5B v5, embedders of Llama and Mistral", "transformers",
             "transformers", ((_ENCODERS, '"llama_embedding_qwen2"'), ("test_embedding_models.py", "test_stella_sizes"),
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
    _decoder("qwen3moe", "Qwen3 mixtures of experts, Qwen3-Coder"),
    _decoder("gpt_oss", "GPT-OSS"),
    _decoder("deepseek2", "DeepSeek-V2, V3 and R1, Kimi K2"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("granite", "Granite 3, and 4 without Mamba's layers"),
    _decoder("phi3", "Phi-3, Phi-4"),
    _decoder("gemma2", "Gemma 2"),
    _decoder("gemma3", "Gemma 3 (its texts)"),
    Verified("dinov2", "DINOv2", "transformers, ONNX Runtime", "",
             ((_IMAGES, "test_image_layers"), ("test_parity_dino.py", "test_real_dino_against_onnx_runtime"))),
    Verified("dinov2_with_registers", "DINOv2 with registers", "transformers", "",
             (("imagemodels.py", '"dinov2_with_registers"'),)),
    Verified("clip", "CLIP, ViT-B/32 to L/14-336", "transformers", "", (("imagemodels.py", '"clip"'),)),
    Verified("siglip", "SigLIP, SigLIP 2 of fixed sizes", "transformers", "", (("imagemodels.py", '"siglip"'),)),
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
             (("test_parity_pictures.py", "test_every_stage_and_step"),
              ("test_parity_pictures.py", "test_gguf_is_the_same_transformer"))),
    Verified("sd3", "Stable Diffusion 3, 3.5 large, turbo and medium", "diffusers", "diffusers",
             (("test_parity_pictures.py", "test_every_stage_and_step"),
              ("test_parity_pictures.py", "test_gguf_is_the_same_transformer"))),
)


def table() -> list[tuple[str, str, str, str, str]]:
    """Rows of (architecture, capability, models, reference for folders, for GGUF files), in the core's order.

    Raises:
        KeyError: an architecture of the core has no row here.
    """
    rows = {row.architecture: row for row in ROWS}
    return [(name, capability, rows[name].models, rows[name].folder, rows[name].gguf)
            for name, capability in _core.architectures()]
