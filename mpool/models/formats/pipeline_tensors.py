"""Tensors of image-generation pipelines: names and shapes in the core, and names in the files.

The C core has one name for each matrix. Files store some matrices stacked in one tensor (queries, keys and values in
the published checkpoints and in GGUF files), and some halves in the opposite order. Every storage type stores rows one
after the other, so each matrix gets an entry of its own with its offset in the stored tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...errors import FormatError
from ..json_strict import shorten
from ..spec import TensorEntry

#: Prefix that published tensor names of a transformer may have.
PREFIX = "model.diffusion_model."
_FIRST = ("double_blocks.0.img_attn.qkv.weight", "joint_blocks.0.x_block.attn.qkv.weight")


def has_published_names(names: Iterable[str]) -> bool:
    """Return True if the tensor names are those of a published FLUX or Stable Diffusion 3 transformer.

    GGUF files written by stable-diffusion.cpp have no key for the architecture, so their tensor names identify it.
    """
    return any(name.removeprefix(PREFIX) in _FIRST for name in names)


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of the C core as a range of rows of a stored tensor.

    Attributes:
        name: name of the tensor in the core.
        shape: shape of the tensor in the core.
        source: name of the stored tensor.
        first: index of the first row in the stored tensor.
        total: number of rows of the stored tensor; None: it has only the rows of this tensor.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    first: int = 0
    total: int | None = None


def linear(name: str, source: str, outputs: int, inputs: int, *, bias: bool = True, first: int = 0,
           total: int | None = None, shape: tuple[int, ...] | None = None) -> Iterator[TensorSlice]:
    """Yield the weight and the bias of a linear layer. If the file stores it as part of a larger layer, that layer has
    ``total`` rows, and this one begins at row ``first``."""
    yield TensorSlice(f"{name}.weight", shape or (outputs, inputs), f"{source}.weight", first, total)
    if bias:
        yield TensorSlice(f"{name}.bias", (outputs,), f"{source}.bias", first, total)


def norm(name: str, source: str, size: int) -> Iterator[TensorSlice]:
    """Yield the weight and the bias of a normalisation layer."""
    yield TensorSlice(f"{name}.weight", (size,), f"{source}.weight")
    yield TensorSlice(f"{name}.bias", (size,), f"{source}.bias")


# ---- text encoders -------------------------------------------------------------------------------------------------

def clip(part: str, prefix: str, *, hidden: int, ffn: int, layers: int, vocabulary: int, positions: int,
         projection: int) -> Iterator[TensorSlice]:
    """Yield the tensors of a CLIP text encoder.

    Args:
        part: prefix of the names in the core, ``clip_l`` or ``clip_g``.
        prefix: prefix of the names in the file: ``text_model.`` or empty.
        hidden, ffn, layers, vocabulary, positions: sizes of the encoder.
        projection: output size of the projection of the pooled embedding; 0: no projection.
    """
    yield TensorSlice(f"{part}.tokens", (vocabulary, hidden), f"{prefix}embeddings.token_embedding.weight")
    yield TensorSlice(f"{part}.positions", (positions, hidden), f"{prefix}embeddings.position_embedding.weight")
    for i in range(layers):
        to, at = f"{part}.layers.{i}", f"{prefix}encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{to}.self_attn.{name}", f"{at}.self_attn.{name}", hidden, hidden)
        yield from linear(f"{to}.mlp.fc1", f"{at}.mlp.fc1", ffn, hidden)
        yield from linear(f"{to}.mlp.fc2", f"{at}.mlp.fc2", hidden, ffn)
        for name in ("layer_norm1", "layer_norm2"):
            yield from norm(f"{to}.{name}", f"{at}.{name}", hidden)
    yield from norm(f"{part}.final_layer_norm", f"{prefix}final_layer_norm", hidden)
    if projection:
        yield from linear(f"{part}.text_projection", "text_projection", projection, hidden, bias=False)


def t5(tokens: str, *, hidden: int, width: int, heads: int, ffn: int, layers: int, vocabulary: int,
       buckets: int) -> Iterator[TensorSlice]:
    """Yield the tensors of a T5 encoder with gated MLPs, under transformers' names.

    Args:
        tokens: name of the token embedding in the file.
        hidden, width, heads, ffn, layers, vocabulary, buckets: sizes of the encoder; ``width`` is heads x head length.
    """
    yield TensorSlice("t5.tokens", (vocabulary, hidden), tokens)
    yield TensorSlice("t5.relative", (buckets, heads),
               "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    for i in range(layers):
        to, at = f"t5.block.{i}", f"encoder.block.{i}.layer"
        for name in "qkv":
            yield from linear(f"{to}.attn.{name}", f"{at}.0.SelfAttention.{name}", width, hidden, bias=False)
        yield from linear(f"{to}.attn.o", f"{at}.0.SelfAttention.o", hidden, width, bias=False)
        for name in ("wi_0", "wi_1"):
            yield from linear(f"{to}.ffn.{name}", f"{at}.1.DenseReluDense.{name}", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wo", f"{at}.1.DenseReluDense.wo", hidden, ffn, bias=False)
        yield TensorSlice(f"{to}.attn_norm.weight", (hidden,), f"{at}.0.layer_norm.weight")
        yield TensorSlice(f"{to}.ffn_norm.weight", (hidden,), f"{at}.1.layer_norm.weight")
    yield TensorSlice("t5.final_layer_norm.weight", (hidden,), "encoder.final_layer_norm.weight")


def t5_gguf(*, hidden: int, width: int, heads: int, ffn: int, layers: int, vocabulary: int,
            buckets: int) -> Iterator[TensorSlice]:
    """Yield the tensors of a T5 encoder under GGUF's names; arguments as for :func:`t5`."""
    yield TensorSlice("t5.tokens", (vocabulary, hidden), "token_embd.weight")
    yield TensorSlice("t5.relative", (buckets, heads), "enc.blk.0.attn_rel_b.weight")
    for i in range(layers):
        to, at = f"t5.block.{i}", f"enc.blk.{i}"
        for name in "qkv":
            yield from linear(f"{to}.attn.{name}", f"{at}.attn_{name}", width, hidden, bias=False)
        yield from linear(f"{to}.attn.o", f"{at}.attn_o", hidden, width, bias=False)
        yield from linear(f"{to}.ffn.wi_0", f"{at}.ffn_gate", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wi_1", f"{at}.ffn_up", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wo", f"{at}.ffn_down", hidden, ffn, bias=False)
        yield TensorSlice(f"{to}.attn_norm.weight", (hidden,), f"{at}.attn_norm.weight")
        yield TensorSlice(f"{to}.ffn_norm.weight", (hidden,), f"{at}.ffn_norm.weight")
    yield TensorSlice("t5.final_layer_norm.weight", (hidden,), "enc.output_norm.weight")


# ---- decoder -------------------------------------------------------------------------------------------------------

def decoder(channels: Sequence[int], *, latents: int, layers: int, attention: bool) -> Iterator[TensorSlice]:
    """Yield the tensors of the decoder of an AutoencoderKL.

    Args:
        channels: channels per resolution, from the largest resolution to the smallest.
        latents: channels of the latents.
        layers: residual blocks per resolution, minus one.
        attention: True if the middle block has attention.
    """
    def conv(name: str, source: str, outputs: int, inputs: int, size: int = 3) -> Iterator[TensorSlice]:
        return linear(f"vae.{name}", f"decoder.{source}", outputs, inputs, shape=(outputs, inputs, size, size))

    def residual(name: str, source: str, inputs: int, outputs: int) -> Iterator[TensorSlice]:
        yield from norm(f"vae.{name}.norm1", f"decoder.{source}.norm1", inputs)
        yield from conv(f"{name}.conv1", f"{source}.conv1", outputs, inputs)
        yield from norm(f"vae.{name}.norm2", f"decoder.{source}.norm2", outputs)
        yield from conv(f"{name}.conv2", f"{source}.conv2", outputs, outputs)
        if inputs != outputs:
            yield from conv(f"{name}.conv_shortcut", f"{source}.conv_shortcut", outputs, inputs, 1)

    top = channels[-1]
    yield from conv("conv_in", "conv_in", top, latents)
    for j in range(2):
        yield from residual(f"mid.resnets.{j}", f"mid_block.resnets.{j}", top, top)
    if attention:
        yield from norm("vae.mid.attention.group_norm", "decoder.mid_block.attentions.0.group_norm", top)
        for name in ("to_q", "to_k", "to_v"):
            yield from linear(f"vae.mid.attention.{name}", f"decoder.mid_block.attentions.0.{name}", top, top)
        yield from linear("vae.mid.attention.to_out", "decoder.mid_block.attentions.0.to_out.0", top, top)
    inputs = top
    for i, outputs in enumerate(reversed(channels)):
        for j in range(layers + 1):
            yield from residual(f"up.{i}.resnets.{j}", f"up_blocks.{i}.resnets.{j}", inputs, outputs)
            inputs = outputs
        if i < len(channels) - 1:
            yield from conv(f"up.{i}.conv", f"up_blocks.{i}.upsamplers.0.conv", outputs, outputs)
    yield from norm("vae.end.conv_norm_out", "decoder.conv_norm_out", inputs)
    yield from conv("end.conv_out", "conv_out", 3, inputs)


# ---- transformer ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Transformer:
    """Sizes of a FLUX or Stable Diffusion 3 transformer, from its config.json.

    Attributes:
        flux: True for FLUX, False for Stable Diffusion 3.
        layers: number of blocks with separate weights for image and text.
        singles: number of blocks with shared weights for image and text (FLUX only).
        heads, head: number of attention heads, and their length.
        channels: channels of the latents.
        texts: width of the text embeddings.
        pooled: width of the pooled text embedding.
        guidance: True if the guidance scale is an input of the network.
        qk_norm: True if queries and keys are normalised.
        dual: indices of the blocks with a second attention over the image (Stable Diffusion 3.5).
        positions: side of the square table of position embeddings, in patches (Stable Diffusion 3 only).
    """

    flux: bool
    layers: int
    singles: int
    heads: int
    head: int
    channels: int
    texts: int
    pooled: int
    guidance: bool
    qk_norm: bool
    dual: tuple[int, ...]
    positions: int

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return self.heads * self.head

    @property
    def patch(self) -> int:
        """Number of latent values per input row of the transformer: 2 x 2 positions of every channel."""
        return 4 * self.channels


def transformer(size: Transformer, published: bool) -> Iterator[TensorSlice]:
    """Yield the tensors of the transformer.

    Args:
        size: sizes of the transformer.
        published: True for the names of the published checkpoints and of GGUF files, False for those of diffusers.
    """
    if published:
        yield from _published_flux(size) if size.flux else _published_sd3(size)
        return
    n, to = size.hidden, "transformer"
    yield from _outer_layers(size, {
        "rows": "x_embedder" if size.flux else "pos_embed.proj", "texts": "context_embedder",
        "time": ("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2"),
        "guidance": ("time_text_embed.guidance_embedder.linear_1", "time_text_embed.guidance_embedder.linear_2"),
        "pooled": ("time_text_embed.text_embedder.linear_1", "time_text_embed.text_embedder.linear_2"),
        "modulation": "norm_out.linear", "velocity": "proj_out"}, shift_first=False)
    if size.positions:
        yield TensorSlice(f"{to}.positions", (size.positions ** 2, n), "pos_embed.pos_embed")
    for i in range(size.layers):
        name, at = f"{to}.joint.{i}", f"transformer_blocks.{i}"
        last, dual = not size.flux and i == size.layers - 1, i in size.dual
        yield from linear(f"{name}.norm1.linear", f"{at}.norm1.linear", (9 if dual else 6) * n, n)
        yield from _text_modulation(name, f"{at}.norm1_context.linear", n, last, shift_first=False)
        for part in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            yield from linear(f"{name}.attn.{part}", f"{at}.attn.{part}", n, n)
        yield from linear(f"{name}.attn.to_out", f"{at}.attn.to_out.0", n, n)
        for side in ("ff",) if last else ("ff", "ff_context"):
            yield from linear(f"{name}.{side}.up", f"{at}.{side}.net.0.proj", 4 * n, n)
            yield from linear(f"{name}.{side}.down", f"{at}.{side}.net.2", n, 4 * n)
        if not last:
            yield from linear(f"{name}.attn.to_add_out", f"{at}.attn.to_add_out", n, n)
        norms = ["attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"]
        if dual:
            for part in ("to_q", "to_k", "to_v"):
                yield from linear(f"{name}.attn2.{part}", f"{at}.attn2.{part}", n, n)
            yield from linear(f"{name}.attn2.to_out", f"{at}.attn2.to_out.0", n, n)
            norms += ["attn2.norm_q", "attn2.norm_k"]
        for part in norms if size.qk_norm else ():
            yield TensorSlice(f"{name}.{part}.weight", (size.head,), f"{at}.{part}.weight")
    for i in range(size.singles):
        name, at = f"{to}.single.{i}", f"single_transformer_blocks.{i}"
        yield from linear(f"{name}.norm.linear", f"{at}.norm.linear", 3 * n, n)
        for part in ("to_q", "to_k", "to_v"):
            yield from linear(f"{name}.attn.{part}", f"{at}.attn.{part}", n, n)
        yield from linear(f"{name}.proj_mlp", f"{at}.proj_mlp", 4 * n, n)
        yield from linear(f"{name}.proj_out", f"{at}.proj_out", n, 5 * n)
        for part in ("norm_q", "norm_k"):
            yield TensorSlice(f"{name}.attn.{part}.weight", (size.head,), f"{at}.attn.{part}.weight")


def _outer_layers(size: Transformer, names: Mapping[str, str | tuple[str, str]],
                  shift_first: bool) -> Iterator[TensorSlice]:
    """Yield the tensors before and after the blocks.

    Args:
        size: sizes of the transformer.
        names: names of the layers in the file; pairs of names for embedders with two layers.
        shift_first: True if the file stores the shift of the final modulation before its scale, False for the reverse.
    """
    n, to = size.hidden, "transformer"
    yield from linear(f"{to}.x_embedder", str(names["rows"]), n, size.patch)
    yield from linear(f"{to}.context_embedder", str(names["texts"]), n, size.texts)
    for part, inputs in (("time", 256), ("pooled", size.pooled), *((("guidance", 256),) if size.guidance else ())):
        for i, source in enumerate(names[part]):  # a pair of layers
            yield from linear(f"{to}.{part}.{i}", source, n, n if i else inputs)
    for part, half in (("shift", 0), ("scale", 1)):
        first = (half if shift_first else 1 - half) * n
        yield from linear(f"{to}.norm_out.{part}", str(names["modulation"]), n, n, first=first, total=2 * n)
    yield from linear(f"{to}.proj_out", str(names["velocity"]), size.patch, n)


def _text_modulation(name: str, source: str, n: int, last: bool, shift_first: bool) -> Iterator[TensorSlice]:
    """Yield the modulation of a block's text stream. In the last block (``last``) it has only shift and scale."""
    if not last:
        yield from linear(f"{name}.norm1_context.linear", source, 6 * n, n)
        return
    for part, half in (("shift", 0), ("scale", 1)):
        first = (half if shift_first else 1 - half) * n
        yield from linear(f"{name}.norm1_context.{part}", source, n, n, first=first, total=2 * n)


def _split_rows(names: Sequence[str], source: str, n: int, total: int) -> Iterator[TensorSlice]:
    """Yield consecutive layers of ``n`` rows each that the file stores as one layer of ``total`` rows."""
    for i, name in enumerate(names):
        yield from linear(name, source, n, n, first=i * n, total=total)


def _published_flux(size: Transformer) -> Iterator[TensorSlice]:
    """Yield the tensors of FLUX under the names of the published checkpoints."""
    n, to = size.hidden, "transformer"
    yield from _outer_layers(size, {
        "rows": "img_in", "texts": "txt_in", "time": ("time_in.in_layer", "time_in.out_layer"),
        "guidance": ("guidance_in.in_layer", "guidance_in.out_layer"),
        "pooled": ("vector_in.in_layer", "vector_in.out_layer"),
        "modulation": "final_layer.adaLN_modulation.1", "velocity": "final_layer.linear"}, shift_first=True)
    for i in range(size.layers):
        name, at = f"{to}.joint.{i}", f"double_blocks.{i}"
        for side, modulation, qkv, out, mlp, q, k in (
                ("img", "norm1", ("to_q", "to_k", "to_v"), "to_out", "ff", "norm_q", "norm_k"),
                ("txt", "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context",
                 "norm_added_q", "norm_added_k")):
            yield from linear(f"{name}.{modulation}.linear", f"{at}.{side}_mod.lin", 6 * n, n)
            yield from _split_rows([f"{name}.attn.{part}" for part in qkv], f"{at}.{side}_attn.qkv", n, 3 * n)
            yield from linear(f"{name}.attn.{out}", f"{at}.{side}_attn.proj", n, n)
            yield from linear(f"{name}.{mlp}.up", f"{at}.{side}_mlp.0", 4 * n, n)
            yield from linear(f"{name}.{mlp}.down", f"{at}.{side}_mlp.2", n, 4 * n)
            yield TensorSlice(f"{name}.attn.{q}.weight", (size.head,), f"{at}.{side}_attn.norm.query_norm.scale")
            yield TensorSlice(f"{name}.attn.{k}.weight", (size.head,), f"{at}.{side}_attn.norm.key_norm.scale")
    for i in range(size.singles):
        name, at = f"{to}.single.{i}", f"single_blocks.{i}"
        yield from linear(f"{name}.norm.linear", f"{at}.modulation.lin", 3 * n, n)
        yield from _split_rows([f"{name}.attn.{part}" for part in ("to_q", "to_k", "to_v")], f"{at}.linear1", n, 7 * n)
        yield from linear(f"{name}.proj_mlp", f"{at}.linear1", 4 * n, n, first=3 * n, total=7 * n)
        yield from linear(f"{name}.proj_out", f"{at}.linear2", n, 5 * n)
        yield TensorSlice(f"{name}.attn.norm_q.weight", (size.head,), f"{at}.norm.query_norm.scale")
        yield TensorSlice(f"{name}.attn.norm_k.weight", (size.head,), f"{at}.norm.key_norm.scale")


def _published_sd3(size: Transformer) -> Iterator[TensorSlice]:
    """Yield the tensors of Stable Diffusion 3 under the names of the published checkpoints."""
    n, to = size.hidden, "transformer"
    yield from _outer_layers(size, {
        "rows": "x_embedder.proj", "texts": "context_embedder",
        "time": ("t_embedder.mlp.0", "t_embedder.mlp.2"),
        "pooled": ("y_embedder.mlp.0", "y_embedder.mlp.2"),
        "modulation": "final_layer.adaLN_modulation.1", "velocity": "final_layer.linear"}, shift_first=True)
    yield TensorSlice(f"{to}.positions", (size.positions ** 2, n), "pos_embed")
    for i in range(size.layers):
        name, at = f"{to}.joint.{i}", f"joint_blocks.{i}"
        last, dual = i == size.layers - 1, i in size.dual
        yield from linear(f"{name}.norm1.linear", f"{at}.x_block.adaLN_modulation.1", (9 if dual else 6) * n, n)
        yield from _text_modulation(name, f"{at}.context_block.adaLN_modulation.1", n, last, shift_first=True)
        for side, attention, qkv, out, q, k in (
                ("x_block", "attn", ("to_q", "to_k", "to_v"), "to_out", "norm_q", "norm_k"),
                ("context_block", "attn", ("add_q_proj", "add_k_proj", "add_v_proj"), None if last else "to_add_out",
                 "norm_added_q", "norm_added_k"),
                *((("x_block", "attn2", ("to_q", "to_k", "to_v"), "to_out", "norm_q", "norm_k"),) if dual else ())):
            stored = f"{at}.{side}.{attention}"
            yield from _split_rows([f"{name}.{attention}.{part}" for part in qkv], f"{stored}.qkv", n, 3 * n)
            if out is not None:
                yield from linear(f"{name}.{attention}.{out}", f"{stored}.proj", n, n)
            if size.qk_norm:
                yield TensorSlice(f"{name}.{attention}.{q}.weight", (size.head,), f"{stored}.ln_q.weight")
                yield TensorSlice(f"{name}.{attention}.{k}.weight", (size.head,), f"{stored}.ln_k.weight")
        for side, mlp in (("x_block", "ff"),) if last else (("x_block", "ff"), ("context_block", "ff_context")):
            yield from linear(f"{name}.{mlp}.up", f"{at}.{side}.mlp.fc1", 4 * n, n)
            yield from linear(f"{name}.{mlp}.down", f"{at}.{side}.mlp.fc2", n, 4 * n)


# ---- selection -----------------------------------------------------------------------------------------------------

def _element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def select(slices: Iterator[TensorSlice], tensors: Mapping[str, TensorEntry], *, file: str, file_offset: int,
         ignored_prefixes: tuple[str, ...] = ()) -> list[TensorEntry]:
    """Find the stored tensors of a network and check their shapes.

    Args:
        slices: tensors that the core needs.
        tensors: the stored tensors by name.
        file: path of a file, for messages.
        file_offset: number of files of the networks that were read before; added to the file indices.
        ignored_prefixes: prefixes of the names of tensors that the files may have and the core does not use.

    Returns:
        Entries under the core's names.

    Raises:
        FormatError: a tensor is missing, has a wrong shape, or is unknown.
    """
    found: list[TensorEntry] = []
    used: set[str] = set()
    for item in slices:
        entry = tensors.get(item.source)
        if entry is None:
            raise FormatError(file=file, field=shorten(item.source), got="missing",
                              allowed=f"a tensor of shape {list(item.shape)}")
        used.add(item.source)
        rows = item.shape[0] if item.total is None else item.total
        stored_shape = (rows, *item.shape[1:])
        # The core reads a convolution over patches as a matrix, and a position table may have a batch axis of size 1.
        patches = len(entry.shape) == 4 and len(stored_shape) == 2 and entry.shape[0] == rows \
            and _element_count(entry.shape) == _element_count(stored_shape)
        if entry.shape not in (stored_shape, (1, *stored_shape)) and not patches:
            raise FormatError(file=file, field=shorten(item.source), got=str(list(entry.shape)),
                              allowed=str(list(stored_shape)))
        step = entry.nbytes // rows
        found.append(TensorEntry(item.name, entry.dtype, item.shape, entry.file + file_offset,
                                 entry.offset + item.first * step, item.shape[0] * step))
    for name in tensors:
        if name not in used and not name.startswith(ignored_prefixes):
            raise FormatError(file=file, field=shorten(name), got="an unknown tensor",
                              allowed="the tensors of the architecture in config.json")
    return found
