"""Choice of the files of a repository that a reference needs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DownloadError, FormatError, InvalidArgument, UnsafeFormat
from ..files import PICKLE_SUFFIXES, SAFE_FORMATS, check_relative, conversion_hint, missing_model_hint
from ..layout import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_NAME,
    MODEL_CONFIG,
    MODULES_NAME,
    OWN_ADAPTERS_FOLDER,
    OWN_MODULE,
    RANKS_NAME,
    ROUTER_CONFIGS,
    SINGLE_NAME,
    SPLIT,
    STANFORD_METADATA,
    TRANSFORMER_CONFIGS,
    gguf_models,
    is_projector,
    other_sizes,
    shard_names,
)
from ..references import HubRef

#: Files of a model folder that mpool reads in addition to the weights.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
               RANKS_NAME, "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja",
               "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
               STANFORD_METADATA, *TRANSFORMER_CONFIGS)
#: Suffixes of pickled files that torch writes.
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: Paths that need no quotes in a command.
_PLAIN = re.compile(r"[A-Za-z0-9._/-]+")
#: Index of a diffusers folder.
PIPELINE_NAME = "model_index.json"
#: Quantisations to use if the reference names none, in order of preference, as in llama-server
#: (https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp). If the repository has neither, the first
#: model by name is used.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
_QUANT_IN_NAME = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d[A-Z0-9_]*|F16|F32|BF16|FP16|NVFP4|MXFP4(?:_MOE)?))"
                            r"(?=[-.])", re.IGNORECASE)


def choose_gguf(names: Sequence[str], quant: str | None, *, where: str) -> str:
    """Choose the GGUF file of a repository.

    Args:
        names: every file of the repository.
        quant: quantisation; None: Q4_K_M, or else Q8_0, or else the first file by name.
        where: name of the repository, for errors.

    Raises:
        InvalidArgument: the repository has no such quantisation; the message lists the available ones.
    """
    models = gguf_models(names)
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        matches = [name for name in models if re.search(re.escape(wanted) + "[.-]", name, re.IGNORECASE)]
        # "Q4_0" is also a suffix of "IQ4_0": prefer names that contain the quantisation as a whole word
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        whole = [name for name in matches if word.search(name)]
        if matches:
            return (whole or matches)[0]
    if quant is None and models:
        return models[0]
    tags = sorted({match.group(1) for name in models if (match := _QUANT_IN_NAME.search(name))})
    listed = ", ".join(tags) if tags else ", ".join(models[:12]) or "no GGUF files"
    raise InvalidArgument(f"{where} has no quantisation {quant}", param="model", got=str(quant), allowed=listed,
                          hint=f"Available: {listed}")


def choose_projector(ref: HubRef, names: Sequence[str], model: str, *, where: str) -> list[str]:
    """Choose the projector file that belongs to a GGUF model, as ``llama-server -hf`` does.

    It is in the folder of the model or in one above; the nearest counts. Among several, the one whose weights have the
    number of bits that is nearest to the model's is chosen, the first by name if there are two. A reference that names
    the file of the model gets none: it is the way to read a vision model without its image encoder.

    Args:
        ref: the reference.
        names: every file of the repository.
        model: the chosen GGUF file.
        where: name of the repository, for errors.

    Returns:
        one file, or an empty list.

    Raises:
        DownloadError: the repository lacks the projector file that the reference names.
    """
    if ref.projector is not None and ref.projector not in names:
        raise DownloadError(f"{where} has no file {ref.projector}, which the model needs for images",
                            hint=f"hf://{where}/{model} is the model without images")
    if ref.projector is not None or ref.file:
        return [ref.projector] if ref.projector else []
    folder, bits = posixpath.dirname(model), _bits(model)
    found = [name for name in names if is_projector(name)
             and (not (own := posixpath.dirname(name)) or f"{folder}/".startswith(f"{own}/"))]
    return sorted(found, key=lambda name: (-name.count("/"), abs(_bits(name) - bits), name))[:1]


def _bits(name: str) -> int:
    """Return the number in the quantisation of a file name; 0 if it names none."""
    found = _QUANT_IN_NAME.findall(posixpath.basename(name))
    number = re.search(r"\d+", found[-1]) if found else None
    return int(number[0]) if number else 0


def split_siblings(names: Sequence[str], first: str, *, where: str) -> list[str]:
    """Return every part of a GGUF model, in order.

    Args:
        names: every file of the repository.
        first: name of the model's first part, or of its only file.
        where: name of the repository, for errors.

    Raises:
        FormatError: a part is missing, or ``first`` is a later part.
    """
    split = SPLIT.fullmatch(first)
    if split is None:
        return [first]
    count = int(split["count"])
    parts = [f"{split['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    absent = [part for part in parts if part not in names]
    if absent or int(split["number"]) != 1:
        got = f"{absent[0]} missing" if absent else f"{first} is not the first part"
        raise FormatError(f"{where}: {got}; the model consists of {count} parts", file=where, field="split", got=got,
                          allowed=f"all {count} parts, named by the first part",
                          hint=None if absent else f"Name the first part: {parts[0]}")
    return parts


def pickle_hint(where: str, name: str) -> str:
    """Return the command that converts a pickled file of a repository, or "" if torch's reader cannot load it.

    Args:
        where: name of the repository, with ``@revision`` if it is not the main branch.
        name: path of the file in the repository.
    """
    base = posixpath.basename(name)
    if not base.endswith(_TORCH_SUFFIXES) or not _PLAIN.fullmatch(name):
        return ""
    shards = base.startswith("pytorch_model") and base.endswith(".bin")  # the command converts all shards
    return conversion_hint(where, adapter=base.startswith("adapter_model"),
                           file=_under(posixpath.dirname(name), "pytorch_model*.bin" if shards else base))


def wants_gguf(ref: HubRef, names: Sequence[str]) -> bool:
    """Return True if the reference names a GGUF file or quantisation, or if the repository has only GGUF models."""
    if ref.quant or ref.file and ref.file.endswith(".gguf"):
        return True
    return not _has_folder(names, ref.file or "") and not ref.file and bool(gguf_models(names))


def _under(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _has_folder(names: Sequence[str], folder: str) -> bool:
    """Return True if there are a config.json and safetensors files in the folder or in its subfolders."""
    inside = [name for name in names if not folder or name.startswith(folder + "/")]
    return any(posixpath.basename(name) == "config.json" for name in inside) \
        and any(name.endswith(".safetensors") for name in inside)


def choose_folder(names: Sequence[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Choose the files to download of a transformers, sentence-transformers or diffusers folder.

    Args:
        names: every file of the repository.
        folder: folder of the model in the repository; empty for the root.
        read: function that returns a small JSON file of the repository as :class:`~mpool.models.fields.Fields` or list.
        where: name of the repository, for errors.

    Returns:
        sorted names of the configuration, tokenizer, weight and module files; of a low-rank adapter, its two files.

    Raises:
        UnsafeFormat: the repository has only pickled weights.
        FormatError: the repository has no weights, or an index or module list names a file outside the folder.
    """
    have = set(names)
    if _under(folder, PIPELINE_NAME) in have:
        return _choose_pipeline(have, folder, read, where=where)
    if _under(folder, ADAPTER_CONFIG) in have and _under(folder, ADAPTER_WEIGHTS) in have \
            and _under(folder, "config.json") not in have:
        return [_under(folder, ADAPTER_CONFIG), _under(folder, ADAPTER_WEIGHTS)]
    chosen = [_under(folder, name) for name in (*SMALL_FILES, MODULES_NAME, MODEL_CONFIG)]
    encoder, routed = folder, False
    if _under(folder, MODULES_NAME) in have:
        modules = read(_under(folder, MODULES_NAME))
        for i, module in enumerate(modules if isinstance(modules, list) else []):
            name = module.get("path") if isinstance(module, dict) else None
            path = check_relative("" if name is None else name, file=where, field=f"{MODULES_NAME} [{i}].path",
                                  allow_empty=True)
            below = _under(folder, path) if path else folder
            if i == 0:
                encoder = below
                if isinstance(module, dict) and module.get("type") == OWN_MODULE:
                    inside = re.compile(re.escape(_under(encoder, OWN_ADAPTERS_FOLDER + "/")) + r"[^/]+/(.+)")
                    chosen += [name for name in names if (match := inside.fullmatch(name))
                               and match[1] in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
                routed = isinstance(module, dict) and str(module.get("type")).rpartition(".")[2] in ("Router", "Asym")
                chosen += [_under(encoder, name) for name in SMALL_FILES]
            elif path:
                start = folder + "/" if folder else ""
                siblings = {name[len(start):].partition("/")[0] for name in names if name.startswith(start)}
                for part in (path, *other_sizes(path, siblings).values()):
                    chosen += [_under(_under(folder, part), name) for name in ("config.json", SINGLE_NAME)]
    encoders = [encoder]
    for name in ROUTER_CONFIGS if routed else ():
        config = _under(encoder, name)
        if config in have:
            types = read(config).section("types")
            encoders = [_under(encoder, check_relative(module, file=where, field=f"{name} types")) for module in types]
            chosen += [config, *(_under(inside, name) for inside in encoders for name in SMALL_FILES)]
            break
    found = [_weights_of(have, inside, read, where=where) for inside in encoders]
    chosen += [name for names in found for name in names]
    if not any(found):
        # weights before the state of an optimizer
        pickled = sorted((name for name in names if name.endswith(PICKLE_SUFFIXES)),
                         key=lambda name: "_model" not in posixpath.basename(name))
        if pickled:
            raise UnsafeFormat(f"{where}: the weights {pickled[0]} are in a format that can run code when it is loaded",
                               hint=f"Use a repository or revision with {SAFE_FORMATS}. "
                               + pickle_hint(where, pickled[0]))
        raise FormatError(f"{where}: the repository or folder holds no model", file=where, field="files",
                          allowed=f"config.json with {SAFE_FORMATS}",
                          hint=missing_model_hint(names))
    return sorted(name for name in set(chosen) if name in have)


def _weights_of(have: set[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Return the weight files of a folder: one file, or an index and its shards; an empty list if it has none."""
    weights, index = _under(folder, SINGLE_NAME), _under(folder, INDEX_NAME)
    if weights in have:
        return [weights]
    if index not in have:
        return []
    shards = sorted(set(shard_names(read(index)).values()))
    return [index, *(_under(folder, check_relative(shard, file=where, field=INDEX_NAME)) for shard in shards)]


def _choose_pipeline(have: set[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Choose the files of a diffusers pipeline: the configuration and weights of each network, and the tokenizers."""
    index = _under(folder, PIPELINE_NAME)
    chosen = [index]
    for part, value in read(index).values.items():
        if not isinstance(value, list) or len(value) != 2 or value[0] is None:
            continue
        inside = _under(folder, check_relative(part, file=where, field=PIPELINE_NAME))
        chosen += [_under(inside, name) for name in (*SMALL_FILES, "scheduler_config.json")]
        for stem in ("model", "diffusion_pytorch_model"):
            whole, shards = (_under(inside, f"{stem}.safetensors{end}") for end in ("", ".index.json"))
            if whole in have:
                chosen.append(whole)
            elif shards in have:
                names = sorted(set(shard_names(read(shards)).values()))
                chosen += [shards, *(_under(inside, check_relative(name, file=where, field=shards))
                                     for name in names)]
    return sorted(name for name in set(chosen) if name in have)


def choose(ref: HubRef, names: Sequence[str], read: Callable[[str], Any]) -> list[str]:
    """Return the files that a reference needs: of a GGUF model its parts in order, then its projector file."""
    where = f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo
    if wants_gguf(ref, names):
        if ref.file and ref.file not in names:
            raise DownloadError(f"{where} has no file {ref.file}",
                                hint=f"GGUF files of the repository: {', '.join(gguf_models(names)[:12]) or 'none'}")
        first = ref.file or choose_gguf(names, ref.quant, where=where)
        return split_siblings(names, first, where=where) + choose_projector(ref, names, first, where=where)
    if ref.file and ref.file in names:
        raise InvalidArgument(f"{ref} is a single file of a model that consists of a folder", param="model",
                              got=str(ref), allowed="a repository, a folder in it, or a GGUF file",
                              hint=f"Use {ref.repo}, or hf://{ref.repo}/ with the path of the folder")
    if ref.file and not any(name.startswith(ref.file + "/") for name in names):
        raise DownloadError(f"{where} has no file or folder {ref.file}",
                            hint="Check the path and the revision; file names are case-sensitive")
    return choose_folder(names, ref.file or "", read, where=where)
