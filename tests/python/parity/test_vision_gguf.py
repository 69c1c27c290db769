"""Vision models as pairs of GGUF files in the layout of llama.cpp's converters, compared with the transformers folders
that they were written from (test_parity_vision.py compares these with transformers); and mismatched pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.tasks.requests import vision_request

import tinygguf
import visionmodels
from corelib import SAMPLING
from paritymodels import transformers
from tinygguf import gguf
from visionparity import greedy_reference, random_images, reference, relative, request

UNKNOWN = 0
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAVA = {"k_proj": "attn_k", "q_proj": "attn_q", "v_proj": "attn_v", "out_proj": "attn_out", "layer_norm1": "ln1",
         "layer_norm2": "ln2", "fc1": "ffn_up", "fc2": "ffn_down"}
OTHERS = {"embeddings.class_embedding": "v.class_embd", "embeddings.patch_embedding.weight": "v.patch_embd.weight",
          "embeddings.patch_embedding.bias": "v.patch_embd.bias", "post_layernorm.weight": "v.post_ln.weight",
          "embeddings.position_embedding.weight": "v.position_embd.weight", "pre_layrnorm.weight": "v.pre_ln.weight",
          "pre_layrnorm.bias": "v.pre_ln.bias", "post_layernorm.bias": "v.post_ln.bias"}


QWEN = {"attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down"}


def decoder(model: Any, path: Path, image: int | None = None) -> None:
    qwen = model.mpool_family == "qwen2_5_vl"
    kind, config = (transformers.Qwen2ForCausalLM, transformers.Qwen2Config) if qwen else \
        (transformers.LlamaForCausalLM, transformers.LlamaConfig)  # files of Mistral are Llama's
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id")
    given = model.config.text_config
    text = kind(config(**{name: getattr(given, name) for name in names}, tie_word_embeddings=False, rope_parameters={
        "rope_type": "default", "rope_theta": given.rope_parameters["rope_theta"]}))
    inner = getattr(model.model, "language_model", None) or model.model.text_model
    text.load_state_dict({**{f"model.{name}": value for name, value in inner.state_dict().items()},
                          "lm_head.weight": model.lm_head.weight})
    tinygguf.write(path, text, image=image, sections=given.rope_parameters["mrope_section"] if qwen else None)


def qwen_projector(model: Any, path: Path) -> None:
    """Write Qwen2.5-VL's projector file in the layout of llama.cpp's converter: the first matrix as two halves, and
    separate queries, keys and values."""
    vision, network = model.config.vision_config, model.model.visual
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.projector_type", "qwen2.5vl_merger")
    writer.add_bool("clip.use_silu", True)
    for key, value in (("image_size", 560), ("patch_size", vision.patch_size), ("block_count", vision.depth),
                       ("embedding_length", vision.hidden_size), ("feed_forward_length", vision.intermediate_size),
                       ("attention.head_count", vision.num_heads), ("window_size", vision.window_size),
                       ("n_wa_pattern", vision.fullatt_block_indexes[0] + 1), ("image_min_pixels", 400),
                       ("image_max_pixels", 6000), ("projection_dim", vision.out_hidden_size)):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    steps = visionmodels.processor("qwen2_5_vl")
    writer.add_array("clip.vision.image_mean", [float(value) for value in steps.image_mean])
    writer.add_array("clip.vision.image_std", [float(value) for value in steps.image_std])
    for name, value in network.state_dict().items():
        parts, end = name.split("."), name.rpartition(".")[2]
        values = np.ascontiguousarray(value.numpy())
        if name == "patch_embed.proj.weight":
            writer.add_tensor("v.patch_embd.weight", np.ascontiguousarray(values[:, :, 0]))
            writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1]))
        elif ".qkv." in name:
            for letter, part in zip("qkv", np.split(values, 3)):
                writer.add_tensor(f"v.blk.{parts[1]}.attn_{letter}.{end}", np.ascontiguousarray(part))
        elif parts[0] == "blocks":
            writer.add_tensor(f"v.blk.{parts[1]}.{QWEN['.'.join(parts[2:-1])]}.{end}", values)
        elif parts[1] == "ln_q":
            writer.add_tensor("v.post_ln.weight", values)
        else:
            writer.add_tensor(f"mm.{parts[2]}.{end}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def projector(model: Any, path: Path, *, swapped: bool = False, width: int | None = None) -> None:
    """Write a projector file.

    Args:
        swapped: exchange the names of the feed-forward layer's two matrices, as in older files.
        width: number of output rows to keep, for a file that does not match its decoder; None: all.
    """
    family, vision = model.mpool_family, model.config.vision_config
    llava = family.startswith("llava")
    if family == "qwen2_5_vl":
        return qwen_projector(model, path)
    network = model.model.vision_tower if llava else model.model.vision_model
    layers = vision.num_hidden_layers - llava  # the last layer is not used
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("clip.projector_type", "mlp" if llava else "idefics3")
    writer.add_bool("clip.use_gelu", not llava)
    for key, value in (("image_size", vision.image_size), ("patch_size", vision.patch_size), ("block_count", layers),
                       ("embedding_length", vision.hidden_size), ("feed_forward_length", vision.intermediate_size),
                       ("attention.head_count", vision.num_attention_heads)):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.layer_norm_eps)
    steps = visionmodels.processor(family)
    writer.add_array("clip.vision.image_mean", [float(value) for value in steps.image_mean])
    writer.add_array("clip.vision.image_std", [float(value) for value in steps.image_std])
    if not llava:
        writer.add_uint32("clip.vision.projector.scale_factor", model.config.scale_factor)
        writer.add_uint32("clip.vision.preproc_image_size", 96)
    if family == "llava_next":
        writer.add_array("clip.vision.image_grid_pinpoints",
                         [side for high, wide in model.config.image_grid_pinpoints for side in (wide, high)])
        writer.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")
        writer.add_string("clip.vision.image_aspect_ratio", "anyres")
        writer.add_tensor("model.image_newline", model.model.image_newline.detach().numpy())
    ends = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    for name, value in network.state_dict().items():
        parts = name.split(".")
        if parts[0] == "encoder":
            if int(parts[2]) >= layers:
                continue
            short = LLAVA[parts[-2]]
            name = f"v.blk.{parts[2]}.{ends.get(short, short)}.{parts[-1]}"
        elif name in OTHERS:
            name = OTHERS[name]
        else:
            continue
        writer.add_tensor(name, value.numpy())
    if llava:
        for number, linear in ((0, model.model.multi_modal_projector.linear_1),
                               (2, model.model.multi_modal_projector.linear_2)):
            writer.add_tensor(f"mm.{number}.weight", linear.weight.detach().numpy()[:width])
            writer.add_tensor(f"mm.{number}.bias", linear.bias.detach().numpy()[:width])
    else:
        writer.add_tensor("mm.model.fc.weight", model.model.connector.modality_projection.proj.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("family, swapped", [("llava", False), ("llava", True), ("llava_uneven", False),
                                             ("llava_next", False), ("smolvlm", False), ("qwen2_5_vl", False)])
def test_gguf_pair_matches_transformers(tmp_path: Path, family: str, swapped: bool) -> None:
    """Rows of the images, logits and greedy tokens match those of transformers for the same tiles."""
    model = visionmodels.randomised(family)
    model.config.text_config.sliding_window = None  # GGUF files of Mistral have no window
    folder = visionmodels.save(model, family, tmp_path / "folder")
    pair = tmp_path / "pair"
    pair.mkdir()
    decoder(model, pair / "text-F32.gguf")
    projector(model, pair / "mmproj-text-F32.gguf", swapped=swapped)
    images = random_images([(63, 90), (40, 40)])
    with mpool.Pool() as pool:
        made = request(pool, folder, images)
        found = pool.get(str(pair))
        assert found.capability == "vision"
        # The vocabulary has no <image>, so any token may be the placeholder.
        assert found.description.vision.image_token_id == -1
        prompt = np.where(made.prompt == visionmodels.IMAGE, UNKNOWN, made.prompt).astype(np.int32)
        ticket = pool.registry.submit_text(found._entry.core_key("float32"), prompt, vision=True,
                                           images=made.images.arrays(),
                                           **{**SAMPLING, "prompt_logits": True, "max_tokens": 8})
        ticket.wait()
        ticket.check()
        if family in ("llava_next", "qwen2_5_vl", "smolvlm"):  # these files contain their preprocessing
            pair_made = vision_request(pool, images, visionmodels.text(3, 20), pool.register(
                "named", str(pair), chat_template=TEMPLATE), {})
            for one, other in zip(pair_made.images.arrays()[:3], made.images.arrays()[:3]):
                assert np.array_equal(one, other)
            runs = [one.images.runs.reshape(-1, 3)[:, 1:].tolist() for one in (pair_made, made)]
            assert runs[0] == runs[1]
            assert np.array_equal(pair_made.images.sources, made.images.sources)
    rows, logits = reference(model, made, images)
    assert relative(ticket.image_rows(), rows) <= 1e-4
    assert relative(ticket.prompt_logits(), logits) <= 1e-4
    assert ticket.tokens(0)[0].tolist() == greedy_reference(model, made, images, 8)


def test_the_decoder_of_a_pair_generates_text_alone(tmp_path: Path) -> None:
    """The decoder of Qwen2.5-VL is a Qwen2 for text: the positions of text are the same on all axes."""
    model = visionmodels.randomised("qwen2_5_vl")
    folder = visionmodels.save(model, "qwen2_5_vl", tmp_path / "folder")
    decoder(model, tmp_path / "text.gguf", visionmodels.IMAGE)
    prompt = [int(word[1:]) for word in visionmodels.text(3, 20).split()]
    options = {"temperature": 0, "max_tokens": 8, "compute": "float32"}
    with mpool.Pool() as pool:
        alone = pool.generate(prompt, str(tmp_path / "text.gguf"), **options)
        assert alone.token_ids == pool.generate(prompt, str(folder), **options).token_ids


@pytest.mark.parametrize("key, value, words", [
    ("clip.vision.image_grid_pinpoints", [40, 80, 80], "alternating widths and heights"),
    ("clip.vision.image_grid_pinpoints", [41, 80], "multiples of 40"),
    ("clip.vision.image_grid_pinpoints", [4000, 4000], "at most"),
    ("clip.vision.mm_patch_merge_type", "flat", "together with clip.vision.mm_patch_merge_type"),
    ("clip.vision.mm_patch_merge_type", "other", "flat, spatial_unpad")])
def test_invalid_tile_settings_are_refused(tmp_path: Path, key: str, value: Any, words: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    model = visionmodels.randomised("llava_next")
    decoder(model, tmp_path / "text-F32.gguf", visionmodels.IMAGE)
    given = "add_array" if isinstance(value, list) else "add_string"
    add = getattr(gguf.GGUFWriter, given)
    monkeypatch.setattr(gguf.GGUFWriter, given, lambda self, name, old: add(self, name, value if name == key else old))
    projector(model, tmp_path / "mmproj-F32.gguf")
    with mpool.Pool() as pool, pytest.raises(errors.FormatError, match=words):
        pool.load(str(tmp_path))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = tmp_path_factory.mktemp("pair")
    model = visionmodels.randomised("llava")
    decoder(model, pair / "text-F32.gguf", visionmodels.IMAGE)
    projector(model, pair / "mmproj-F32.gguf")
    return pair


def test_a_registered_pair_answers_questions_about_images(llava: Path) -> None:
    """The chat template comes from `register`. Images are padded to a square and then resized, as for LLaVA 1.5."""
    image = visionmodels.image(3, 50, 90)
    with mpool.Pool() as pool:
        model = pool.register("pair", str(llava), chat_template=TEMPLATE)
        done = model.vision([image, image], "w10 w11", temperature=0, max_tokens=4)
        made = vision_request(pool, image, "w10", "pair", {})
        alone = pool.load(str(llava / "text-F32.gguf"))
    assert done.usage.prompt_tokens > 50 and len(done.token_ids) <= 4
    assert alone.capability == "text_to_text"
    tile = made.images.pixels.reshape(40, 40, 3).astype(float)
    config = {"size": {"shortest_edge": 40}, "crop_size": {"height": 40, "width": 40}, "do_pad": True}
    other = transformers.LlavaImageProcessorPil(**config, do_rescale=False, do_normalize=False)(
        image, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0].numpy()
    assert np.abs(tile - other.transpose(1, 2, 0)).max() <= 1


def test_incomplete_patches_are_cropped(tmp_path: Path) -> None:
    """A side of 44 is five and a half patches of 8: the pixels are those of whole patches at the upper left."""
    model = visionmodels.randomised("llava_uneven")
    decoder(model, tmp_path / "text-F32.gguf", visionmodels.IMAGE)
    projector(model, tmp_path / "mmproj-F32.gguf")
    image = visionmodels.image(3, 44, 44)
    with mpool.Pool() as pool:
        made = vision_request(pool, image, "w10", pool.register("pair", str(tmp_path), chat_template=TEMPLATE), {})
    assert np.array_equal(made.images.pixels.reshape(40, 40, 3), image[:40, :40])


def test_image_placeholders_are_not_tokens(tmp_path: Path) -> None:
    """If the vocabulary has neither <image> nor bytes, unknown words become the unknown token, and none of them is an
    image."""
    model = visionmodels.randomised("llava")
    decoder(model, tmp_path / "text-F32.gguf")
    projector(model, tmp_path / "mmproj-F32.gguf")
    image = visionmodels.image(3, 50, 90)
    with mpool.Pool() as pool:
        made = vision_request(pool, [image, image], "w10 \u00fc <unk> \ufdd8 w11", str(tmp_path), {})
        runs = made.images.runs.reshape(-1, 3).tolist()
        entry = pool.get(str(tmp_path))._entry
        head, line = ([*entry.tokenizer().encode(text, add_special=False)] for text in ("USER: ", "\n"))
        assert runs == [[len(head), 25, 1], [len(head) + 25 + len(line), 25, 1]]
        assert (made.prompt == UNKNOWN).sum() > 50 + len(line)  # the words of the text are unknown too
        done = pool.vision(image, "w10 \u00fc w11", str(tmp_path), temperature=0, max_tokens=3)
        assert len(done.token_ids) <= 3 and done.usage.prompt_tokens == len(vision_request(
            pool, image, "w10 \u00fc w11", str(tmp_path), {}).prompt)
        with pytest.raises(errors.InvalidArgument, match=r"U\+FDD8 to U\+FDDB"):
            pool.vision(image, "\ufdd8\ufdd9\ufdda\ufddb", str(tmp_path))
        talk = [{"role": role, "content": word} for role, word in (
            ("system", "w1"), ("user", "w2"), ("assistant", "w3"), ("user", "w4"))]
        assert entry.template().render(talk, add_generation_prompt=True) == (  # the template of LLaVA 1.5
            "w1 USER: w2 ASSISTANT: w3</s>USER: w4 ASSISTANT:")


def test_mismatched_pairs_are_refused(llava: Path, tmp_path: Path) -> None:
    model = visionmodels.randomised("llava")
    text, other = tmp_path / "text.gguf", tmp_path / "mmproj.gguf"
    text.write_bytes((llava / "text-F32.gguf").read_bytes())
    with mpool.Pool() as pool:
        projector(model, other, width=48)
        with pytest.raises(errors.FormatError, match="64 rows, the hidden size of"):
            pool.load(str(tmp_path))
        other.write_bytes(text.read_bytes())
        with pytest.raises(errors.FormatError, match="clip, the architecture of projector files"):
            pool.load(str(tmp_path))
        other.write_bytes((llava / "mmproj-F32.gguf").read_bytes()[:4000])
        with pytest.raises(errors.FormatError):
            pool.load(str(tmp_path))
        (tmp_path / "mmproj-2.gguf").write_bytes(b"")
        with pytest.raises(errors.InvalidArgument, match="2 projector files"):
            pool.load(str(tmp_path))
