"""Words that readers type into the search, and the page that answers each: the search shows this page first.

Sphinx ranks pages by the words in their titles, and orders equal ranks by the alphabet. An entry of an index is worth
more than any text, so each word below becomes an entry of its page.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

#: Page -> words and phrases, separated by commas. Upper and lower case do not matter.
TERMS = {
    "settings":
        "memory limit, limit memory, memory budget, RAM, offline, no internet, air-gapped, threads, CPU threads, "
        "number of threads, CPU cores, keep alive, idle timeout, cache folder, cache directory, "
        "environment variables, configuration, configuration file, config, config file, options, pin, mirror",
    "installing":
        "install, installation, wheel, wheels, pip, compiler, Windows, macOS, ARM, Alpine, Python version, "
        "supported platforms",
    "models/precision":
        "precision, bfloat16, float32, int8, compute, compute type, accuracy, determinism, instruction set, "
        "AVX-512, AMX",
    "troubleshooting":
        "error messages, out of memory, GPU, CUDA, slow, crash, uninstall, upgrade, unsupported, limitations",
    "server/deployment": "Docker, container, systemd, nginx, reverse proxy, Kubernetes, ASGI",
    "server/metrics": "metrics, Prometheus, Grafana, health check, monitoring, log, logging",
    "server/security": "API key, token, password, authentication, CORS, TLS, HTTPS, remote access",
    "server/openai": "OpenAI, OpenAI client, base URL, OpenAI API",
    "server/anthropic": "Anthropic, Claude",
    "server/quick-start": "server, mpool serve, port",
    "server/dashboard": "dashboard, web interface, playground, events",
    "server/clients": "editor, agent, Open WebUI, Continue, Zed",
    "guides/terminal": "terminal, chat in the terminal, mpool run, REPL, history, list",
    "guides/tools": "tools, function calling, tool calls, agents",
    "guides/structured-output": "JSON, JSON schema, grammar, Pydantic, regular expression",
    "guides/adapters-and-tasks": "adapter, LoRA",
    "guides/draft-models": "draft model, speculative decoding",
    "guides/chat-and-streaming":
        "chat, streaming, stream, temperature, sampling, stop, system prompt, thinking, reasoning",
    "guides/embed-and-search":
        "embedding, embeddings, semantic search, similarity, normalize, dimensions, quantised vectors",
    "guides/sparse-and-token-vectors": "SPLADE, ColBERT, BGE-M3, sparse, late interaction, token vectors",
    "guides/search": "RAG, retrieval, hybrid search, documents, folder of files",
    "guides/rerank": "rerank, reranker, cross-encoder",
    "guides/classify": "classify, classifier, zero-shot, sentiment, NER, named entities",
    "guides/vision": "vision, image input, OCR, describe an image",
    "guides/image-generation": "image generation, text to image, Stable Diffusion, FLUX",
    "guides/image-embedding": "image search, CLIP",
    "guides/threads-and-asyncio": "asyncio, async, await, concurrency, thread safety, FastAPI, fork, multiprocessing",
    "guides/laptop":
        "laptop, battery, heat, hybrid CPU, P-cores, E-cores, hyperthreading, SMT, nice, priority, background",
    "guides/memory-and-pools": "memory, pool, unload, eviction, replace a model, swap",
    "guides/weights-in-memory": "KV cache, mixture of experts, MoE, mmap, packed weights",
    "guides/workers-and-queues":
        "workers, queue, overload, Overloaded, backpressure, circuit breaker, NUMA, retry, policy",
    "guides/process-isolation": "isolation, segmentation fault, crash isolation, child process",
    "guides/integrations": "LangChain, LlamaIndex, Haystack, Chroma, LanceDB, scikit-learn, integrations",
    "models/choosing": "which model, recommended models, best model",
    "models/families": "supported models, architectures, catalogue",
    "models/formats": "GGUF, safetensors, quantize, quantisation, AWQ, GPTQ, FP8, ONNX, tokenizer",
    "models/weights":
        "download, downloads, Hugging Face, hub, model path, local file, private repository, HF_TOKEN, "
        "reference",
    "coming-from/ollama": "Ollama, Modelfile, switch from Ollama",
    "coming-from/sentence-transformers": "sentence-transformers",
    "coming-from/llama-cpp-python": "llama.cpp, llama-cpp-python",
    "coming-from/fastembed": "fastembed",
    "distributed": "Ray, cluster, several machines, load balancer",
    "parquet": "Parquet, Ray Data, batch embedding, millions of texts",
    "benchmarks": "speed, benchmark, performance",
    "api/errors": "exceptions, error codes, errors",
    "api/embed": "embed, embed_iter, tokenize",
    "api/generate": "generate, max_tokens",
    "api/pool": "PoolConfig, submit, Job",
    "cli": "command line, shell completion, commands",
    "index": "mpool",
}


def add_entries(app: Sphinx, document: nodes.document) -> None:
    """Add the entries of a page. They have no anchor, so that the search lists the page once."""
    terms = TERMS.get(app.env.docname)
    if terms is not None:
        entries = [("single", term.strip(), "", "main", None) for term in terms.split(",")]
        document.insert(0, addnodes.index(entries=entries, inline=False))


def setup(app: Sphinx) -> dict[str, Any]:
    missing = [name for name in TERMS if not (app.srcdir / f"{name}.md").exists()]
    if missing:
        raise ValueError(f"TERMS has pages that do not exist: {', '.join(missing)}")
    app.connect("doctree-read", add_entries)
    return {"parallel_read_safe": True}
