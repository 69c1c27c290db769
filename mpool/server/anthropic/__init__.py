"""Anthropic's protocol: ``/v1/messages``."""

from __future__ import annotations

from .messages import OPERATIONS

__all__ = ["OPERATIONS"]
