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
        tests: ids of the tests below ``tests/python/``, as pytest prints them. In brackets a part of the parameters is
            enough: ``[llama]`` stands for ``[llama-1]``, ``[llama-2]`` and so on.
    """

    architecture: str
    models: str
    folder: str
    gguf: str
    tests: tuple[str, ...]


_ENCODER = "parity/test_parity_encoders.py::test_encoder_layers"
_ENCODER_GGUF = "parity/test_parity_gguf_tiny.py::test_encoder"
#: Results of public code that tests cannot run: tests/parity/encoder/make_encoder_goldens.py names code and commits.
_RECORDED = "parity/test_parity_encoders.py::test_encoder_against_public_code"
_RECORDED_GGUF = "parity/test_parity_gguf_tiny.py::test_encoder_against_llama_cpp"
_DECODER = "parity/test_parity_tiny.py::test_decoder_layers"
_DECODER_GGUF = "parity/test_parity_gguf_tiny.py::test_decoder"
_DECODER_LLAMA_CPP = "parity/test_parity_gguf_tiny.py::test_decoder_against_llama_cpp"
_KL = "parity/test_parity_gguf.py::test_divergence_is_no_larger_than_llama_cpps"
_KL_TEXTS = "parity/test_parity_gguf.py::test_divergence_of_several_texts_is_not_larger_than_llama_cpps"
_IMAGE = "parity/test_parity_images.py::test_image_layers"
_IMAGE_TEXT = "parity/test_parity_images.py::test_image_texts"
_VISION_EMBEDDING = "parity/test_parity_vision_embedding.py::test_vectors_of_texts_images_and_both"
_EMBEDDING_GEMMA2 = "parity/test_parity_embedding_gemma2.py::test_vectors_of_texts_images_and_both"
_VISION = "parity/test_parity_vision.py::test_rows_and_logits"
_VISION_GGUF = "parity/test_vision_gguf.py::test_gguf_pair_matches_transformers"
_STAGES = "parity/test_parity_image_generation.py::test_every_stage_and_step"
_STAGES_GGUF = "parity/test_parity_image_generation.py::test_gguf_matches_diffusers"
_EMBEDDING = "models/test_embedding_models.py::"
_TASKS = "parity/test_parity_task_adapters.py::"
_LLAMA_CPP = "transformers, llama.cpp"


def _decoder(architecture: str, models: str, *, folder: str = "transformers", gguf: str = _LLAMA_CPP,
             more: tuple[str, ...] = ()) -> Verified:
    """Return the row of a decoder. Its folders and GGUF files are tested with the models of one table. If ``gguf``
    names llama.cpp, results were also recorded with it on the same files. ``more``: ids of further tests."""
    tests = [f"{_DECODER}[{architecture}]", *([f"{_DECODER_GGUF}[{architecture}]"] if gguf else []),
             *([f"{_DECODER_LLAMA_CPP}[{architecture}]"] if "llama.cpp" in gguf else [])]
    return Verified(architecture, models, folder, gguf, (*tests, *more))


def _image(architecture: str, models: str, reference: str = "transformers", more: tuple[str, ...] = ()) -> Verified:
    """Return the row of a network that embeds images. ``more``: ids of further tests."""
    return Verified(architecture, models, reference, "", (f"{_IMAGE}[{architecture}]", *more))


ROWS = (
    Verified("bert", "all-MiniLM, bge, e5, gte, arctic-embed and other BERTs; RoBERTa; XLM-RoBERTa: multilingual-e5, "
             "bge-m3 (dense), arctic-embed-l v2; DistilBERT; ELECTRA; ALBERT",
             "sentence-transformers, transformers", "transformers",
             ("parity/test_parity_minilm.py::test_real_sentences", "parity/test_parity_tiny.py::test_bert_layers",
              f"{_ENCODER}[bert_roberta]", f"{_ENCODER}[bert_xlm_roberta]",
              f"{_ENCODER}[bert_xlm_roberta_long]", f"{_ENCODER}[bert_distilbert]", f"{_ENCODER}[bert_electra]",
              f"{_ENCODER}[bert_albert]", f"{_ENCODER}[bert_albert_inner]",
              "parity/test_parity_gguf_tiny.py::test_bert", f"{_ENCODER_GGUF}[bert_xlm_roberta]",
              f"{_ENCODER_GGUF}[bert_distilbert]")),
    Verified("static_embedding", "static embeddings: model2vec (potion, M2V), StaticEmbedding of sentence-transformers "
             "(static-retrieval-mrl-en-v1)", "model2vec, sentence-transformers", "",
             ("models/test_static_embeddings.py::test_model2vec",
              "models/test_static_embeddings.py::test_sentence_transformers")),
    Verified("nomic_bert", "nomic-embed-text v1, v1.5", "transformers", "transformers",
             (f"{_ENCODER}[nomic_bert]", f"{_ENCODER}[nomic_bert_published]",
              f"{_ENCODER_GGUF}[nomic_bert_published]")),
    Verified("nomic_bert_moe", "nomic-embed-text v2 moe", "contrastors", "llama.cpp",
             (f"{_RECORDED}[nomic_bert_moe]", f"{_ENCODER}[nomic_bert_moe]", f"{_RECORDED_GGUF}[nomic_bert_moe]",
              f"{_ENCODER_GGUF}[nomic_bert_moe]")),
    Verified("mpnet", "all-mpnet-base-v2", "transformers", "", (f"{_ENCODER}[mpnet]",)),
    Verified("modern_bert", "ModernBERT, nomic modernbert-embed, gte-modernbert, granite-embedding r2, Ettin's "
             "encoders", "transformers", "transformers",
             (f"{_ENCODER}[modern_bert]", f"{_ENCODER}[modern_bert_granite]", f"{_ENCODER_GGUF}[modern_bert]")),
    Verified("gte", "gte v1.5 and multilingual, Stella 400M v5, arctic-embed-m v2", "transformers", "",
             (f"{_ENCODER}[gte]", f"{_ENCODER}[gte_arctic]", f"{_ENCODER}[gte_published]")),
    Verified("jina_bert_v2", "jina-embeddings-v2, jina-reranker-v1", "a fork of Jina AI's modeling_bert.py",
             "llama.cpp", (f"{_RECORDED}[jina_bert_v2]", f"{_ENCODER}[jina_bert_v2]", f"{_RECORDED_GGUF}[jina_bert_v2]",
              f"{_ENCODER_GGUF}[jina_bert_v2]")),
    Verified("jina_bert_v2_code", "jina-embeddings-v2-base-code", "text-embeddings-inference", "llama.cpp",
             (f"{_RECORDED}[jina_bert_v2_code]", f"{_ENCODER}[jina_bert_v2_code]",
              f"{_RECORDED_GGUF}[jina_bert_v2_code]", f"{_ENCODER_GGUF}[jina_bert_v2_code]")),
    Verified("jina_bert_v3", "jina-embeddings-v3 with its task adapters, jina-colbert-v2",
             "sentence-transformers, transformers", "",
             (f"{_ENCODER}[jina_bert_v3]", f"{_ENCODER}[jina_bert_v3_published]", f"{_TASKS}test_v3_states",
              f"{_TASKS}test_v3_embeddings", "parity/test_parity_retrieval.py::test_jina_colbert")),
    Verified("deberta_v2", "DeBERTa v2 and v3 without a convolution: mxbai-rerank v1, nli-deberta-v3",
             "transformers", "",
             (f"{_ENCODER}[deberta_v2]", f"{_ENCODER}[deberta_v2_own]", f"{_ENCODER}[deberta_v2_narrow]",
              "api/test_rerank.py::test_scores_match_cross_encoder[deberta_v3]")),
    Verified("clip_text", "text encoder of CLIP", "transformers", "", (f"{_IMAGE_TEXT}[clip]",)),
    Verified("siglip_text", "text encoder of SigLIP and SigLIP 2", "transformers", "", (f"{_IMAGE_TEXT}[siglip]",)),
    Verified("llama_embedding", "gte-Qwen2, Stella 1.5B v5, EuroBERT, jina-embeddings-v5-text-nano, embedding models "
             "based on Llama and Mistral", "transformers", "transformers",
             (f"{_ENCODER}[llama_embedding_eurobert]", f"{_ENCODER}[llama_embedding_eurobert_published]",
              f"{_ENCODER_GGUF}[llama_embedding_eurobert]",
              f"{_ENCODER}[llama_embedding_qwen2]", f"{_ENCODER}[llama_embedding_published]",
              f"{_ENCODER}[llama_embedding_mistral]", f"{_EMBEDDING}test_stella_sizes",
              f"{_EMBEDDING}test_gguf_of_a_decoder[Qwen2]", f"{_TASKS}test_v5_states[nano]")),
    Verified("qwen3_embedding", "Qwen3-Embedding, Qwen3-Reranker, jina-embeddings-v5-text-small",
             "sentence-transformers, transformers",
             "transformers", (f"{_ENCODER}[qwen3_embedding]", f"{_EMBEDDING}test_gguf_of_a_decoder[Qwen3]",
                              f"{_TASKS}test_v5_states[small]",
                              "api/test_rerank_answers.py::test_scores_match_cross_encoder")),
    Verified("lfm2_embedding", "LFM2.5-Embedding, LFM2-ColBERT, LFM2.5-ColBERT", "transformers", "transformers",
             (f"{_ENCODER}[lfm2_embedding]", f"{_ENCODER}[lfm2_embedding_causal]",
              f"{_EMBEDDING}test_gguf_of_a_decoder[Lfm2]")),
    Verified("gemma_embedding", "EmbeddingGemma", "sentence-transformers, transformers", "transformers",
             (f"{_ENCODER}[gemma_embedding]", f"{_EMBEDDING}test_embedding_gemma",
              f"{_EMBEDDING}test_gguf_of_embedding_gemma")),
    Verified("nv_embed", "NV-Embed v2", "a fork of NVIDIA's modeling_nvembed.py", "",
             (f"{_RECORDED}[nv_embed]", "parity/test_parity_encoders.py::test_nv_embed_pools_as_public_code",
              f"{_ENCODER}[nv_embed]", f"{_EMBEDDING}test_nv_embed")),
    _decoder("llama", "Llama 2 and 3, SmolLM2, TinyLlama, Mistral, Mixtral",
             more=(f"{_DECODER}[llama_mistral]", f"{_DECODER}[llama_mixtral]", f"{_DECODER_GGUF}[llama_mixtral]",
                   f"{_KL}[smollm2]", f"{_KL_TEXTS}[smollm2]")),
    _decoder("qwen2", "Qwen2, Qwen2.5 and its Coder", more=(f"{_KL}[qwen05]",)),
    _decoder("qwen3", "Qwen3"),
    _decoder("qwen3moe", "Qwen3 MoE, Qwen3-Coder"),
    _decoder("qwen2moe", "Qwen2 MoE, Qwen1.5 MoE"),
    _decoder("qwen3next", "Qwen3-Next, Qwen3-Coder-Next"),
    _decoder("qwen35", "Qwen3.5, 3.6 and 3.8 without experts",
             more=("models/test_published.py::test_text_decoder_of_qwen3_5_with_vision",)),
    _decoder("qwen35moe", "Qwen3.5, 3.6 and 3.8 with experts",
             more=("models/test_published.py::test_text_decoder_of_qwen3_5_with_vision",
                   "parity/test_parity_gguf_tiny.py::test_layers_for_drafts_are_read_over")),
    _decoder("gpt_oss", "GPT-OSS"),
    _decoder("deepseek2", "DeepSeek-V2, V3 and R1, Kimi K2"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("granite", "Granite 3"),
    _decoder("granitehybrid", "Granite 4, with and without Mamba layers"),
    _decoder("granitemoe", "Granite 3 MoE", more=(f"{_DECODER}[granitemoe_shared]",)),
    _decoder("phi3", "Phi-3, Phi-4"),
    _decoder("gemma2", "Gemma 2"),
    _decoder("gemma3", "Gemma 3"),
    _decoder("gemma3n", "Gemma 3n (text only)", gguf="transformers"),
    _decoder("gemma4", "Gemma 4: E2B, E4B, 12B, 26B-A4B, 31B",
             more=(f"{_DECODER}[gemma4_keys]", f"{_DECODER}[gemma4_experts]", f"{_DECODER_GGUF}[gemma4_keys]",
                   f"{_DECODER_GGUF}[gemma4_experts]")),
    _decoder("olmo2", "OLMo 2 and 3", more=(f"{_DECODER}[olmo2_3]",)),
    _decoder("cohere2", "Command R7B, Command A"),
    _decoder("lfm2", "LFM2, LFM2.5"),
    _decoder("lfm2moe", "LFM2-MoE: LFM2-8B-A1B"),
    _decoder("lfm3", "LFM3", gguf=""),
    _decoder("nemotron_h", "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super"),
    _decoder("mistral3", "Ministral 3, and Mistral Small 3.1 and 3.2 (text only)"),
    _decoder("glm4", "GLM-4 and GLM-Z1 of April 2025"),
    _decoder("ernie4_5", "ERNIE 4.5 (dense)"),
    _decoder("exaone4", "EXAONE 4.0", more=(f"{_DECODER}[exaone4_window]",)),
    _decoder("seed_oss", "Seed-OSS"),
    _decoder("falcon_h1", "Falcon-H1"),
    _decoder("bamba", "Bamba", gguf=""),
    _image("dinov2", "DINOv2", "transformers, ONNX Runtime",
           ("parity/test_parity_dino.py::test_real_dino_against_onnx_runtime",)),
    _image("dinov2_with_registers", "DINOv2 with registers"),
    _image("clip", "CLIP, ViT-B/32 to L/14-336"),
    _image("siglip", "SigLIP, SigLIP 2 with fixed image sizes"),
    Verified("llava", "LLaVA 1.5 and 1.6, with CLIP or SigLIP and Llama, Mistral or Qwen2", "transformers",
             "transformers",
             (f"{_VISION}[llava]", f"{_VISION}[llava_siglip]", f"{_VISION}[llava_next]", f"{_VISION_GGUF}[llava]",
              f"{_VISION_GGUF}[llava_next]")),
    Verified("idefics3", "SmolVLM 1 and 2, Idefics3", "transformers", "transformers",
             (f"{_VISION}[smolvlm]", f"{_VISION}[idefics3]", f"{_VISION_GGUF}[smolvlm]")),
    Verified("gemma3_vision", "Gemma 3 with images (4B and larger)", "transformers", "transformers",
             (f"{_VISION}[gemma3]", f"{_VISION_GGUF}[gemma3]")),
    Verified("gemma4_vision", "Gemma 4 with images: E2B, E4B, 26B-A4B, 31B; EmbeddingGemma 2 (folders)", "transformers",
             "transformers",
             (*(f"{test}[{name}]" for test in (_VISION, _VISION_GGUF) for name in ("gemma4", "gemma4_small")),
              _EMBEDDING_GEMMA2)),
    Verified("gemma4_unified_vision", "Gemma 4 12B with images", "transformers", "transformers",
             (f"{_VISION}[gemma4_unified]", f"{_VISION_GGUF}[gemma4_unified]")),
    Verified("lfm2_vl", "LFM2-VL, LFM2.5-VL", "transformers", "transformers",
             (f"{_VISION}[lfm2_vl]", f"{_VISION_GGUF}[lfm2_vl]")),
    Verified("pixtral", "Pixtral; Mistral Small 3.1 and 3.2 and Ministral 3 with images", "transformers",
             "transformers", (f"{_VISION}[pixtral]", f"{_VISION}[mistral3]", f"{_VISION_GGUF}[pixtral]",
                              f"{_VISION_GGUF}[mistral3]")),
    Verified("internvl", "InternVL 2.5 to 3.5 of up to 14B as transformers stores them (-hf)", "transformers",
             "transformers", (f"{_VISION}[internvl]", f"{_VISION_GGUF}[internvl]")),
    Verified("qwen2_vl", "Qwen2-VL", "transformers", "transformers",
             (f"{_VISION}[qwen2_vl]", f"{_VISION_GGUF}[qwen2_vl]")),
    Verified("qwen2_5_vl", "Qwen2.5-VL", "transformers", "transformers",
             (f"{_VISION}[qwen2_5_vl]", f"{_VISION_GGUF}[qwen2_5_vl]")),
    Verified("qwen3_vl", "Qwen3-VL with and without experts; Qwen3.5, 3.6 and 3.8 with images; Qwen3-VL-Embedding and "
             "-Reranker", "transformers", "transformers",
             (*(f"{test}[{name}]" for test in (_VISION, _VISION_GGUF)
                for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")),
              f"{_VISION_EMBEDDING}[qwen3_vl]")),
    Verified("flux", "FLUX.1-schnell and dev", "diffusers", "diffusers",
             (f"{_STAGES}[flux]", f"{_STAGES}[flux, with a guidance scale]", f"{_STAGES_GGUF}[flux]")),
    Verified("sd3", "Stable Diffusion 3, 3.5 large, turbo and medium", "diffusers", "diffusers",
             (f"{_STAGES}[sd3, guided]", f"{_STAGES}[sd3, turbo]", f"{_STAGES_GGUF}[sd3]")),
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
