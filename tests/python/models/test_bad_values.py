"""Bad values of every key that a reader of model files asks for, and the whole text of each error.

The files of ``bad_values`` have the configurations, the keys that their readers know, and the outcomes. A row that
several configurations have is written once, and their ``same rows`` name the configuration that has it.
``unknown_keys.json`` has the outcomes of keys that no reader knows. This writes all outcomes again, after a reader or
a text changed on purpose, or for the configuration of a new family in a file of its own:

    PYTHONPATH=tests/python/helpers python tests/python/models/test_bad_values.py
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import badvalues
from mpool.errors import FormatError
from mpool.models import architectures, origins
from mpool.models.families import llama, reading, table
from mpool.models.fields import Fields
from mpool.models.formats import (gguf_model, hf_config, hf_quantised, image_networks, image_processor, internvl,
                                  lfm2_vl, pipelines, pixtral, vision_folder, vision_gguf)
from mpool.models.formats.pipeline_tensors import Transformer

#: The rows of Llama are those of most decoders, so they come first.
FILES = sorted(Path(__file__).with_name("bad_values").glob("*.json"), key=lambda file: (file.stem != "llama", file))
STORED: dict[Path, dict[str, Any]] = {file: json.loads(file.read_text("utf-8")) for file in FILES}
COMMITTED = badvalues.whole({name: rows for tables in STORED.values() for name, rows in tables.items()})
NAME = "config.json"


class Files:
    """A folder whose JSON files all have the same content."""

    path = "/m"

    def __init__(self, values: Any) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        return name == image_processor.NAME

    def names(self) -> list[str]:
        return []

    def fields(self, name: str) -> Fields:
        return Fields.of(self.values, file=NAME)


def _network(embeds: bool) -> Callable[[Any], Any]:
    def read(values: Any) -> Any:
        config = Fields.of(values, file=NAME)
        row, found = hf_config.read_config(config, embeds)
        return row.name, found, architectures.sizes(
            row, found.kv, file=NAME, token_types=found.token_types,
            own=lambda key: origins.key_in_config(Fields(values, file=NAME), key, row.name))
    return read


def _vision(values: Any) -> Any:
    config = Fields.of(values, file=NAME)
    found = vision_folder.READERS[str(config.get("model_type"))](config)
    return found.name, found.text.values, found.encoder, found.projector, found.kv


def _part(method: str, *given: Any) -> Callable[[Any], Any]:
    """Return a reader of a part of a pipeline, without its weights and tokenizer."""

    class Reader(pipelines._PipelineReader):
        def config(self, part: str, classes: tuple[str, ...]) -> Any:
            return self.folder, self.folder.fields(NAME)

        def weights(self, subfolder: Any, kind: str) -> Any:
            return {}

        def add(self, slices: Any, tensors: Any, ignored: Any = ()) -> None:
            self.tensors += [*itertools.islice(slices, 300), ignored]  # a size may be huge

        def _tokenizer(self, part: str, pad: str, clip: bool) -> tuple[str, str]:
            return part, pad

    def read(values: Any) -> Any:
        reader = Reader(Files(values), Fields({}, file="model_index.json"))  # type: ignore[arg-type]
        return getattr(reader, method)(*given), reader.kv, reader.tensors
    return read


def _gguf(values: Any) -> Any:
    """Read the keys of a GGUF file without tensors."""
    table = Fields.of(values, file=NAME)
    name = table.str("general.architecture")
    row = architectures.find(architectures.IN_GGUF, name, file=NAME, field="general.architecture")[0]
    kv = {row.name + key[len(name):]: value for key, value in values.items() if key.startswith(f"{name}.")}
    gguf_model._merge_layer_sizes(kv, row, table, name)
    kv[f"{row.name}.vocab_size"] = gguf_model._vocabulary_rows(table, name, {"token_embd.weight": (9, 8)}, NAME)
    gguf_model._add_defaults(table, row, name, kv)
    size = architectures.sizes(row, kv, file=NAME, token_types=0,
                               own=lambda key: origins.key_in_gguf(key, row.name, name))
    tokens = gguf_model._tokens(table)
    if row.capability == "text_embedding":
        return kv, size, gguf_model._embedding(table, name, kv, size, [])
    return kv, size, gguf_model._generation(table, tokens, size), gguf_model._license(table)


def _settings(family: Any, any_size: bool) -> Callable[[Any], Any]:
    """Return a reader of the image processor of a family with an image encoder of its own."""
    encoder = image_networks.NetworkSpec(family.ARCHITECTURE, {}, hidden_size=48, patch_size=16, image_size=448,
                                         any_size=any_size)
    return lambda values: family._read_settings(Files(values), encoder, 64, 2, 5)


_SIZES = Transformer(flux=False, layers=1, singles=0, heads=1, head=64, channels=4, texts=1, pooled=1, guidance=False,
                     qk_norm=False, dual=(), positions=1)
#: A language model without keys.
_TEXT: Any = SimpleNamespace(spec=SimpleNamespace(architecture="gemma4", kv={}))
#: First word of a name in the file -> reader.
READERS: dict[str, Callable[[Any], Any]] = {
    "encoder": _network(True), "decoder": _network(False),
    "image": lambda values: image_networks.read(Fields.of(values, file=NAME)),
    "captions": lambda values: image_networks.read_text(Fields.of(values, file=NAME), values.get("model_type")),
    "vision": _vision,
    "quantised": lambda values: hf_quantised.read_scheme(Fields.of(values, file=NAME)),
    "processor": lambda values: image_processor.read(Files(values)),  # type: ignore[arg-type]
    "tiles": lambda values: image_processor.read_tiling(Files(values)),  # type: ignore[arg-type]
    "cropped": lambda values: image_processor.read_pan(Files(values)),  # type: ignore[arg-type]
    "fitted": lambda values: image_processor.read_fitting(Files(values), False),  # type: ignore[arg-type]
    "resized": lambda values: image_processor.read_dynamic_size(Files(values)),  # type: ignore[arg-type]
    "scheduler": lambda values: pipelines._scheduler(Files(values)),  # type: ignore[arg-type]
    "clip": _part("clip", 0, "clip", "words", False), "projected": _part("clip", 1, "clip", "words", True),
    "t5": _part("t5", "t5", "words"), "flux": _part("transformer", True, None),
    "sd3": _part("transformer", False, None),
    "vae": _part("decoder", _SIZES), "gguf": _gguf,
    "projector": lambda values: vision_gguf._vit_settings(Fields.of(values, file=NAME), "llava"),
    "averaged": lambda values: vision_gguf._vit_settings(Fields.of(values, file=NAME), "gemma3_vision"),
    "shuffled": lambda values: vision_gguf._vit_settings(Fields.of(values, file=NAME), "idefics3"),
    "windowed": lambda values: vision_gguf._qwen_settings(Fields.of(values, file=NAME), "qwen2_5_vl"),
    "deep": lambda values: vision_gguf._qwen_settings(Fields.of(values, file=NAME), "qwen3_vl"),
    "marked": _settings(lfm2_vl, True), "lines": _settings(pixtral, True), "grid": _settings(internvl, False),
    "marks": lambda values: vision_gguf._more_settings(Fields.of(values, file=NAME), "lfm2_vl"),
    "breaks": lambda values: vision_gguf._more_settings(Fields.of(values, file=NAME), "pixtral"),
    "tiled": lambda values: vision_gguf._more_settings(Fields.of(values, file=NAME), "internvl"),
    "squares": lambda values: vision_gguf._gemma4_settings(Fields.of(values, file=NAME), "gemma4_vision", (), _TEXT),
    "patches": lambda values: vision_gguf._gemma4_settings(Fields.of(values, file=NAME), "gemma4_unified_vision", (),
                                                           _TEXT)}


#: A new family changes the list of all names, but not the outcomes of the other families.
LISTS = {", ".join(sorted(architectures.IN_CONFIG)): "every model_type",
         ", ".join(sorted(architectures.IN_GGUF)): "every architecture of GGUF files"}


def found(name: str, config: Any) -> dict[str, Any]:
    """Return the table of a reader. ``ARCH`` is the name of its architecture. Keys that all networks share are in the
    tables of two readers. The C core checks lists of tokens."""
    kind = name.split()[0]
    skipped = {"tokenizer.ggml.tokens"}
    if name not in ("encoder bert_roberta", "decoder llama"):
        skipped |= {"auto_map", "custom_pipelines", "trust_remote_code", "model_type"}
    rows = badvalues.table(READERS[kind], config, hidden=LISTS, places=lambda where: where[0] not in skipped)
    if kind in ("encoder", "decoder", "gguf"):
        arch = (config["general.architecture"] if kind == "gguf" else
                hf_config.find_architecture(Fields.of(config, file=NAME), kind == "encoder").name)
        word = rf"(?<![\w-]){re.escape(arch)}(?![\w-])"
        rows = json.loads(re.sub(word, "ARCH", json.dumps(rows, ensure_ascii=False)))
    return {"": config, "known keys": known_keys(name, config), **rows}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", COMMITTED)
def test_outcomes_are_the_committed_ones(name: str) -> None:
    config = COMMITTED[name][""]
    assert badvalues.outcome(READERS[name.split()[0]], config)[0] == ""
    badvalues.compare(COMMITTED[name], found(name, config), "test_bad_values.py")


_LIMITS = [[], [0.5, 0.1], [-1.0, 1.0], [float("inf")] * 2, [0.0, float("nan")], [0.0, 2e9], [2e9, float("inf")],
           [True, 1.0], [0.0, 1.0, 2.0]]
#: Reader, and values of Mamba-2 that contradict others, are negative, or are too large. The first key is named.
MAMBA: list[tuple[str, dict[str, Any]]] = [
    *(("decoder nemotron_h", {key: value}) for key in ("n_groups", "mamba_num_heads", "mamba_head_dim",
                                                       "ssm_state_size", "conv_kernel") for value in (0, -2, 1 << 62)),
    ("decoder nemotron_h", {"n_groups": 3}), ("decoder nemotron_h", {"n_groups": 4, "mamba_num_heads": 6}),
    ("decoder granitehybrid", {"mamba_n_heads": 7}), ("decoder granitehybrid", {"mamba_n_groups": 3}),
    ("decoder granitehybrid", {"mamba_d_head": 25}), ("decoder falcon_h1", {"mamba_n_groups": 3}),
    ("decoder falcon_h1", {"mamba_n_heads": 3, "mamba_d_ssm": 77}), ("decoder falcon_h1", {"mamba_d_head": 20}),
    ("decoder bamba", {"mamba_n_heads": 7}), ("decoder bamba", {"mamba_n_groups": 3}),
    ("decoder bamba", {"attn_layer_indices": [2]}), ("decoder bamba", {"attn_layer_indices": [-1]}),
    *((f"decoder {name}", {"time_step_limit": limits}) for limits in _LIMITS
      for name in ("nemotron_h", "granitehybrid", "falcon_h1", "bamba")),
    *((f"gguf {name}", {f"{name}.ssm.{key}": value}) for name in ("nemotron_h_moe", "granitehybrid", "falcon-h1")
      for key, values in {"group_count": (0, -1, 3, 1 << 62), "time_step_rank": (0, 1 << 62),
                          "inner_size": (0, -16, 17, 1 << 62), "state_size": (0, 1025), "conv_kernel": (0, 1, 17)
                          }.items() for value in values)]


@pytest.mark.parametrize(("name", "changes"), MAMBA)
def test_hostile_sizes_of_mamba(name: str, changes: dict[str, Any]) -> None:
    text, _ = badvalues.outcome(READERS[name.split()[0]], COMMITTED[name][""] | changes)
    assert text.startswith(f"FormatError: {NAME}: {next(iter(changes))} is ")


@pytest.mark.parametrize(("values", "at"), [([1, 1 << 63], 1), ([-1 - (1 << 63)], 0), ([7, (1 << 64) - 1, 1 << 63], 1)])
def test_integers_of_a_list_fit_64_bits_with_their_sign(values: list[int], at: int) -> None:
    """Others were a ValueError of the core, without file and key."""
    with pytest.raises(FormatError) as caught:
        Fields({"sizes": values}, file=NAME).list("sizes", of=int)
    assert (caught.value.file, caught.value.field) == (NAME, f"sizes[{at}]")
    assert Fields({"sizes": [(1 << 63) - 1, -(1 << 63)]}, file=NAME).list("sizes", of=int)


def test_sections_of_a_gguf_file_fit_the_core() -> None:
    spec = SimpleNamespace(architecture="qwen2", files=["m.gguf"], origins={},
                           kv={"qwen2.rope.dimension_sections": [2, (1 << 64) - 1, 2, 0]})
    with pytest.raises(FormatError) as caught:
        vision_gguf._rope_sections(SimpleNamespace(spec=spec))  # type: ignore[arg-type]
    assert caught.value.field == "qwen2vl.rope.dimension_sections"


#: Reader and ``model_type`` without a configuration -> why.
NOT_LISTED = {
    ("bert.read_roberta", "camembert"): "as roberta", ("bert.read_roberta", "xlm-roberta"): "as roberta",
    ("deepseek._read", "kimi_k2"): "as deepseek_v3", ("granite._read_shared", "granitemoe"): "as granitemoeshared",
    ("gemma3n._read", "gemma3n"): "text_config as of gemma3_vision",
    ("gemma4._read", "gemma4"): "text_config as of gemma3_vision",
    ("gemma4._read", "gemma4_unified"): "text_config as of gemma3_vision",
    ("gemma4._read", "gemma4_unified_text"): "as gemma4_text, with other defaults",
    ("jina_v3.read_v3", "xlm-roberta"): "chosen by the names of tensors, which these tests do not have",
    ("nomic.read_moe", "nomic_bert"): "chosen by the names of tensors, which these tests do not have"}


def test_every_reader_has_a_configuration() -> None:
    """A family without a reader of its own needs none.

    A new reader is missing: make ``bad_values/zeta.json``, ``{"decoder zeta": {"": {...}}}`` with a small config.json
    (or ``encoder zeta``; ``gguf zeta`` with the keys of a GGUF file), and run this file as a script.
    """
    listed, files = set(), set()
    for name, rows in COMMITTED.items():
        if name.split()[0] in ("encoder", "decoder"):
            row = hf_config.find_architecture(Fields.of(rows[""], file=NAME), name.startswith("encoder"))
            listed.add((row.read, rows[""]["model_type"]))
        elif name.startswith("gguf"):
            files.add(rows[""]["general.architecture"])
    missing = [(f"{row.read.__module__.rpartition('.')[2]}.{row.read.__name__}", kind)
               for row in table.ROWS for kind in row.in_config
               if row.read is not llama.read_decoder and (row.read, kind) not in listed]
    assert sorted(missing) == sorted(NOT_LISTED)
    assert files >= {name for row in table.ROWS for name in row.in_gguf if row.complete is not None}


# ---- keys that a reader does not use ---------------------------------------------------------------------------------

UNKNOWN = Path(__file__).with_name("unknown_keys.json")
#: Values of keys that change nothing in some of the families.
VALUES: tuple[Any, ...] = (None, False, True, 0, 1, 2, 0.5, 1.0, 512, "absolute", "x", [], [1], {}, {"x": 1})
_CHECKS = {"check_neutral": reading, "check_keys": image_processor, "_check_keys": pipelines}


def known_keys(name: str, given: Any) -> list[str]:
    """Return the keys of each call that checks for unknown ones, with the place of the section in the file."""
    calls = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for check, home in _CHECKS.items():
            original = getattr(home, check)

            def record(config: Fields, known: set[str], *more: Any, _original: Any = original) -> None:
                neutral = [f"{key}={values}" for table in more for key, values in sorted(table.items())]
                calls.append(f"{config.at}: {' '.join([*sorted(known), *neutral])}")
                _original(config, known, *more)

            for module in [module for place, module in sys.modules.items() if place.startswith("mpool.models.")]:
                if getattr(module, check, None) is original:
                    patch.setattr(module, check, record)
        badvalues.outcome(READERS[name.split()[0]], given)
    return calls


def other_keys(check: str, key: str) -> dict[str, list[Any]]:
    """Return error, or ``""`` -> values of a key that no reader knows."""
    found: dict[str, list[Any]] = {}
    for value in VALUES:
        config = Fields.of({key: value}, file=NAME)
        more = [image_processor.NEUTRAL] if check == "check_keys" else []
        text, _ = badvalues.outcome(lambda given: getattr(_CHECKS[check], check)(given, set(), *more), config)
        found.setdefault(badvalues.short(text.partition("; known: ")[0], f"{NAME}: {key}", value), []).append(value)
    return found


#: Check -> keys that have a row in its table.
_TABLES = {"check_neutral": [*sorted(reading._SKIPPED), *sorted(reading._NEUTRAL), "unknown"],
           "check_keys": [*sorted(image_processor.NEUTRAL), "unknown"],
           "_check_keys": [*sorted(pipelines._NEUTRAL), "unknown"]}


def unknown_keys() -> dict[str, dict[str, Any]]:
    """Return check -> keys with the same outcomes -> these."""
    made: dict[str, dict[str, Any]] = {}
    for check, keys in _TABLES.items():
        same: dict[str, list[str]] = {}
        for key in keys:
            same.setdefault(json.dumps(other_keys(check, key)), []).append(key)
        made[check] = {" ".join(names): json.loads(outcomes) for outcomes, names in same.items()}
    return made


@pytest.mark.builds
def test_unknown_keys() -> None:
    """Readers ignore keys without an effect, and refuse the others."""
    wanted, found = json.loads(UNKNOWN.read_text("utf-8")), unknown_keys()
    for check in {**wanted, **found}:
        badvalues.compare(wanted.get(check, {}), found.get(check, {}), "test_bad_values.py")


if __name__ == "__main__":
    UNKNOWN.write_text(badvalues.written(unknown_keys()), "utf-8")
    made = badvalues.shared({name: found(name, tables[name][""]) for tables in STORED.values() for name in tables})
    for file, tables in STORED.items():
        file.write_text(badvalues.written({name: made[name] for name in tables}), "utf-8")
