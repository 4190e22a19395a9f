"""Into how many contiguous pieces a KV block falls: what a copy engine or an adapter has to be told one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hoptrace.errors import InputError
from hoptrace.kv import KvGeometry

__all__ = ["Contiguous", "Layout"]

Contiguous = Literal["layer_kv", "layer", "block"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one KV block lies in the memory of each rank.

    Attributes:
        layers: that keep KV. ranks: that each hold a part (or a copy) of every block.
        block_bytes: of one block, over all layers and ranks.
        contiguous: what lies together: ``layer_kv``: K and V of each layer apart (vLLM up to 0.11); ``layer``: both of a layer
            (latent attention keeps one vector); ``block``: all layers (vLLM from 0.12 for KV connectors).
    """

    layers: int
    block_bytes: int
    ranks: int = 1
    contiguous: Contiguous = "layer_kv"

    def __post_init__(self) -> None:
        if min(self.layers, self.block_bytes, self.ranks) < 1:
            raise InputError(f"A layout needs positive sizes: {self}.")
        if self.contiguous not in ("layer_kv", "layer", "block"):
            raise InputError(f"contiguous {self.contiguous!r} is unknown.", hint="There are: layer_kv, layer, block.")

    @classmethod
    def of(cls, geometry: KvGeometry, block_size_tokens: int, contiguous: Contiguous = "layer_kv") -> Layout:
        """The layout of a model's KV in blocks of ``block_size_tokens``; latent attention has no V beside K."""
        if geometry.latent_size is not None and contiguous == "layer_kv":
            contiguous = "layer"
        size = geometry.bytes_per_token * block_size_tokens
        return cls(geometry.layers, size, geometry.tp, contiguous)

    @property
    def pieces(self) -> int:
        """Contiguous pieces of one block on one rank: layers × 2, layers, or 1."""
        return {"layer_kv": 2 * self.layers, "layer": self.layers, "block": 1}[self.contiguous]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece, rounded up."""
        return -(-self.block_bytes // (self.ranks * self.pieces))

    @property
    def descriptors(self) -> int:
        """Pieces of one block over all ranks."""
        return self.pieces * self.ranks
