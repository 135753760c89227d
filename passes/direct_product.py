"""Direct product: returned logits that each slice of a loop computes straight into their place.

Otherwise a slice's logits would be there twice, and be copied. Where rows are not aligned (a vocabulary of 50257 words
in 16 bits), Inductor pads the product and copies anyway: there nothing is done.
"""

from __future__ import annotations

import math

from torch import fx

from passes.row_slices import SliceWriter
from passes.wide_region import PRODUCTS, sizes
from protrain_compile.program import fake_value
from protrain_compile.row_loop import Direct
from protrain_compile.sizes import dtype_bytes

ALIGNMENT_BYTES = 16
"""Of rows, for products at full speed."""


def direct_product(writer: SliceWriter) -> Direct | None:
    """Return how the loop computes returned logits itself; None if it cannot, or there are none."""
    placeholders = list(writer.graph.find_nodes(op="placeholder"))
    if not has_aligned_rows(writer.region.logits):
        return None
    for number, leaving in enumerate(writer.exits):
        part = leaving.parts[0]
        is_made = leaving.kind == "rows" and leaving.source in writer.returned and part.target in PRODUCTS
        if is_made and not part.kwargs and set(part.args) <= set(placeholders):
            *bias, left, right = (placeholders.index(each) for each in part.args)
            return Direct(number, left, right, *bias)
    return None


def has_aligned_rows(logits: fx.Node) -> bool:
    """Whether products with ``logits`` run at full speed as they are; else Inductor pads them."""
    row_bytes = math.prod(sizes(logits)[1:]) * dtype_bytes(fake_value(logits).dtype)
    return row_bytes % ALIGNMENT_BYTES == 0


def give_product(writer: SliceWriter, part: fx.Node) -> None:
    """Let the graph of a slice take the product ``part`` as its last input."""
    last = list(writer.graph.find_nodes(op="placeholder"))[-1]
    with writer.graph.inserting_after(last):
        given = writer.graph.placeholder("product")
    part.replace_all_uses_with(given)
