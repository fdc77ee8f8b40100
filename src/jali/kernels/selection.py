"""Budgets, ascending lists and pyramid levels on the GPU: everything between scores and a plan."""

from __future__ import annotations

from .budgets import entropy_budgets, row_entropy
from .select_levels import cumulative_ends, list_levels
from .select_lists import level_lists, select_lists
from .select_price import list_cheapest, saved_by_price

__all__ = [
    "cumulative_ends",
    "entropy_budgets",
    "level_lists",
    "list_cheapest",
    "list_levels",
    "row_entropy",
    "saved_by_price",
    "select_lists",
]
