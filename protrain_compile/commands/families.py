"""Families of models for ``protrain plan --largest``: ladders of sizes from the papers that introduced them.

GPT-2 beyond its own four sizes follows GPT-3's (arXiv:2005.14165, table 2.1). Llama's are those of its releases
(arXiv:2302.13971, table 2; 3.2 for 1B and 3B; arXiv:2407.21783 for 8B, 70B and 405B). OPT's are those of
arXiv:2205.01068, table 1. All are trained without dropout.
"""

from __future__ import annotations

import dataclasses

from protrain_compile.commands.models import ModelSource, resolve
from protrain_compile.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Family:
    """A ladder of models, smallest first.

    Attributes:
        architecture: What transformers calls it.
        common: Settings of all sizes; ``{seq}`` is the longest sequence.
        names: What the sizes are called.
        fields: The names of the settings that ``sizes`` gives.
        sizes: One row for each of ``names``.
    """

    architecture: str
    common: str
    names: tuple[str, ...]
    fields: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]

    def parameters(self, index: int) -> float:
        """Return about how many parameters one size has, as its name says."""
        name = self.names[index]
        return float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]

    def member(self, index: int, seq: int) -> ModelSource:
        """Return one size, for sequences of up to ``seq`` tokens."""
        own = ",".join(f"{name}={value}" for name, value in zip(self.fields, self.sizes[index], strict=True))
        source = resolve(f"{self.architecture}:{self.common.format(seq=max(seq, 1024))},{own}")
        return dataclasses.replace(source, name=f"{self.architecture} {self.names[index]}")


GPT = ((768, 12, 12), (1024, 24, 16), (1280, 36, 20), (1600, 48, 25))
LARGE_GPT = ((2560, 32, 32), (4096, 32, 32), (5120, 40, 40), (12288, 96, 96))
OPT = ((768, 12, 12), (2048, 24, 32), (2560, 32, 32), (4096, 32, 32), (5120, 40, 40), (7168, 48, 56), (9216, 64, 72))

FAMILIES = {
    "gpt2": Family(
        "gpt2",
        "attn_pdrop=0,embd_pdrop=0,resid_pdrop=0,n_positions={seq}",
        ("124M", "355M", "774M", "1.5B", "2.7B", "6.7B", "13B", "175B"),
        ("n_embd", "n_layer", "n_head"),
        GPT + LARGE_GPT,
    ),
    "llama": Family(
        "llama",
        "max_position_embeddings={seq}",
        ("1B", "3B", "7B", "8B", "13B", "33B", "65B", "70B", "405B"),
        (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        ),
        (
            (2048, 16, 32, 8, 8192, 128256),
            (3072, 28, 24, 8, 8192, 128256),
            (4096, 32, 32, 32, 11008, 32000),
            (4096, 32, 32, 8, 14336, 128256),
            (5120, 40, 40, 40, 13824, 32000),
            (6656, 60, 52, 52, 17920, 32000),
            (8192, 80, 64, 64, 22016, 32000),
            (8192, 80, 64, 8, 28672, 128256),
            (16384, 126, 128, 8, 53248, 128256),
        ),
    ),
    "opt": Family(
        "opt",
        "dropout=0,attention_dropout=0,layerdrop=0,max_position_embeddings={seq}",
        ("125M", "1.3B", "2.7B", "6.7B", "13B", "30B", "66B"),
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "word_embed_proj_dim"),
        tuple((width, depth, heads, 4 * width, width) for width, depth, heads in OPT),
    ),
}


def family(name: str) -> Family:
    """Return a family by name.

    Raises:
        OptionError: If there is none of that name.
    """
    if name not in FAMILIES:
        raise OptionError(f"--largest {name}: the families are {', '.join(FAMILIES)}")
    return FAMILIES[name]
