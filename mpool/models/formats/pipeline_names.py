"""Tensor names of image-generation pipelines: what files call them, and what the core does.

The core knows one name for each matrix that it multiplies with. Files hold some of them together (queries, keys and
values of the published checkpoints and of GGUF files), and some halves in another order; since rows stand one after the
other in every storage type, a part is an entry of its own with its own offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...errors import FormatError
from ..json_strict import shorten
from ..spec import TensorEntry

#: Optional prefix of the published tensor names of a transformer.
PREFIX = "model.diffusion_model."
_FIRST = ("double_blocks.0.img_attn.qkv.weight", "joint_blocks.0.x_block.attn.qkv.weight")


def published(names: Iterable[str]) -> bool:
    """The names are those of a published image transformer: files written by stable-diffusion.cpp do not name their
    architecture."""
    return any(name.removeprefix(PREFIX) in _FIRST for name in names)


@dataclass(frozen=True)
class Want:
    """A tensor that the core wants: its name there and its shape, and where it is: the tensor's name in the file, and
    of that the rows from ``first`` on, of ``total`` (None: all)."""

    name: str
    shape: tuple[int, ...]
    source: str
    first: int = 0
    total: int | None = None


def linear(name: str, source: str, outputs: int, inputs: int, *, bias: bool = True, first: int = 0,
           total: int | None = None, shape: tuple[int, ...] | None = None) -> Iterator[Want]:
    """A linear layer, or rows of one."""
    yield Want(f"{name}.weight", shape or (outputs, inputs), f"{source}.weight", first, total)
    if bias:
        yield Want(f"{name}.bias", (outputs,), f"{source}.bias", first, total)


def norm(name: str, source: str, size: int) -> Iterator[Want]:
    """A norm with weight and bias."""
    yield Want(f"{name}.weight", (size,), f"{source}.weight")
    yield Want(f"{name}.bias", (size,), f"{source}.bias")


# ---- text encoders -------------------------------------------------------------------------------------------------

def clip(part: str, prefix: str, *, hidden: int, ffn: int, layers: int, vocabulary: int, positions: int,
         projection: int) -> Iterator[Want]:
    """CLIP's text encoder. ``prefix``: "text_model." or nothing; ``projection`` 0: none."""
    yield Want(f"{part}.tokens", (vocabulary, hidden), f"{prefix}embeddings.token_embedding.weight")
    yield Want(f"{part}.positions", (positions, hidden), f"{prefix}embeddings.position_embedding.weight")
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
       buckets: int) -> Iterator[Want]:
    """T5's encoder with gated MLPs. ``tokens``: what the table of tokens is called."""
    yield Want("t5.tokens", (vocabulary, hidden), tokens)
    yield Want("t5.relative", (buckets, heads),
               "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    for i in range(layers):
        to, at = f"t5.block.{i}", f"encoder.block.{i}.layer"
        for name in "qkv":
            yield from linear(f"{to}.attn.{name}", f"{at}.0.SelfAttention.{name}", width, hidden, bias=False)
        yield from linear(f"{to}.attn.o", f"{at}.0.SelfAttention.o", hidden, width, bias=False)
        for name in ("wi_0", "wi_1"):
            yield from linear(f"{to}.ffn.{name}", f"{at}.1.DenseReluDense.{name}", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wo", f"{at}.1.DenseReluDense.wo", hidden, ffn, bias=False)
        yield Want(f"{to}.attn_norm.weight", (hidden,), f"{at}.0.layer_norm.weight")
        yield Want(f"{to}.ffn_norm.weight", (hidden,), f"{at}.1.layer_norm.weight")
    yield Want("t5.final_layer_norm.weight", (hidden,), "encoder.final_layer_norm.weight")


def t5_gguf(*, hidden: int, width: int, heads: int, ffn: int, layers: int, vocabulary: int,
            buckets: int) -> Iterator[Want]:
    """The same as GGUF files name it."""
    yield Want("t5.tokens", (vocabulary, hidden), "token_embd.weight")
    yield Want("t5.relative", (buckets, heads), "enc.blk.0.attn_rel_b.weight")
    for i in range(layers):
        to, at = f"t5.block.{i}", f"enc.blk.{i}"
        for name in "qkv":
            yield from linear(f"{to}.attn.{name}", f"{at}.attn_{name}", width, hidden, bias=False)
        yield from linear(f"{to}.attn.o", f"{at}.attn_o", hidden, width, bias=False)
        yield from linear(f"{to}.ffn.wi_0", f"{at}.ffn_gate", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wi_1", f"{at}.ffn_up", ffn, hidden, bias=False)
        yield from linear(f"{to}.ffn.wo", f"{at}.ffn_down", hidden, ffn, bias=False)
        yield Want(f"{to}.attn_norm.weight", (hidden,), f"{at}.attn_norm.weight")
        yield Want(f"{to}.ffn_norm.weight", (hidden,), f"{at}.ffn_norm.weight")
    yield Want("t5.final_layer_norm.weight", (hidden,), "enc.output_norm.weight")


# ---- decoder -------------------------------------------------------------------------------------------------------

def decoder(channels: Sequence[int], *, latents: int, layers: int, attention: bool) -> Iterator[Want]:
    """The decoder of AutoencoderKL; ``channels`` from the largest resolution to the smallest."""
    def conv(name: str, source: str, outputs: int, inputs: int, size: int = 3) -> Iterator[Want]:
        return linear(f"vae.{name}", f"decoder.{source}", outputs, inputs, shape=(outputs, inputs, size, size))

    def residual(name: str, source: str, inputs: int, outputs: int) -> Iterator[Want]:
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
    """Sizes of one: what its config.json says."""

    flux: bool
    layers: int
    singles: int
    heads: int
    head: int
    channels: int
    texts: int
    pooled: int
    guidance: bool = False
    qk_norm: bool = True
    dual: tuple[int, ...] = ()
    positions: int = 0

    @property
    def hidden(self) -> int:
        """Width of the rows."""
        return self.heads * self.head

    @property
    def patch(self) -> int:
        """Latents per row of the transformer: 2 x 2 pixels of every channel."""
        return 4 * self.channels


def transformer(size: Transformer, published: bool) -> Iterator[Want]:
    """The transformer, as diffusers names its tensors, or, if ``published``, as its authors and GGUF files do."""
    if published:
        yield from _published_flux(size) if size.flux else _published_sd3(size)
        return
    n, to = size.hidden, "transformer"
    yield from _ends(size, {"rows": "x_embedder" if size.flux else "pos_embed.proj", "texts": "context_embedder",
                            "time": ("time_text_embed.timestep_embedder.linear_1",
                                     "time_text_embed.timestep_embedder.linear_2"),
                            "guidance": ("time_text_embed.guidance_embedder.linear_1",
                                         "time_text_embed.guidance_embedder.linear_2"),
                            "pooled": ("time_text_embed.text_embedder.linear_1",
                                       "time_text_embed.text_embedder.linear_2"),
                            "modulation": "norm_out.linear", "velocity": "proj_out"}, shift_first=False)
    if size.positions:
        yield Want(f"{to}.positions", (size.positions ** 2, n), "pos_embed.pos_embed")
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
            yield Want(f"{name}.{part}.weight", (size.head,), f"{at}.{part}.weight")
    for i in range(size.singles):
        name, at = f"{to}.single.{i}", f"single_transformer_blocks.{i}"
        yield from linear(f"{name}.norm.linear", f"{at}.norm.linear", 3 * n, n)
        for part in ("to_q", "to_k", "to_v"):
            yield from linear(f"{name}.attn.{part}", f"{at}.attn.{part}", n, n)
        yield from linear(f"{name}.proj_mlp", f"{at}.proj_mlp", 4 * n, n)
        yield from linear(f"{name}.proj_out", f"{at}.proj_out", n, 5 * n)
        for part in ("norm_q", "norm_k"):
            yield Want(f"{name}.attn.{part}.weight", (size.head,), f"{at}.attn.{part}.weight")


def _ends(size: Transformer, names: Mapping[str, str | tuple[str, str]], shift_first: bool) -> Iterator[Want]:
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


def _text_modulation(name: str, source: str, n: int, last: bool, shift_first: bool) -> Iterator[Want]:
    if not last:
        yield from linear(f"{name}.norm1_context.linear", source, 6 * n, n)
        return
    for part, half in (("shift", 0), ("scale", 1)):
        first = (half if shift_first else 1 - half) * n
        yield from linear(f"{name}.norm1_context.{part}", source, n, n, first=first, total=2 * n)


def _split(names: Sequence[str], source: str, n: int, total: int) -> Iterator[Want]:
    for i, name in enumerate(names):
        yield from linear(name, source, n, n, first=i * n, total=total)


def _published_flux(size: Transformer) -> Iterator[Want]:
    n, to = size.hidden, "transformer"
    yield from _ends(size, {"rows": "img_in", "texts": "txt_in", "time": ("time_in.in_layer", "time_in.out_layer"),
                            "guidance": ("guidance_in.in_layer", "guidance_in.out_layer"),
                            "pooled": ("vector_in.in_layer", "vector_in.out_layer"),
                            "modulation": "final_layer.adaLN_modulation.1", "velocity": "final_layer.linear"},
                     shift_first=True)
    for i in range(size.layers):
        name, at = f"{to}.joint.{i}", f"double_blocks.{i}"
        for side, modulation, qkv, out, mlp, q, k in (
                ("img", "norm1", ("to_q", "to_k", "to_v"), "to_out", "ff", "norm_q", "norm_k"),
                ("txt", "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context",
                 "norm_added_q", "norm_added_k")):
            yield from linear(f"{name}.{modulation}.linear", f"{at}.{side}_mod.lin", 6 * n, n)
            yield from _split([f"{name}.attn.{part}" for part in qkv], f"{at}.{side}_attn.qkv", n, 3 * n)
            yield from linear(f"{name}.attn.{out}", f"{at}.{side}_attn.proj", n, n)
            yield from linear(f"{name}.{mlp}.up", f"{at}.{side}_mlp.0", 4 * n, n)
            yield from linear(f"{name}.{mlp}.down", f"{at}.{side}_mlp.2", n, 4 * n)
            yield Want(f"{name}.attn.{q}.weight", (size.head,), f"{at}.{side}_attn.norm.query_norm.scale")
            yield Want(f"{name}.attn.{k}.weight", (size.head,), f"{at}.{side}_attn.norm.key_norm.scale")
    for i in range(size.singles):
        name, at = f"{to}.single.{i}", f"single_blocks.{i}"
        yield from linear(f"{name}.norm.linear", f"{at}.modulation.lin", 3 * n, n)
        yield from _split([f"{name}.attn.{part}" for part in ("to_q", "to_k", "to_v")], f"{at}.linear1", n, 7 * n)
        yield from linear(f"{name}.proj_mlp", f"{at}.linear1", 4 * n, n, first=3 * n, total=7 * n)
        yield from linear(f"{name}.proj_out", f"{at}.linear2", n, 5 * n)
        yield Want(f"{name}.attn.norm_q.weight", (size.head,), f"{at}.norm.query_norm.scale")
        yield Want(f"{name}.attn.norm_k.weight", (size.head,), f"{at}.norm.key_norm.scale")


def _published_sd3(size: Transformer) -> Iterator[Want]:
    n, to = size.hidden, "transformer"
    yield from _ends(size, {"rows": "x_embedder.proj", "texts": "context_embedder",
                            "time": ("t_embedder.mlp.0", "t_embedder.mlp.2"),
                            "pooled": ("y_embedder.mlp.0", "y_embedder.mlp.2"),
                            "modulation": "final_layer.adaLN_modulation.1", "velocity": "final_layer.linear"},
                     shift_first=True)
    yield Want(f"{to}.positions", (size.positions ** 2, n), "pos_embed")
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
            yield from _split([f"{name}.{attention}.{part}" for part in qkv], f"{at}.{side}.{attention}.qkv", n, 3 * n)
            if out is not None:
                yield from linear(f"{name}.{attention}.{out}", f"{at}.{side}.{attention}.proj", n, n)
            if size.qk_norm:
                yield Want(f"{name}.{attention}.{q}.weight", (size.head,), f"{at}.{side}.{attention}.ln_q.weight")
                yield Want(f"{name}.{attention}.{k}.weight", (size.head,), f"{at}.{side}.{attention}.ln_k.weight")
        for side, mlp in (("x_block", "ff"),) if last else (("x_block", "ff"), ("context_block", "ff_context")):
            yield from linear(f"{name}.{mlp}.up", f"{at}.{side}.mlp.fc1", 4 * n, n)
            yield from linear(f"{name}.{mlp}.down", f"{at}.{side}.mlp.fc2", n, 4 * n)


# ---- finding them --------------------------------------------------------------------------------------------------

def _items(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def find(wants: Iterator[Want], tensors: Mapping[str, TensorEntry], *, file: str, shift: int,
         harmless: tuple[str, ...] = ()) -> list[TensorEntry]:
    """Entries for all of ``wants``.

    Args:
        wants: the core's names.
        tensors: those of the files, by name.
        file: for messages.
        shift: number of the first file among the model's.
        harmless: beginnings of names that may be there and take no part.

    Raises:
        FormatError: one is missing, has another shape, or is there and not known.
    """
    found: list[TensorEntry] = []
    used: set[str] = set()
    for want in wants:
        entry = tensors.get(want.source)
        if entry is None:
            raise FormatError(file=file, field=shorten(want.source), got="missing",
                              allowed=f"a tensor of shape {list(want.shape)}")
        used.add(want.source)
        rows = want.shape[0] if want.total is None else want.total
        whole = (rows, *want.shape[1:])
        # a convolution over patches is a matrix, and a table of positions may be a batch of one
        patches = len(entry.shape) == 4 and len(whole) == 2 and entry.shape[0] == rows \
            and _items(entry.shape) == _items(whole)
        if entry.shape not in (whole, (1, *whole)) and not patches:
            raise FormatError(file=file, field=shorten(want.source), got=str(list(entry.shape)),
                              allowed=str(list(whole)))
        step = entry.nbytes // rows
        found.append(TensorEntry(want.name, entry.dtype, want.shape, entry.file + shift,
                                 entry.offset + want.first * step, want.shape[0] * step))
    for name in tensors:
        if name not in used and not name.startswith(harmless):
            raise FormatError(file=file, field=shorten(name), got="a tensor that nothing uses",
                              allowed="the tensors of the architecture that its config.json names")
    return found
