"""Names that the package shares with the C core: capabilities, scheduling policies, and where workers run."""

from __future__ import annotations

#: Capabilities, in the order of the core, which has a pool of workers for each.
CAPABILITIES = ("text_embedding", "text_to_text", "image_embedding", "vision", "text_to_image")
#: Capability -> tasks of its models in lists, named like the commands that use them. The first one is the default.
TASKS = {"text_embedding": ("embed", "rerank", "classify"), "text_to_text": ("chat",),
         "image_embedding": ("embed-image",), "vision": ("vision",), "text_to_image": ("generate-image",)}
#: Policies that choose the worker of a request; :class:`mpool.PoolConfig` describes them.
POLICIES = ("shared", "pack", "p2c", "sequential")
#: Where the workers of a model run: in threads of this process, or each in a process of its own.
ISOLATION = ("thread", "process")
#: How the weights of text models are used; :class:`mpool.PoolConfig` describes the values.
WEIGHTS = ("auto", "mapped", "packed")
#: Compute types that a request can ask for; ``"auto"`` leaves the choice to the core.
COMPUTE = ("auto", "float32", "float32-fast", "bfloat16", "int8")

#: Values of the option ``kv_dtype``.
KV_DTYPES = ("auto", "int8")

#: Functions that compare two vectors.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

#: Types of the files that ``mpool quantize`` writes.
QUANTIZED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "Q5_0", "F16", "BF16", "F32")
