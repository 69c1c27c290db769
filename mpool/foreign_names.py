"""Names in other libraries: sentence-transformers, fastembed, transformers, llama-cpp-python and others.

The errors of :mod:`mpool.checks` say which argument of mpool to use instead, those of missing attributes which function
or attribute.
"""

from __future__ import annotations

_TEXTS = ("data", "docs", "documents", "input", "inputs", "passages", "query", "sentence", "sentences", "sequences",
          "text", "text_inputs", "texts")
_MODELS = ("alias", "engine", "key", "model_id", "model_name", "model_name_or_path", "model_path", "name", "path",
           "ref", "repo_id")

#: Argument of mpool -> names that it has in other libraries. A name is suggested for functions with that argument; the
#: first row applies.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "name": ("alias", "key"),
    "new": ("ref", "source"),
    "a": ("embeddings1", "query_embeddings", "x"),
    "adapter": ("adapter_name", "lora", "lora_name", "lora_request"),
    "aggregation": ("aggregation_strategy",),
    "b": ("corpus_embeddings", "document_embeddings", "embeddings2", "y"),
    "context_length": ("max_context_length", "n_ctx", "num_ctx"),
    "corpus": ("corpus_embeddings", "document_embeddings", "documents", "passages"),
    "dimensions": ("truncate_dim",),
    "documents": ("candidates", "corpus", "docs", "passages", "sentences", "texts"),
    "factor": ("pool_factor",),
    "guidance_scale": ("cfg_scale",),
    "function_to_apply": ("activation_fct", "activation_fn"),
    "ids": ("input_ids", "token_ids", "tokens"),
    "images": ("files", "image", "img", "input", "inputs", "paths"),
    "path": ("file", "filename", "image", "images", "img"),
    "url": ("image", "image_url", "images", "path"),
    "inputs": _TEXTS,
    "labels": ("candidate_labels",),
    "draft": ("assistant_model", "draft_model"),
    "max_active": ("max_active_dims",),
    "max_tokens": ("max_completion_tokens", "max_length", "max_new_tokens", "max_output_tokens", "num_predict"),
    "messages": ("conversation", "conversations", "history"),
    "metric": ("score_function", "similarity_fct", "similarity_fn", "similarity_fn_name"),
    "model": _MODELS,
    "max_workers_per_model": ("max_workers", "num_workers", "workers"),
    "n": ("best_of", "num_images", "num_images_per_prompt", "num_return_sequences"),
    "normalize": ("normalize_embeddings",),
    "num_inference_steps": ("inference_steps", "num_steps", "steps"),
    "progress": ("show_progress", "show_progress_bar"),
    "prompt": ("content", "input", "inputs", "instruction", "message", "question", "query", "text",
               "text_inputs"),
    "queries": ("query", "query_embedding", "query_embeddings"),
    "query": ("prompt", "queries", "query_text", "question"),
    "repetition_penalty": ("no_repeat_ngram_size", "repeat_penalty"),
    "response_format": ("format", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
                        "json_schema", "logits_processor", "schema", "structured_outputs"),
    "seed": ("generator", "random_seed", "random_state"),
    "stop": ("stop_sequences", "stop_strings"),
    "task": ("input_type", "prompt_type"),
    "template": ("hypothesis_template",),
    "template_options": ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "think"),
    "text": ("input", "inputs", "prompt", "texts"),
    "texts": _TEXTS,
    "tool_choice": ("function_call",),
    "tools": ("functions",),
    "top_k": ("k", "limit", "top_n"),
    "vectors": ("corpus_embeddings", "embeddings", "input", "sentences", "texts"),
}

_COMPUTE = "set `compute`: auto, float32, float32-fast, bfloat16 or int8"
_NUMPY = "the result is a numpy array: leave it out"
_THREADS = "set PoolConfig(threads=...) or the environment variable MPOOL_THREADS"
_CACHE = "set the environment variable HF_HOME or MPOOL_CACHE"
_BATCHES = "mpool chooses its batches itself: leave it out"
_ALL_CPUS = "one request uses all CPUs: leave it out"
_UNNEEDED = "leave it out"
_ONE_ENGINE = "mpool has one engine: leave it out"
_NO_BEAMS = "mpool samples and has no beam search: leave it out"
_SAMPLER = "mpool does not have this sampler: set `top_p` or `min_p`"
_OF_EMBED = "pass it to mpool.embed"
_MAX_LENGTH = "mpool.register(name, model, max_length=...) sets the length of a model"
_IN_PROCESS = "mpool runs models in this process, without a server: leave it out"
_TOKEN = "set the environment variable HF_TOKEN"
_ZERO_SHOT = "for zero-shot classification, use mpool.classify(texts, model, labels=labels)"
_SYSTEM = 'begin the messages of mpool.chat with {"role": "system", "content": ...}'

#: Function, argument that others have -> what to do instead. It precedes :data:`ADVICE`.
ADVICE_FOR: dict[tuple[str, str], str] = {
    ("embed_image", "prompt"): 'embedders that are vision language models take it: use mpool.embed([{"image": image}], '
                               'model, prompt=...); CLIP, SigLIP and DINOv2 have no prompt for images',
}
#: Argument of another library that mpool does not need -> what to do instead.
ADVICE: dict[str, str] = {
    "api_key": _IN_PROCESS,
    "apply_softmax": 'set function_to_apply="softmax" of mpool.classify',
    "backend": _ONE_ENGINE,
    "base_url": _IN_PROCESS,
    "batch_size": _BATCHES,
    "cache_dir": _CACHE,
    "cache_folder": _CACHE,
    "cache_prompt": "mpool reuses common beginnings of prompts: leave it out",
    "callback_on_step_end": "set stream=True, and iterate over the steps",
    "candidate_labels": _ZERO_SHOT,
    "chunk_size": _BATCHES,
    "context": "mpool.chat takes the whole conversation: leave it out",
    "convert_to_numpy": _NUMPY,
    "convert_to_tensor": "the result is a numpy array: pass it to torch.from_numpy",
    "corpus_chunk_size": _BATCHES,
    "device": "mpool computes on the CPU: leave it out",
    "dimensions": _OF_EMBED,
    "do_sample": "set temperature=0 for greedy decoding",
    "dtype": _COMPUTE,
    "early_stopping": _NO_BEAMS,
    "echo": "the result has the completion only: prepend the prompt to it",
    "encoding_format": _NUMPY,
    "extra_body": "pass each option as an argument of its own",
    "hypothesis_template": _ZERO_SHOT,
    "images": "use mpool.vision(images, prompt)",
    "instructions": _SYSTEM,
    "labels": _ZERO_SHOT,
    "length_penalty": _NO_BEAMS,
    "local_files_only": "set PoolConfig(offline=True) or the environment variable MPOOL_OFFLINE=1",
    "lora_path": "load adapters with mpool.load(model, adapters={name: path}), and choose one with `adapter`",
    "max_length": _MAX_LENGTH,
    "max_seq_length": _MAX_LENGTH,
    "max_workers": "set PoolConfig(max_workers_per_model=...)",
    "messages": "use mpool.chat(messages)",
    "mini_batch_size": _BATCHES,
    "mirostat": _SAMPLER,
    "mirostat_mode": _SAMPLER,
    "model_kwargs": "pass the options of mpool themselves",
    "multi_label": _ZERO_SHOT,
    "n_batch": _BATCHES,
    "n_ctx": "the context is the model's own, and only the part in use takes memory: leave it out",
    "n_gpu_layers": "mpool computes on the CPU: leave it out",
    "n_threads": _THREADS,
    "normalize": _OF_EMBED,
    "normalize_embeddings": _OF_EMBED,
    "num_beams": _NO_BEAMS,
    "num_ctx": "only the part of the context in use takes memory; `context_length` of generate and chat limits it",
    "num_thread": _THREADS,
    "num_threads": _THREADS,
    "num_workers": _ALL_CPUS,
    "options": "pass each option as an argument of its own",
    "output": "use mpool.embed_sparse, mpool.embed_tokens or mpool.embed_all",
    "output_type": "the images of the result are Pillow images: leave it out",
    "output_value": "use mpool.embed_tokens(texts, model) for token vectors",
    "padding": _BATCHES,
    "parallel": _ALL_CPUS,
    "pool": "pass it to mpool.aio, or call the method of the pool",
    "prompt": "use mpool.generate(prompt)",
    "providers": "mpool computes on the CPU: leave it out",
    "quality": _UNNEEDED,
    "quantization": "set `compute`, or load a quantised file (`mpool quantize` makes one)",
    "query_chunk_size": _BATCHES,
    "raw": "mpool.generate passes the prompt unchanged: leave it out",
    "repeat_last_n": "the penalty is for all tokens of the prompt and the completion: leave it out",
    "return_documents": "the result has the text of each document: leave it out",
    "return_tensors": _NUMPY,
    "revision": "append it to the name of the repository: org/name@revision",
    "show_progress_bar": _UNNEEDED,
    "size": "set `width` and `height`",
    "store": _UNNEEDED,
    "stream_options": "the result of a stream has `usage`: leave it out",
    "streamer": "set stream=True, and iterate over the result",
    "strength": "mpool generates images from texts only: leave it out",
    "suffix": "write the fill-in-the-middle tokens of the model into the prompt, with parse_special=True",
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "target_devices": _ALL_CPUS,
    "template": _ZERO_SHOT,
    "tfs_z": _SAMPLER,
    "threads": _THREADS,
    "token": _TOKEN,
    "torch_dtype": _COMPUTE,
    "truncate_dim": _OF_EMBED,
    "trust_remote_code": "mpool runs no code of model files: leave it out",
    "typical_p": _SAMPLER,
    "use_auth_token": _TOKEN,
    "use_cache": "mpool reuses common beginnings of prompts: leave it out",
    "use_mlock": "mpool locks no memory: leave it out",
    "use_mmap": "set `weights`: auto, mapped or packed",
    "user": "set `tenant`",
    "verbose": "set the level of the logger mpool: logging.getLogger('mpool')",
}

_LLAMA = "mpool.integrations.llama_cpp has this class; mpool's own functions are mpool.generate and mpool.chat"
_ST = "mpool.integrations.sentence_transformers has this class; mpool's own function is "
_FUNCTIONS = {
    "CrossEncoder": _ST + "mpool.rerank", "SentenceTransformer": _ST + "mpool.embed",
    "SparseEncoder": "use mpool.embed_sparse(texts, model)",
    "Llama": _LLAMA, "LlamaGrammar": _LLAMA,
    "TextEmbedding": "use mpool.embed(texts, model), or the generator mpool.embed_iter(texts, model)",
    "SparseTextEmbedding": "use mpool.embed_sparse(texts, model)",
    "LateInteractionTextEmbedding": "use mpool.embed_tokens(texts, model)",
    "ImageEmbedding": "use mpool.embed_image(images, model)",
    "TextCrossEncoder": "use mpool.rerank(query, documents, model)",
    "AsyncClient": "use mpool.aio: its functions are coroutines, and need no server",
    "Client": "use mpool.chat, mpool.generate and mpool.embed: they need no server",
    "cos_sim": "use mpool.similarity(a, b)", "util": "use mpool.similarity and mpool.semantic_search",
    "list": "`mpool list` lists the downloaded models, mpool.ps() those in use",
    "list_models": "`mpool models` lists the models of the catalogue",
    "list_supported_models": "`mpool models` lists the models of the catalogue",
    "pipeline": "use the function of the task: mpool.generate, mpool.classify, mpool.embed",
    "pull": "mpool.load(model) downloads and loads a model; `mpool pull MODEL` only downloads it",
    "delete": "run `mpool rm MODEL`", "show": "run `mpool show MODEL`, or use mpool.get(model).description",
    "serve": "run `mpool serve`; for another ASGI server, the application is mpool.server:app",
    "stop": "use mpool.unload(model)",
}
#: Module of mpool -> its public names that ``mpool`` itself does not have.
_ELSEWHERE = {
    "aio": ("AsyncImageStream", "AsyncStream"),
    "debug": ("Capture", "CaptureComparison", "CaptureDifference", "CaptureJob", "CaptureRecord", "ModelRow",
              "ModelTable", "capture", "compare_captures", "read_capture"),
    "errors": ("DownloadError", "FileError", "FormatError", "IntegrityError", "OfflineError", "TemplateError",
               "UnsafeFormat"),
    "results": ("CapabilityPool", "Choice", "Classification", "EmbedIterator", "FinishReason", "GeneratedImage",
                "ImageStep", "LabelScore", "LabelledSpan", "Memory", "ModelHealth", "Pong", "PoolEvent",
                "RankedDocument", "RequestRecord", "Timings", "TokenClassification", "TokenLogprob", "ToolCall",
                "ToolCallDelta", "TopLogprob", "Usage", "Workers"),
    "search": ("Neighbours", "PackedTokens", "community_detection", "paraphrase_mining", "pool_tokens",
               "quantize_tokens"),
}
#: Members of pools and models that are no functions of ``mpool``.
_OF_POOLS = {"check": "use mpool.get(model).check()", "ping": "use mpool.get(model).ping()",
             "pools": "use mpool.get(model).pool.pools", "history": "use mpool.get(model).pool.history()"}
_METHODS = {
    "encode": "use {}.embed(texts)", "encode_document": 'use {}.embed(texts, task="document")',
    "encode_query": 'use {}.embed(texts, task="query")', "passage_embed": 'use {}.embed(texts, task="document")',
    "query_embed": 'use {}.embed(texts, task="query")', "create_embedding": "use {}.embed(texts)",
    "predict": "use {}.rerank(query, documents)", "rank": "use {}.rerank(query, documents)",
    "create_completion": "use {}.generate(prompt)", "create_chat_completion": "use {}.chat(messages)",
}
_TEXT = {"content": "use `text`", "delta": "use `text`", "response": "use `text`", "thinking": "use `reasoning`",
         "reasoning_content": "use `reasoning`", "done_reason": "use `finish_reason`"}

_LOOP = "mpool has no loop over single tokens: use create_completion(prompt, stream=True)"
_TRAINS = "mpool does not train models: train with sentence-transformers, and load the folder that it saves"
_UNCHANGED = "mpool does not change or save models: copy the folder of the model"
_TRANSFORMER = {"fit": _TRAINS, "old_fit": _TRAINS, "train": _TRAINS, "save": _UNCHANGED, "save_pretrained": _UNCHANGED,
                "push_to_hub": _UNCHANGED, "save_to_hub": _UNCHANGED, "half": 'pass compute="bfloat16" to the class',
                "bfloat16": 'pass compute="bfloat16" to the class', "cuda": "mpool computes on the CPU: leave it out",
                "tokenizer": "use mpool.tokenize(text, model) and mpool.count_tokens(text, model)",
                **dict.fromkeys(("_first_module", "_last_module", "children", "modules", "named_modules", "parameters"),
                                "the core of mpool computes the model, without modules of torch")}

_PARTS = ("choices", "content", "message", "text", "usage")
_CLOSE = dict.fromkeys(("abort", "aclose", "cancel", "stop"), "use close()")
_ACLOSE = dict.fromkeys(("abort", "cancel", "close", "stop"), "use aclose()")

#: Class, or ``mpool`` for the module -> attribute that another library has in its place -> what to do instead.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "mpool": {**{name: use.format("mpool") for name, use in _METHODS.items()}, **_FUNCTIONS, **_OF_POOLS,
              **{name: f"use mpool.{module}.{name}" for module, names in _ELSEWHERE.items() for name in names}},
    "Model": {**{name: use.format("model") for name, use in _METHODS.items()},
              "history": "use model.pool.history()", "pools": "use model.pool.pools",
              "close": "use model.unload()", "similarity": "use mpool.similarity(a, b)"},
    "Completion": {**_TEXT, "eval_count": "use `usage.completion_tokens`", "output_text": "use `text`",
                   "outputs": "use `choices`", "prompt_eval_count": "use `usage.prompt_tokens`"},
    "Choice": {**_TEXT, "message": "use `text`; the completion has the `message` of its first choice"},
    "Chunk": {**_TEXT, "choices": "use `text`; `index` is the number of the choice", "message": "use `text`"},
    "CrossEncoder": _TRANSFORMER, "SentenceTransformer": _TRANSFORMER,
    "Llama": {"eval": _LOOP, "sample": _LOOP, "generate": _LOOP,
              "create_chat_completion_openai_v1": "use create_chat_completion, which returns the same fields as a dict",
              "metadata": "run `mpool show MODEL`, or use mpool.get(model).description",
              "tokenizer": "use tokenize and detokenize"},
    "Stream": {**dict.fromkeys(_PARTS, "iterate over the stream, or wait for the whole completion with result()"),
               **_CLOSE},
    "ImageStream": {"images": "wait for the images with result()", "save": "use result().save(path)", **_CLOSE},
    "AsyncStream": {**dict.fromkeys(_PARTS, "iterate over the stream, or await the whole completion with result()"),
                    **_ACLOSE},
    "AsyncImageStream": {"images": "await the images with result()", "save": "use (await stream.result()).save(path)",
                         **_ACLOSE},
}


def own_name(name: str, known: list[str]) -> str | None:
    """Return the argument among ``known`` that has ``name`` in another library, or None."""
    return next((own for own, others in SYNONYMS.items() if name in others and own in known), None)
