"""Limits of the machine: the work of each measure, divided by the probe's figures.

The work of an encoder or a prefill is counted in operations: linear layers take two per weight and row, attention four
per pair of positions and component. The work of decode is counted in bytes: each token reads every weight once. Only
the experts that the router chooses for a row count.
"""

import math
import re
from typing import Any

from . import texts

#: Compute type -> the probe's figure for it.
PEAKS = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}


def work(paths: dict[str, str], count: int, prompts: list[int], depths: list[int]) -> dict[str, dict[str, Any]]:
    """Return topic -> measure -> work per text or token: operations, or bytes. ``paths`` has the models by topic."""
    return {topic: _encoding(path, count) if topic == "embed" else _decoding(path, prompts, depths)
            for topic, path in paths.items()}


def _encoding(path: str, count: int) -> dict[str, Any]:
    from mpool.models import describe
    from mpool.tokenizers import Tokenizer

    found: dict[str, Any] = {}
    encoder = describe(path)
    tokenizer = Tokenizer.from_source(encoder.tokenizer)
    most = encoder.embedding.max_tokens
    for name, batch in (("mixed", texts.mixed(count, 1)), ("short", texts.same(count, 10, 1)),
                        ("long", texts.same(count // 3, 90, 1))):
        lengths = [min(most, len(tokenizer.encode(text))) for text in batch]
        total = sum(_operations(encoder, length, length) for length in lengths)
        found[f"{name} texts/s"] = {"operations": total / len(lengths)}
    return found


def _decoding(path: str, prompts: list[int], depths: list[int]) -> dict[str, Any]:
    from mpool.models import describe

    found: dict[str, Any] = {}
    decoder = describe(path)
    for length in prompts:
        found[f"pp{length} tokens/s"] = {"operations": _operations(decoder, length, (length + 1) / 2) / length}
    for depth in depths:
        found[f"tg@{depth} tokens/s"] = {"bytes": sum(tensor.nbytes * _used(decoder, tensor)
                                                      for tensor in decoder.spec.tensors
                                                      if _is_read(decoder, tensor.name))}
    return found


def _operations(model: Any, rows: int, keys: float) -> float:
    layers, width = _facts(model)
    weights = sum(math.prod(tensor.shape) * _used(model, tensor) for tensor in model.spec.tensors
                  if tensor.name.startswith("blk."))
    return 2.0 * weights * rows + 4.0 * layers * width * rows * keys


def _facts(model: Any) -> tuple[int, int]:
    kv, name = model.spec.kv, model.spec.architecture
    return int(kv[f"{name}.block_count"]), int(kv[f"{name}.embedding_length"])


def _used(model: Any, tensor: Any) -> float:
    """Return the share of a tensor that one row multiplies: 0 for other tensors than matrices."""
    if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return 0.0
    if not re.search(r"_exps\.weight$|\.\d+\.weight$", tensor.name):
        return 1.0
    kv, name = model.spec.kv, model.spec.architecture
    return int(kv[f"{name}.expert_used_count"]) / int(kv[f"{name}.expert_count"])


def _is_read(model: Any, name: str) -> bool:
    """Return True if decode reads the tensor. It reads the token embeddings only if they are the output matrix as
    well.
    """
    tied = all(tensor.name != "output.weight" for tensor in model.spec.tensors)
    return tied or name != "token_embd.weight"


def share(measure: dict[str, Any], rate: float, frame: Any, threads: int, arithmetic: str) -> float | None:
    """Return the rate as a share of the limit, by the better of the two probes; None if the probe lacks the figure."""
    probes = [probe for probe in (frame.before, frame.after) if probe]
    if "bytes" in measure:
        best = max((probe["read_2" if threads > 1 else "read_1"] for probe in probes), default=0.0)
        return rate * measure["bytes"] / best / 1e9 if best > 0 else None
    best = max((probe.get(PEAKS[arithmetic], 0.0) for probe in probes), default=0.0) * threads
    return rate * measure["operations"] / best / 1e9 if best > 0 else None
