"""Keys of experts and of their routers, which families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .reading import MAX_WIDTH

#: Keys of config.json for the number of experts of a layer; transformers reads the last one in every family.
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
#: Keys of config.json for the number of groups of experts, and for the groups that a router uses.
_GROUPS = ("n_group", "topk_group")


def read_experts(config: Fields, kv: dict[str, Value], a: str, usual: Mapping[str, Any],
                 width: str = "moe_intermediate_size") -> set[str]:
    """Read the number and size of experts, and return the keys that were read.

    Args:
        config: contents of config.json.
        kv: hyper-parameters to add to.
        a: name of the architecture.
        usual: defaults of the number of experts, under the family's key; of ``num_experts_per_tok``; and of ``width``,
            without which an expert has the size of a dense MLP.
        width: key of the size of an expert.
    """
    count = next(key for key in _COUNTS if key in usual)
    given = next((key for key in (count, "num_local_experts") if config.get(key) is not None), count)
    experts = config.int(given, usual[count], low=1, high=4096)
    kv[f"{a}.expert_count"] = experts
    kv[f"{a}.expert_used_count"] = config.int("num_experts_per_tok", usual["num_experts_per_tok"], low=1, high=experts)
    kv[f"{a}.expert_feed_forward_length"] = kv[f"{a}.feed_forward_length"] if width not in usual \
        else config.int(width, usual[width], low=1, high=MAX_WIDTH)
    return {count, "num_local_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
            "router_jitter_noise", *({width} & set(usual))}


def read_routing(config: Fields, kv: dict[str, Value], a: str, scale: float = 1.0,
                 groups: tuple[int, int] | None = None) -> set[str]:
    """Read the routing by sigmoids, and return the keys that were read.

    Args:
        config: contents of config.json.
        kv: hyper-parameters to add to, with the number of experts.
        a: name of the architecture.
        scale: default of ``routed_scaling_factor``.
        groups: defaults of ``n_group`` and ``topk_group``; None: the family has no groups.
    """
    set_routing(kv, normalise=config.bool("norm_topk_prob", True),
                scale=config.number("routed_scaling_factor", scale, above=0.0))
    if groups is not None:
        read_groups(config, kv, a, *groups)
    return {"norm_topk_prob", "routed_scaling_factor", *(_GROUPS if groups else ())}


def read_groups(config: Fields, kv: dict[str, Value], a: str, groups: int, used: int) -> None:
    """Read the groups of experts. ``groups``, ``used``: defaults of ``n_group`` and ``topk_group``."""
    experts = cast(int, kv[f"{a}.expert_count"])
    _set_groups(config, kv, experts, *_GROUPS, config.int(_GROUPS[0], groups, low=1, high=experts),
                config.int(_GROUPS[1], used, low=1))


def complete_routing(table: Fields, name: str, kv: dict[str, Value], *, normalise: bool = True,
                     sigmoid: bool = True) -> None:
    """Set the routing of a GGUF file.

    Args:
        table: keys of the file.
        name: name of the architecture in the file.
        kv: hyper-parameters to add to.
        normalise: default of ``expert_weights_norm``.
        sigmoid: see :func:`set_routing`.
    """
    set_routing(kv, normalise=table.bool(f"{name}.expert_weights_norm", normalise),
                scale=table.number(f"{name}.expert_weights_scale", 1.0) or 1.0, sigmoid=sigmoid)
    experts = table.int(f"{name}.expert_count", low=1, high=4096)
    count, used = f"{name}.expert_group_count", f"{name}.expert_group_used_count"
    groups = table.int(count, 1, low=1, high=experts)
    _set_groups(table, kv, experts, count, used, groups, table.int(used, groups, low=1))


def set_routing(kv: dict[str, Value], *, normalise: bool, scale: float, sigmoid: bool = True) -> None:
    """Set the routing. ``sigmoid``: scores are sigmoids, and a learned correction is added to choose experts; otherwise
    softmax, without corrections."""
    kv["mpool.expert_gate"], kv["mpool.expert_corrected"] = "sigmoid" if sigmoid else "softmax", sigmoid
    kv["mpool.expert_normalise"], kv["mpool.expert_scale"] = normalise, scale


def _set_groups(table: Fields, kv: dict[str, Value], experts: int, count: str, chosen: str, groups: int,
                used: int) -> None:
    """Set the groups of experts, and how many of them a router uses. ``count``, ``chosen``: their keys, for errors."""
    if experts % groups:
        table.fail(count, groups, f"a divisor of the {experts} experts")
    if used > groups:
        table.fail(chosen, used, f"at most {groups}, the number of groups")
    kv["mpool.expert_groups"], kv["mpool.expert_groups_used"] = groups, used
