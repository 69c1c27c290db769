"""Configurations of vision models that do not fit: each error names its file, field, value and allowed values."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpool import errors
from mpool.models.fields import Fields
from mpool.models.files import Folder
from mpool.models.formats import image_networks, image_processor, vision_folder, vision_gguf

TEXT = {"model_type": "llama", "hidden_size": 64, "vocab_size": 90}
CLIP: dict[str, Any] = {"model_type": "clip_vision_model", "hidden_size": 48, "num_attention_heads": 4,
                        "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
#: Model -> its configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "text_config": TEXT, "vision_config": CLIP},
    "llava_next": {"model_type": "llava_next", "text_config": TEXT, "vision_config": CLIP,
                   "image_grid_pinpoints": [[32, 64], [64, 32]]},
    "idefics3": {"model_type": "idefics3", "text_config": TEXT, "vision_config": SIGLIP},
    "gemma3": {"model_type": "gemma3", "text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "lfm2_vl": {"model_type": "lfm2_vl", "text_config": {"hidden_size": 64}, "vision_config": {
        "model_type": "siglip2_vision_model", "hidden_size": 48, "num_attention_heads": 4, "patch_size": 8}},
    "mistral3": {"model_type": "mistral3", "text_config": {"hidden_size": 64}, "vision_config": {
        "model_type": "pixtral", "hidden_size": 48, "num_attention_heads": 4, "patch_size": 8, "image_size": 96}},
    "internvl": {"model_type": "internvl", "text_config": {"hidden_size": 64}, "vision_config": {
        "hidden_size": 48, "num_attention_heads": 4, "patch_size": 8, "image_size": 48}},
    "qwen2_vl": {"model_type": "qwen2_vl", "text_config": {"hidden_size": 64}, "vision_config": {
        "embed_dim": 48, "num_heads": 4, "hidden_size": 64}},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 64}, "vision_config": {
        "hidden_size": 48, "num_heads": 4, "out_hidden_size": 64}},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}, "vision_config": {
        "hidden_size": 48, "num_heads": 4, "out_hidden_size": 64}}}


def config(name: str, changes: dict[str, Any]) -> Fields:
    """Return a configuration with values changed; a dot separates a section and its key, None removes a key."""
    made = json.loads(json.dumps(CONFIGS[name]))
    for path, value in changes.items():
        *sections, key = path.split(".")
        inner = made
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
        if value is None:
            del inner[key]
    return Fields(made, file="/m/config.json")


def processor(tmp_path: Path, **values: Any) -> Folder:
    (tmp_path / image_processor.NAME).write_text(json.dumps(values))
    return Folder(str(tmp_path))


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_with_registers"])
def test_a_huge_layer_is_refused(kind: str) -> None:
    with pytest.raises(errors.FormatError, match="mlp_ratio is 1e.308, allowed: a finite number above 0, at most 1024"):
        image_networks.read_dinov2(Fields({"model_type": kind, "mlp_ratio": 1e308}, file="/m/config.json"))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_mean_colours_of_a_projector_file_are_finite(value: float) -> None:
    mean = "clip.vision.image_mean"
    with pytest.raises(errors.FormatError, match=f"{mean} is .*, allowed: three finite numbers"):
        vision_gguf._read_three(Fields({mean: [0.5, value, 0.5]}, file="/m/mmproj.gguf"), mean)


@pytest.mark.parametrize("name, changes, layers", [
    ("llava", {}, 3), ("llava", {"vision_feature_layer": -1}, 4), ("llava", {"vision_feature_layer": 4}, 4),
    ("llava", {"vision_feature_layer": 1}, 1), ("llava", {"vision_feature_layer": -4}, 1),
    ("idefics3", {"scale_factor": 4}, 4), ("idefics3", {"vision_config.image_size": 632, "scale_factor": 1}, 4)])
def test_layers_that_are_computed(name: str, changes: dict[str, Any], layers: int) -> None:
    found = vision_folder.READERS[name](config(name, changes)).encoder
    assert found.kv[f"{found.architecture}.vision.block_count"] == layers
    assert {f"v.blk.{at}.ln1.weight" for at in range(layers)} == {
        tensor.name for tensor in found.tensors if tensor.name.endswith("ln1.weight")}


@pytest.mark.parametrize("name, changes, field, allowed", [
    *(("gemma3", {"mm_tokens_per_image": rows}, "mm_tokens_per_image", "the number of squares of equal size that")
      for rows in (3, 9, 25)),
    ("lfm2_vl", {"vision_config.num_patches": 255}, "vision_config.num_patches", "a square number"),
    ("mistral3", {"vision_config.num_attention_heads": 8}, "vision_config.num_attention_heads",
     "a divisor of hidden_size, 48, such that the size of a head is divisible by 4"),
    ("mistral3", {"vision_config.image_size": 2056}, "vision_config.image_size", "8 to 2048"),
    *(("internvl", {"downsample_ratio": ratio}, "downsample_ratio", "1 divided by a divisor of the 6 patches per side")
      for ratio in (0.25, 0.4, 0.05)),
    ("qwen2_vl", {"vision_config.hidden_size": 48}, "vision_config.hidden_size", "64, the decoder's hidden_size"),
    ("qwen2_vl", {"vision_config.mlp_ratio": 1e308}, "mlp_ratio", "a finite number above 0, at most 1024"),
    ("qwen3_vl", {"vision_config.out_hidden_size": 48}, "out_hidden_size", "64, the decoder's hidden_size"),
    ("qwen3_vl", {"vision_config.num_position_embeddings": 2305}, "vision_config.num_position_embeddings",
     "a square number"),
    *(("qwen3_vl", {"vision_config.deepstack_visual_indexes": taps}, "vision_config.deepstack_visual_indexes",
       "ascending numbers of layers from 0 to 26") for taps in ([1, 0], [1, 1], [-1, 2], [5, 27])),
    ("qwen3_vl", {"text_config.rope_parameters": {"mrope_section": [24, 20]}}, "mrope_section",
     "three numbers above 0")])
def test_sizes_of_encoders_and_projectors(name: str, changes: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(errors.FormatError) as caught:
        vision_folder.READERS[name](config(name, changes))
    assert str(caught.value.field).endswith(field) and str(caught.value.allowed).startswith(allowed)


def test_positions_whose_sections_follow_each_other_are_refused() -> None:
    with pytest.raises(errors.Unsupported, match="mrope_interleaved is false"):
        vision_folder.READERS["qwen3_vl"](config("qwen3_vl", {"text_config.rope_parameters": {
            "mrope_section": [24, 20, 20], "mrope_interleaved": False}}))


PLAIN: dict[str, Any] = {"size": {"height": 32, "width": 32}, "do_center_crop": False}
TILED: dict[str, Any] = {"image_processor_type": "LlavaNextImageProcessor", "size": {"height": 32, "width": 32},
                         "do_center_crop": False, "image_grid_pinpoints": [[32, 64], [64, 32]]}


@pytest.mark.parametrize("name, changes, values, file, field, got, allowed", [
    ("llava", {}, TILED, "config.json", "model_type", "llava", "llava_next, because the image processor cuts images"),
    ("llava_next", {}, PLAIN, image_processor.NAME, "image_grid_pinpoints", "a list",
     "the same list as in config.json"),
    ("llava_next", {}, TILED | {"image_grid_pinpoints": [[64, 32], [32, 64]]}, image_processor.NAME,
     "image_grid_pinpoints", "a list", "the same list as in config.json"),
    ("llava_next", {"image_grid_pinpoints": [[32, 65]]}, TILED | {"image_grid_pinpoints": [[32, 65]]}, "config.json",
     "image_grid_pinpoints", "a list", "multiples of image_size, 32, of at most 64 tiles"),
    ("llava_next", {"image_grid_pinpoints": [[32, 2080]]}, TILED | {"image_grid_pinpoints": [[32, 2080]]},
     "config.json", "image_grid_pinpoints", "a list", "multiples of image_size, 32, of at most 64 tiles"),
    ("llava", {}, PLAIN | {"size": {"height": 32, "width": 40}}, image_processor.NAME, "size", "40 x 32 pixels",
     "32 x 32 pixels"),
    ("llava", {}, PLAIN | {"size": {"shortest_edge": 32}}, image_processor.NAME, "size",
     "sizes that depend on the image", "32 x 32 pixels"),
    ("idefics3", {}, {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 40}},
     "config.json", "vision_config.image_size", 32, f"max_image_size of {image_processor.NAME}, 40"),
    *(("gemma3", {}, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32},
                      "do_pan_and_scan": True, **changed}, image_processor.NAME, next(iter(changed)),
       str(next(iter(changed.values()))), allowed) for changed, allowed in (
           ({"pan_and_scan_min_crop_size": 0}, "an integer from 1 to 4096"),
           ({"pan_and_scan_max_num_crops": 65}, "an integer from 1 to 64"),
           ({"pan_and_scan_min_ratio_to_activate": 0.0}, "a finite number above 0"))),
    *(("lfm2_vl", {}, {"encoder_patch_size": 8, **changed}, image_processor.NAME, next(iter(changed)),
       next(iter(changed.values())), allowed) for changed, allowed in (
           ({"downsample_factor": 3}, "2, as in config.json"),
           ({"tile_size": 24}, "a multiple of 16, the side of 2 x 2 patches, of at most 16,384 patches"),
           ({"tile_size": 2048}, "a multiple of 16, the side of 2 x 2 patches, of at most 16,384 patches"))),
    *(("lfm2_vl", {}, {"encoder_patch_size": 8, **changed}, image_processor.NAME, next(iter(changed)),
       str(next(iter(changed.values()))), allowed) for changed, allowed in (
           ({"max_image_tokens": 4097}, "an integer from 1 to 4096"),
           ({"min_image_tokens": 257}, "an integer from 1 to 256"),
           ({"max_tiles": 65}, "an integer from 1 to 64"), ({"min_tiles": 11}, "an integer from 1 to 10"),
           ({"max_pixels_tolerance": 0.0}, "a finite number above 0"))),
    *(("mistral3", {}, {"patch_size": 8, **changed}, image_processor.NAME, field, got, allowed)
      for changed, field, got, allowed in (
           ({"patch_size": 14}, "patch_size", "14", "8, as in config.json"),
           ({"patch_size": {"height": 8, "width": 16}}, "patch_size", "an object", "8, as in config.json"),
           ({"size": {"longest_edge": 0}}, "size.longest_edge", "0", "an integer from 1 to 4096"))),
    *(("internvl", {}, {"image_processor_type": "GotOcr2ImageProcessor", **changed}, image_processor.NAME, field, got,
       allowed) for changed, field, got, allowed in (
           ({}, "size", "384 x 384 pixels", "48 x 48 pixels"),
           ({"size": {"height": 48, "width": 40}}, "size", "40 x 48 pixels", "48 x 48 pixels"),
           ({"size": {"height": 48, "width": 48}, "max_patches": 65}, "max_patches", "65", "an integer from 1 to 64"))),
    ("qwen2_5_vl", {}, {"patch_size": 14, "merge_size": 3}, "config.json", "vision_config.patch_size",
     "14 with spatial_merge_size 2", f"patch_size and merge_size of {image_processor.NAME}, 14 and 3")])
def test_processors_that_do_not_fit(tmp_path: Path, name: str, changes: dict[str, Any], values: dict[str, Any],
                                    file: str, field: str, got: Any, allowed: str) -> None:
    model = vision_folder.READERS[name](config(name, changes))
    with pytest.raises(errors.FormatError) as caught:
        model.read_settings(processor(tmp_path, **values))
    error = caught.value
    assert (os.path.basename(error.file or ""), error.field, error.got) == (file, field, got)
    assert str(error.allowed).startswith(allowed)


@pytest.mark.parametrize("grid", [[[32, 2048]], [[64, 1024]], [[32, 32]]])
def test_up_to_64_tiles_are_accepted(tmp_path: Path, grid: list[list[int]]) -> None:
    model = vision_folder.READERS["llava_next"](config("llava_next", {"image_grid_pinpoints": grid}))
    found, _ = model.read_settings(processor(tmp_path, **TILED | {"image_grid_pinpoints": grid}))
    assert found.scheme == "tiles" and [list(pair) for pair in found.grid] == grid


@pytest.mark.parametrize("values, pixels", [
    ({}, (3136, 1003520)), ({"min_pixels": 1, "max_pixels": 10**9}, (1, 16384 * 14**2)),
    ({"min_pixels": 10**8, "max_pixels": 10**9}, (16384 * 14**2,) * 2), ({"do_resize": False}, None)])
def test_images_of_any_size_have_at_most_16384_patches(tmp_path: Path, values: dict[str, Any], pixels: Any) -> None:
    found, _ = vision_folder.READERS["qwen2_5_vl"](config("qwen2_5_vl", {})).read_settings(
        processor(tmp_path, **values))
    assert (found.scheme, found.merge, found.pixels, found.image_token_id) == ("any", 2, pixels, 151655)


@pytest.mark.parametrize("output, patch, any_size, fits", [
    ((32, 32), 8, False, True), ((32, 40), 8, False, False), (None, 8, False, False), (None, 8, True, True),
    ((8, 50), 8, True, True), ((50, 7), 8, True, False)])
def test_sizes_of_processed_images(output: Any, patch: int, any_size: bool, fits: bool) -> None:
    network = image_networks.NetworkSpec("clip", {}, image_size=32, patch_size=patch, any_size=any_size)
    if fits:
        image_networks.check_processor(network, output, "p")
        return
    with pytest.raises(errors.FormatError) as caught:
        image_networks.check_processor(network, output, "p")
    assert (caught.value.file, caught.value.field) == ("p", "size")
    assert caught.value.allowed == ("sides of at least 8 pixels" if any_size else "32 x 32 pixels")


def test_tensors_of_the_parts_of_a_model() -> None:
    """Every spelling of a name leads to the same part; a tensor may have one spelling only."""
    spelled = {
        "text": ("lm_head.weight", ["language_model.lm_head.weight", "model.language_model.lm_head.weight",
                                    "lm_head.weight", "language_model.model.lm_head.weight"]),
        "projector": ("linear_1.weight", ["multi_modal_projector.linear_1.weight",
                                          "model.multi_modal_projector.linear_1.weight",
                                          "connector.linear_1.weight", "model.connector.linear_1.weight"]),
        "encoder": ("embeddings.x", ["vision_model.embeddings.x", "model.vision_model.embeddings.x",
                                     "vision_tower.vision_model.embeddings.x", "model.vision_tower.embeddings.x",
                                     "visual.embeddings.x", "model.visual.embeddings.x"])}
    for part, (name, names) in spelled.items():
        for spelling in names:
            found = vision_folder._parts({spelling: 1}, "f")  # type: ignore[dict-item]
            assert found == {"text": {}, "encoder": {}, "projector": {}} | {part: {name: 1}}, spelling
        with pytest.raises(errors.FormatError, match="under another name"):
            vision_folder._parts({names[0]: 1, names[1]: 1}, "f")  # type: ignore[dict-item]
    for spelling, part, name in (("model.embed_tokens.weight", "text", "model.embed_tokens.weight"),
                                 ("model.text_model.norm.weight", "text", "model.norm.weight"),
                                 ("language_model.model.layers.0.x", "text", "model.layers.0.x"),
                                 ("visual.merger.mlp.0.bias", "projector", "mlp.0.bias"),
                                 ("visual.merger.ln_q.weight", "encoder", "merger.ln_q.weight"),
                                 ("model.visual.merger.norm.bias", "encoder", "merger.norm.bias"),
                                 ("model.visual.merger.linear_fc1.bias", "projector", "merger.linear_fc1.bias"),
                                 ("visual.deepstack_merger_list.1.norm.bias", "projector",
                                  "deepstack_merger_list.1.norm.bias"),
                                 ("model.image_newline", "projector", "image_newline")):
        assert vision_folder._parts({spelling: 1}, "f")[part] == {name: 1}  # type: ignore[dict-item]
    with pytest.raises(errors.FormatError, match="other.weight, which the model does not have"):
        vision_folder._parts({"other.weight": 1}, "f")  # type: ignore[dict-item]
