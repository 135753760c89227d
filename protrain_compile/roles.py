"""Roles: the parts of a template that a schedule calls, and the policies that recompute.

A policy that recomputes is carried out by the recompute of its own name, or, where both keep the same values, by
another's (see ``program.Parts``).
"""

from __future__ import annotations

from typing import Literal, get_args

RecomputeRole = Literal["recompute", "recompute_products", "recompute_pointwise"]
RECOMPUTES: tuple[RecomputeRole, ...] = get_args(RecomputeRole)
"""The recomputes, from the one that keeps least; also the policies that recompute."""

SWAPS = ("swap", "swap_products")
"""The policies that swap: all that keep keeps, or what ``recompute_pointwise`` keeps while the rest is made again."""

Role = Literal["forward", "recompute", "recompute_products", "recompute_pointwise", "backward"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The parts, in the order in which a step runs those that it runs."""
