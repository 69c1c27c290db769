"""SmolLM3: Llama with no RoPE in every fourth layer (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import BIASES, decoder, decoder_row, finish, read_common
from .reading import MAX_LAYERS
from .rows import Architecture, Config

INTERVAL = 4


def rope_layers(layers: int, interval: int) -> list[int]:
    """Return for each layer the value that the C core expects: 0 with RoPE, -1 without."""
    return [0 if (i + 1) % interval else -1 for i in range(layers)]


def _with_windows(config: Fields, layers: int) -> Fields:
    """Add ``layer_types`` to a configuration that omits them: the layers without RoPE use the sliding window."""
    given = config.list("no_rope_layers", None, of=int, limit=layers)
    flags = given or [value + 1 for value in rope_layers(layers,
                                                          config.int("no_rope_layer_interval", INTERVAL, low=1))]
    kinds = ["full_attention" if rotated else "sliding_attention" for rotated in flags]
    return Fields({**config.values, "layer_types": kinds}, file=config.file, at=config.at)


def _read(config: Fields, row: Architecture) -> Config:
    layers = config.int("num_hidden_layers", low=1)
    if config.get("layer_types") is None and config.bool("use_sliding_window", False) and layers <= MAX_LAYERS:
        config = _with_windows(config, layers)
    kv, used = read_common(config, row, theta=2000000.0)
    given = config.list("no_rope_layers", None, of=int, limit=layers)
    if given is None:
        kv["mpool.rope_layers"] = rope_layers(layers, config.int("no_rope_layer_interval", INTERVAL, low=1))
    elif len(given) != layers or set(given) - {0, 1}:
        config.fail("no_rope_layers", given, f"{layers} values, one per layer: 1 (with RoPE) or 0 (without)")
    else:
        kv["mpool.rope_layers"] = [rotated - 1 for rotated in given]
    return finish(config, row, kv, used | {"no_rope_layers", "no_rope_layer_interval"}, tied=True)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    kv["mpool.rope_layers"] = rope_layers(table.int(f"{name}.block_count", low=1), INTERVAL)


ROWS = (
    decoder_row("smollm3", ("SmolLM3ForCausalLM",), decoder(), read=_read, complete=_complete, full_layers=0,
                biases=BIASES, defaults={"num_key_value_heads": 4}),
)
