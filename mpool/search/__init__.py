"""Vectors after they are computed: similarity, nearest neighbours, late interaction, pooling of token vectors."""

from .late_interaction import PackedTokens, maxsim, quantize_tokens
from .nearest import Neighbours, community_detection, paraphrase_mining, semantic_search
from .similarities import cosines as cosines
from .similarities import similarity
from .token_pooling import pool_tokens

__all__ = ["Neighbours", "PackedTokens", "community_detection", "maxsim", "paraphrase_mining", "pool_tokens",
           "quantize_tokens", "semantic_search", "similarity"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
