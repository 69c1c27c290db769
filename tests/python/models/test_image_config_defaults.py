"""Image encoders, vision models and image processors as transformers' classes define them: the defaults of missing
keys, and the names and shapes of tensors."""

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

from mpool import errors  # noqa: E402
from mpool.models import describe  # noqa: E402
from mpool.models.fields import Fields  # noqa: E402
from mpool.models.files import Folder  # noqa: E402
from mpool.models.formats import (  # noqa: E402
    hf_config, image_networks, image_processor, internvl, lfm2_vl, pixtral, vision_folder)

SMALL = dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=72)
VISION: dict[str, Any] = dict(SMALL, image_size=32, patch_size=8)
TEXT: dict[str, Any] = dict(SMALL, vocab_size=90, max_position_embeddings=20)
QWEN: dict[str, Any] = dict(depth=3, hidden_size=48, num_heads=4, intermediate_size=72, out_hidden_size=64,
                            patch_size=7)


def _text(kind: str) -> Callable[[Fields], Any]:
    return lambda config: image_networks.read_text(config, kind)


def _vision(read: Callable[[Fields], Any]) -> Callable[[Fields], Any]:
    """A reader that returns the data of a vision model."""
    def run(config: Fields) -> Any:
        found = read(config)
        row, text = hf_config.read_config(found.text)
        kv = dict(text.kv)
        for key in ("key_length", "value_length"):  # optional: the core divides
            kv.setdefault(f"{row.name}.attention.{key}",
                          kv[f"{row.name}.embedding_length"] // kv[f"{row.name}.attention.head_count"])
        return (found.name, row.name, {**dataclasses.asdict(text), "kv": kv}, dataclasses.asdict(found.encoder),
                dataclasses.asdict(found.projector), found.kv)
    return run


#: Name -> class of the configuration, its settings, keys that select the reader, reader.
READERS: dict[str, tuple[str, dict[str, Any], set[str], Callable[[Fields], Any]]] = {
    "clip": ("CLIPConfig", {}, {"model_type"}, image_networks.read_clip),
    "clip text": ("CLIPConfig", {}, {"model_type"}, _text("clip")),
    "clip alone": ("CLIPVisionConfig", {"architectures": ["CLIPVisionModelWithProjection"]}, {"architectures"},
                   image_networks.read_clip),
    "siglip": ("SiglipConfig", {}, {"model_type"}, image_networks.read_siglip),
    "siglip text": ("SiglipConfig", {}, {"model_type"}, _text("siglip")),
    "siglip alone": ("SiglipVisionConfig", {}, {"model_type"}, image_networks.read_siglip),
    "dinov2": ("Dinov2Config", {}, {"model_type"}, image_networks.read_dinov2),
    "registers": ("Dinov2WithRegistersConfig", {}, {"model_type"}, image_networks.read_dinov2),
    "llava": ("LlavaConfig", {}, {"model_type", "vision_config", "text_config"}, _vision(vision_folder.read_llava)),
    "llava_next": ("LlavaNextConfig", {}, {"model_type", "vision_config", "text_config"},
                   _vision(vision_folder.read_llava)),
    "idefics3": ("Idefics3Config", {"vision_config": {"patch_size": 14}}, {"vision_config", "text_config"},
                 _vision(vision_folder.read_idefics3)),
    "smolvlm": ("SmolVLMConfig", {"vision_config": {"patch_size": 14}}, {"vision_config", "text_config"},
                _vision(vision_folder.read_idefics3)),
    "gemma3": ("Gemma3Config", {"vision_config": {"image_size": 896, "patch_size": 14}},
               {"vision_config", "text_config"}, _vision(vision_folder.read_gemma)),
    "lfm2_vl": ("Lfm2VlConfig", {}, {"vision_config", "text_config"}, _vision(lfm2_vl.read)),
    "mistral3": ("Mistral3Config", {"text_config": {"model_type": "mistral", "rms_norm_eps": 1e-5}},
                 {"vision_config", "text_config", "model_type"}, _vision(pixtral.read)),
    "internvl": ("InternVLConfig", {}, {"vision_config", "text_config"}, _vision(internvl.read)),
    "qwen2_vl": ("Qwen2VLConfig", {"vision_config": {"hidden_size": 8192}},
                 {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {"vision_config": {"out_hidden_size": 8192}},
                   {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "qwen3_vl": ("Qwen3VLConfig", {"vision_config": {"out_hidden_size": 4096}},
                 {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", {"vision_config": {"out_hidden_size": 2048}},
                     {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "qwen3_5": ("Qwen3_5Config", {"vision_config": {"out_hidden_size": 4096}},
                {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", {"vision_config": {"out_hidden_size": 2048}},
                    {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_qwen)),
    "gemma4": ("Gemma4Config", {"vision_config": {}, "text_config": {}},
               {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_gemma4)),
    "gemma4_unified": ("Gemma4UnifiedConfig", {"vision_config": {}, "text_config": {}},
                       {"vision_config", "text_config", "model_type"}, _vision(vision_folder.read_gemma4)),
}


#: ``model_type`` of a vision model or of an image encoder without a row of :data:`READERS` -> why.
NOT_LISTED = {"embedding_gemma2": "as gemma4_unified; transformers has no class of it"}


def test_every_reader_has_a_row() -> None:
    listed = {getattr(transformers, kind).model_type for kind, _, _, _ in READERS.values()}
    readers = {*image_networks.READERS, *vision_folder.READERS}
    assert readers - listed == set(NOT_LISTED)
    assert set(vision_folder.CLASSES) == set(vision_folder.READERS)
    assert set(image_networks.CLASSES) == set(image_networks.READERS)


def _read(name: str, values: dict[str, Any]) -> Any:
    found = READERS[name][3](Fields(json.loads(json.dumps(values)), file="config.json"))
    return dataclasses.asdict(found) if dataclasses.is_dataclass(found) and not isinstance(found, type) else found


def _without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy without the value at a path."""
    made: dict[str, Any] = json.loads(json.dumps(values))
    inner = made
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return made


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", READERS)
def test_a_key_that_is_missing_has_the_default_of_its_class(name: str) -> None:
    """For each key: without it, the configuration is read as the one that transformers makes of it."""
    kind, settings, chosen, _ = READERS[name]
    made = getattr(transformers, kind)
    base = made.from_dict(settings).to_dict()
    paths = [(key,) for key in base if key not in chosen]
    paths += [(section, key) for section in ("vision_config", "text_config") if isinstance(base.get(section), dict)
              for key in base[section] if key not in ("model_type", "out_hidden_size")]
    paths += [(*path, inner) for path in paths if len(path) == 2 and isinstance(base[path[0]][path[1]], dict)
              for inner in base[path[0]][path[1]] if isinstance(inner, str)]
    compared, wrong = 0, []
    for path in paths:
        given = _without(base, path)
        try:
            found = _read(name, given)
        except errors.MpoolError:  # required, or it does not fit the others
            continue
        compared += 1
        if found != _read(name, made.from_dict(given).to_dict()):
            wrong.append(path)
    assert compared > 10 and not wrong


@pytest.mark.parametrize("name, model, settings", [
    ("clip", "CLIPModel", {"vision_config": VISION, "text_config": TEXT, "projection_dim": 40}),
    ("clip text", "CLIPModel", {"vision_config": VISION, "text_config": TEXT, "projection_dim": 40}),
    ("clip alone", "CLIPVisionModelWithProjection", VISION | {"projection_dim": 40, "architectures": []}),
    ("siglip", "SiglipModel", {"vision_config": VISION, "text_config": TEXT}),
    ("siglip text", "SiglipModel", {"vision_config": VISION, "text_config": TEXT | {"projection_size": 56}}),
    ("siglip alone", "SiglipVisionModel", VISION),
    ("dinov2", "Dinov2Model", {key: value for key, value in VISION.items() if key != "intermediate_size"}),
    ("dinov2", "Dinov2Model", {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "mlp_ratio": 3,
                               "use_swiglu_ffn": True, "qkv_bias": False}),
    ("registers", "Dinov2WithRegistersModel", {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1,
                                               "num_register_tokens": 5}),
    ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel",
     {"depth": 3, "embed_dim": 48, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 7}),
    ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel",
     QWEN | {"fullatt_block_indexes": [1], "window_size": 56}),
    ("qwen3_vl", "Qwen3VLVisionModel",
     QWEN | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]})],
    ids=["clip", "clip-text", "clip-alone", "siglip", "siglip-text", "siglip-alone", "dinov2", "gated", "registers",
         "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_tensors_have_the_names_and_shapes_of_the_class(tmp_path: Path, name: str, model: str,
                                                        settings: dict[str, Any]) -> None:
    """Parts of a stored tensor cover it in order. Every tensor that the class saves is read or ignored."""
    safetensors = pytest.importorskip("safetensors")
    if name.startswith("qwen"):
        cls = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), model)
        config = cls.config_class(**settings)
        given = Fields(json.loads(json.dumps(config.to_dict())), file="config.json")
        found = image_networks.read_qwen(given, name, (0,))
        network = found.network
        assert (found.merge, found.output, found.taps) == (2, 64, (0, 2) if name == "qwen3_vl" else ())
        also = ("merger.mlp", "merger.linear_fc", "deepstack_merger_list")
    else:
        config, cls = getattr(transformers, READERS[name][0]).from_dict(settings), getattr(transformers, model)
        network = READERS[name][3](Fields(json.loads(json.dumps(config.to_dict())), file="config.json"))
        also = {"clip": ("text_",), "clip text": ("vis",), "siglip": ("text_",), "siglip text": ("vis",)}.get(name, ())
    cls(config).save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    prefix = next(one for one in network.prefixes if one + network.tensors[0].source in stored)
    parts: dict[str, list[int]] = {}
    for tensor in network.tensors:
        assert stored[prefix + tensor.source] == tensor.stored_shape, tensor
        parts.setdefault(prefix + tensor.source, []).append(tensor.part)
        assert tensor.parts == sum(one.source == tensor.source for one in network.tensors)
    assert all(found == list(range(len(found))) for found in parts.values())
    assert len({tensor.name for tensor in network.tensors}) == len(network.tensors)
    ignored = re.compile("|".join(network.ignored) or r"(?!)")
    left = [key for key in stored if key not in parts and not ignored.fullmatch(key) and not key.startswith(also)]
    assert left == [key for key in left if key.startswith("logit_")]


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_descriptions_of_both_encoders_say_what_the_core_does(tmp_path: Path, family: str) -> None:
    import imagemodels

    found = describe(str(imagemodels.save(imagemodels.randomised(family, 1), family, tmp_path / family)), "m")
    text, = found.networks
    assert found.image is not None and text.embedding is not None
    assert found.image.normalize is found.spec.kv["mpool.normalize"] is False
    assert text.embedding.normalize is text.spec.kv["mpool.normalize"] is False
    assert list(text.embedding.pooling) == text.spec.kv["mpool.pooling"] == ["lasttoken"]
    assert text.embedding.max_tokens == text.spec.kv[f"{family}_text.context_length"]


# ---- image processors ----------------------------------------------------------------------------------------------

def _processor(tmp_path: Path, values: dict[str, Any], joint: bool = False) -> Folder:
    made = tmp_path / "processor"
    made.mkdir(exist_ok=True)
    for name in (image_processor.NAME, image_processor.JOINT_NAME):
        (made / name).unlink(missing_ok=True)
    (made / (image_processor.JOINT_NAME if joint else image_processor.NAME)).write_text(
        json.dumps({"image_processor": values} if joint else values))
    return Folder(str(made))


PROCESSORS: dict[str, tuple[str, Callable[[Folder], Any]]] = {
    **{name: (name + "Pil", image_processor.read) for name in (
        "CLIPImageProcessor", "BitImageProcessor", "SiglipImageProcessor", "ViTImageProcessor", "LlavaImageProcessor",
        "LlavaNextImageProcessor")},
    **{name: (name + "Pil", image_processor.read_tiling) for name in ("Idefics3ImageProcessor",
                                                                     "SmolVLMImageProcessor")},
    "Qwen2VLImageProcessor": ("Qwen2VLImageProcessorPil", image_processor.read_dynamic_size)}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_missing_key_of_a_processor_has_the_default_of_its_class(tmp_path: Path, name: str) -> None:
    reference, read = PROCESSORS[name]
    values: dict[str, Any] = json.loads(getattr(transformers, reference)().to_json_string())
    values["image_processor_type"] = name
    whole = read(_processor(tmp_path, values))
    for key in values:
        if key not in ("image_processor_type",):
            assert read(_processor(tmp_path, {one: value for one, value in values.items() if one != key})) == whole, key
    for suffix in ("", "Fast", "Pil"):
        only = {"image_processor_type": name + suffix}
        assert read(_processor(tmp_path, only)) == read(_processor(tmp_path, only, joint=True)) == whole


def test_a_processor_without_a_class_is_the_usual_one(tmp_path: Path) -> None:
    empty = _processor(tmp_path, {})
    found = image_processor.read(empty), image_processor.read_tiling(empty), image_processor.read_dynamic_size(empty)
    for one, name in zip(found, ("CLIPImageProcessor", "Idefics3ImageProcessor", "Qwen2VLImageProcessor")):
        assert PROCESSORS[name][1](_processor(tmp_path, {"image_processor_type": name})) == one
    for name, read in (("CLIPFeatureExtractor", "CLIPImageProcessor"), ("ViTFeatureExtractor", "ViTImageProcessor")):
        old = image_processor.read(_processor(tmp_path, {"feature_extractor_type": name}))
        assert old == image_processor.read(_processor(tmp_path, {"image_processor_type": read}))


@pytest.mark.parametrize("read, values, expected", [
    ("read", {"size": 100, "crop_size": 90}, {"resize": ("shortest", 100), "crop": (90, 90)}),
    ("read", {"size": {"height": 7, "width": 8}, "crop_size": {"height": 5, "width": 6}},
     {"resize": ("exact", 7, 8), "crop": (5, 6)}),
    ("read", {"do_resize": False, "do_center_crop": False, "resample": 1}, {"resize": None, "crop": None,
                                                                            "resample": 1}),
    ("read", {"size": 1, "crop_size": 4096}, {"resize": ("shortest", 1), "crop": (4096, 4096)}),
    ("read", {"do_rescale": False, "do_normalize": False}, {"kv": {"mpool.image.rescale_factor": 1.0}}),
    ("read", {"image_mean": 0.25, "image_std": [1, 2, 4], "rescale_factor": 0.5}, {"kv": {
        "mpool.image.rescale_factor": 0.5, "mpool.image.mean": [0.25] * 3, "mpool.image.std": [1.0, 2.0, 4.0]}}),
    ("read", {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [0.1, 0.999, 2.0]},
     {"pad_square": (25, 254, 255)}),
    ("read", {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [0.0, -1.0, 1.0]},
     {"pad_square": (0, 0, 255)}),
    ("read", {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [1e308, 0.5, -1e308]},
     {"pad_square": (255, 127, 0)}),
    ("read", {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[1, 4096], [30, 40]]},
     {"grid": ((1, 4096), (30, 40)), "pad_square": None}),
    ("read_tiling", {"size": {"longest_edge": 4096}, "max_image_size": {"longest_edge": 1},
                     "do_image_splitting": False, "resample": 0},
     {"longest": 4096, "side": 1, "split": False, "resample": 0}),
    ("read_tiling", {"do_resize": False}, {"longest": None, "side": 364, "split": True}),
    ("read_dynamic_size", {"size": {"shortest_edge": 5, "longest_edge": 70}, "patch_size": 3, "merge_size": 4,
                           "do_resize": False, "resample": 5},
     {"min_pixels": 5, "max_pixels": 70, "patch": 3, "merge": 4, "resize": False, "resample": 5}),
    ("read_dynamic_size", {"min_pixels": 6, "max_pixels": 6, "size": {"shortest_edge": 9}},
     {"min_pixels": 6, "max_pixels": 6})])
def test_values_of_a_processor(tmp_path: Path, read: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = getattr(image_processor, read)(_processor(tmp_path, values))
    assert {name: getattr(found, name) for name in expected} == expected
