"""``mpool pull`` and ``mpool show``."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import MpoolError, OfflineError
from ..models import describing
from ..models.catalogue import estimate, state_bytes
from ..models.catalogue import load as load_catalogue
from ..models.describing import resolve, verify
from ..models.references import parse as parse_reference
from ..models.sources import offline_variables, when_online
from ..models.spec import ADAPTER_PREFIX
from ..records import one_line
from ..tasks.output_table import OUTPUTS
from .common import note, print_json, say, size_of

#: Maximum number of names of labels that ``mpool show`` prints.
_MAX_NAMES = 100

if TYPE_CHECKING:
    from ..errors import OfflineError
    from ..models import ModelDescription, Resolved, Row


def megabytes(count: int | None) -> str:
    """Format bytes as megabytes (10**6 bytes)."""
    from ..debug import megabytes as text

    return text(count or 0)


# ---- pull ------------------------------------------------------------------------------------------------------------

def pull(arguments: argparse.Namespace) -> int:
    """Run ``mpool pull``. If a model fails, the others are still downloaded."""
    done, failed = [], False
    for name in arguments.model:
        start = time.monotonic()
        try:
            found = resolve(name, offline=arguments.offline or None, progress=False if arguments.quiet else None,
                            update=arguments.update)
            if arguments.verify:
                verify(found)
        except MpoolError as error:
            note(f"mpool: {error}")
            failed = True
            continue
        done.append({**_facts_of_files(found), "seconds": round(time.monotonic() - start, 3)})
        if not arguments.json:
            say(f"{found.key or found.ref}: {megabytes(size_of(found))} in {found.path}"
                + (", hashes verified" if arguments.verify else ""))
    if arguments.json:
        print_json(done)
    return 1 if failed else 0


def _facts_of_files(found: Resolved) -> dict[str, Any]:
    return {"key": found.key, "ref": found.ref, "source": found.source, "revision": found.revision, "path": found.path,
            "kind": found.kind, "bytes": size_of(found)}


# ---- show ------------------------------------------------------------------------------------------------------------

def show(arguments: argparse.Namespace) -> int:
    """Run ``mpool show``. Downloads nothing."""
    if arguments.model is None:
        from ..debug import show_config

        found = show_config("dicts") if arguments.json else show_config()
        if arguments.json:
            print_json(found)
        return 0
    facts = _facts(arguments.model)
    if arguments.json:
        print_json(facts)
        return 0
    labels = {name: _LABELS.get(name, name.replace("_", " ")) for name in facts}
    width = max(map(len, labels.values()))
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            say(one_line(f"{labels[name].ljust(width)}  {_text(name, value)}"))
    return 0


#: Facts whose names end with their unit -> labels, beside which the value has its unit.
_LABELS = {"bytes": "size", "download_bytes": "download size", "expert_bytes": "size of experts",
           "sequence_state_bytes": "state of a sequence", "est_memory_allocation_mb": "memory (estimate)"}
#: Methods of splitting images (:class:`mpool.models.spec.VisionSettings`) -> their descriptions.
_IMAGES = {"one": "scaled to one size", "tiles": "an overview, and tiles of fixed size",
           "split": "an overview, and tiles of fixed size", "any": "of any size", "fit": "scaled to fit",
           "pan": "scaled to one size, with crops of long images if the model's processor makes them"}


#: Value of ``weights`` in :func:`mpool.ps` -> its description.
_WEIGHTS = {"packed": "packed at load", "mapped": "mapped, never packed",
            "packing": "mapped, until requests have packed them"}


def _text(name: str, value: Any) -> str:
    if name == "weights":
        return _WEIGHTS[value]
    if name == "images":
        return _IMAGES.get(value, value)
    if name == "est_memory_allocation_mb":
        return f"{value:,} MB"
    if name == "sequence_state_bytes":
        return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value / 1e3:,.1f} kB"
    if name.endswith("bytes"):
        return megabytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part!r}" if isinstance(part, str) else f"{key}: {part}"
                         for key, part in value.items())
    return str(value)


def _facts(name: str) -> dict[str, Any]:
    """Describe a model without downloading it, from its files if they exist, else from the catalogue."""
    row = load_catalogue().find(parse_reference(name))
    try:
        found = resolve(name, offline=True, progress=False)
    except OfflineError as error:
        if row is None:
            raise _not_downloaded(name, error) from error
        downloaded = f"no; to download: mpool pull {row.key}"
        return {**facts_of_row(row, None, row.key in load_catalogue().defaults.values()), "downloaded": downloaded}
    return {**_facts_of_files(found), **facts_of_model(describing.describe_resolved(found))}


def facts_of_row(row: Row, here: Resolved | None, default: bool) -> dict[str, Any]:
    """Return the facts of a model of the catalogue. ``here``: its files on this machine."""
    return {"key": row.key, "aliases": list(row.aliases), "capability": row.capability, "task": row.task,
            "default": default, "refs": [str(ref) for ref in row.refs], "origin": row.origin, "license": row.license,
            "parameters": row.parameters, "download_bytes": row.download_bytes, "unpinned": row.unpinned,
            "source": row.source, "options": dict(row.options),
            "est_memory_allocation_mb": row.est_memory_allocation_mb, "path": here.path if here else None,
            "bytes": size_of(here) if here else None}


def _not_downloaded(name: str, error: OfflineError) -> OfflineError:
    """Return the error of a model that is not on this machine. The given one is about a download that is disabled."""
    command = f"mpool pull {name}"
    found = OfflineError(missing=error.missing, cause="`mpool show` downloads nothing",
                         hint=when_online(command) if offline_variables() else f"To download it, run: {command}")
    found.addition = error.addition
    return found


def _expert_bytes(model: ModelDescription) -> int:
    """Return the bytes of the experts, which stay in the file (``mp_expert_owns`` of the core)."""
    return sum(tensor.nbytes for tensor in model.spec.tensors if re.search(r"_exps\.|\.ffn_[^.]*\.\d", tensor.name))


def _purpose(model: ModelDescription) -> str:
    """Return what the model can do, with the names of the functions."""
    if model.pipeline is not None:
        return "generates images from prompts (generate_image)"
    if model.vision is not None:
        return "answers questions about images (vision, chat)"
    if model.image is not None:
        return "embeds images (embed_image)" + (" and texts (embed)" if model.networks else "")
    if model.embedding is not None:
        does = {name: f"{row.purpose} ({row.function})" for name, row in OUTPUTS.items()}
        does["scores"] = "ranks documents for a query (rerank)"
        computed = model.embedding.outputs - {"vectors"} or set(model.embedding.embeddings)
        return ", ".join(text for output, text in does.items() if output in computed)
    if model.generation is not None:
        return "generates text (generate, chat)"
    return model.capability


def facts_of_model(model: ModelDescription) -> dict[str, Any]:
    """Return the facts that ``mpool show`` prints from the model's files."""
    tensors = [tensor for part in (model, *model.networks) for tensor in part.spec.tensors]
    facts: dict[str, Any] = {
        "capability": model.capability, "purpose": _purpose(model), "architecture": model.spec.architecture,
        "license": model.license,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors if not tensor.name.startswith(ADAPTER_PREFIX)),
        "tensors": dict(Counter(tensor.dtype for tensor in tensors).most_common()),
        "weights": model.spec.to_core().weights(),
        "est_memory_allocation_mb": model.est_memory_allocation_mb or estimate(model),
    }
    if model.capability in ("text_to_text", "text_embedding") and not model.networks:
        from ..models.formats.adapters import supported_modules

        facts |= {"adapter_modules": list(supported_modules(model))}
    if state := state_bytes(model):
        percent = next(value for name, value, _, _ in _core.options() if name == "MPOOL_SNAPSHOT_PERCENT")
        facts |= {"sequence_state_bytes": state,
                  "snapshots": f"up to {percent} % of the memory limit (MPOOL_SNAPSHOT_PERCENT)"}
    if experts := _expert_bytes(model):
        facts |= {"expert_bytes": experts, "experts": "read from the file as they are used"}
    if model.embedding is not None and "vectors" not in model.embedding.outputs:
        facts |= {"max_tokens": model.embedding.max_tokens, "labels": model.embedding.output_size}
        if model.embedding.token_labels:
            facts |= {"label_names": list(model.embedding.token_labels[:_MAX_NAMES])}
        if model.embedding.classifier is not None:
            facts |= {"label_names": list(model.embedding.classifier.labels[:_MAX_NAMES]),
                      "activation": model.embedding.classifier.activation}
    elif model.embedding is not None:
        settings = model.embedding
        facts |= {"max_tokens": settings.max_tokens, "dimensions": settings.truncate_dim or settings.output_size,
                  "matryoshka": list(settings.dimensions), "pooling": list(settings.pooling),
                  "normalize": settings.normalize, "similarity": settings.similarity,
                  "prompts": dict(settings.prompts), "default_prompt_name": settings.default_prompt_name}
        if settings.adapters:
            facts |= {"adapters": list(settings.adapters), "default_adapter": settings.default_adapter}
    if model.image is not None:
        image = model.image
        facts |= {"capabilities": [model.capability, *(part.capability for part in model.networks)],
                  "dimensions": image.output_size, "image_size": image.image_size, "patch_size": image.patch_size,
                  "any_size": image.any_size, "resize": list(image.resize or ()), "crop": list(image.crop or ()),
                  "normalize": image.normalize, "similarity": image.similarity,
                  "max_tokens": next((part.embedding.max_tokens for part in model.networks if part.embedding), None)}
    if model.vision is not None:
        image = model.vision.image
        facts |= {"image_size": image.image_size, "patch_size": image.patch_size, "images": model.vision.scheme,
                  "resize": list(image.resize or ()), "crop": list(image.crop or ())}
    if model.pipeline is not None:
        pipeline = model.pipeline
        encoders = [name for name, take in zip(("CLIP-L", "CLIP-G", "T5"), pipeline.inputs)
                    if take is not None and take.folder is not None]
        facts |= {"width_and_height": pipeline.side, "sizes": f"multiples of {2 * pipeline.scale}",
                  "num_inference_steps": pipeline.steps, "guidance_scale": pipeline.guidance_scale,
                  "negative_prompt": pipeline.guided, "text_encoders": encoders, "text_tokens": pipeline.text_tokens,
                  "latent_channels": pipeline.channels, "scheduler": dict(pipeline.scheduler)}
    if model.generation is not None:
        facts |= {"context_length": model.generation.context_length, "chat_template": model.chat_template is not None,
                  "end_of_generation": list(model.generation.eog_token_ids),
                  "sampling": dict(model.generation.defaults)}
    return facts
