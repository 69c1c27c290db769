"""Conversion between arrays and tensors of torch, for the interface of sentence-transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Unsupported
from ..host.resources import install_hint


def has_tensor(value: Any) -> bool:
    """Return True for a tensor of torch, and for a list of them."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return hasattr(first, "detach")


def array_of(value: Any) -> Any:
    """Return an array, a tensor, or a list of vectors as an array."""
    if isinstance(value, (list, tuple)):
        return np.stack([np.asarray(array_of(one)) for one in value]) if len(value) else np.empty((0, 1), np.float32)
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # NumPy has no bfloat16


def load_torch() -> Any:
    """Return the module torch.

    Raises:
        Unsupported: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise Unsupported("tensors need the package torch", hint=install_hint("sentence-transformers")) \
            from None
    return torch


def tensor_of(value: Any) -> Any:
    """Return an array as a tensor of torch. Raises Unsupported if torch is not installed."""
    return load_torch().as_tensor(value)


__all__ = ["array_of", "has_tensor", "load_torch", "tensor_of"]
