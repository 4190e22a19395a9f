"""What one token of KV weighs on each server: layers, KV heads, head size, type, copies over tensor-parallel ranks, windows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hoptrace.analysis.text import bytes_text
from hoptrace.kv import KvGeometry, geometry
from hoptrace.manifest import Manifest, Server

__all__ = ["ServerKv", "server_kv"]


@dataclass(frozen=True, slots=True)
class ServerKv:
    """``shape`` of a server's KV, null with ``missing`` (what the manifest lacks) where it is not known. ``says``: in a
    sentence."""

    server: str
    model: str | None
    shape: KvGeometry | None
    block_tokens: int | None
    missing: list[str]

    @property
    def says(self) -> str:
        g = self.shape
        name = self.server + (f" ({self.model})" if self.model else "")
        if g is None:
            return f"{name}: the KV of a token is unknown (the manifest lacks {', '.join(self.missing)})."
        if g.latent_size is not None:
            what = f"{g.layers} layers × {g.latent_size} latent elements × {g.dtype}"
        else:
            what = f"2 × {g.layers} layers × {g.kv_heads} KV heads × {g.head_size} × {g.dtype}"
        said = f"{name}: {bytes_text(g.bytes_per_token)} of KV a token ({what})"
        if g.amplification != 1:
            said += f", ×{_plain(g.amplification)} of one copy: {g.tp} tensor-parallel ranks hold " + (
                "the latent vector each" if g.latent_size is not None else f"{g.kv_heads} heads between them"
            )
        if g.window_layers:
            said += (
                f"; {g.window_layers} of the layers keep the last {g.window_tokens:,} tokens only: "
                f"{bytes_text(g.bytes_of(8 * (g.window_tokens or 0)))} for {8 * (g.window_tokens or 0):,} tokens"
            )
        if self.block_tokens:
            said += f"; a block of {self.block_tokens} tokens is {bytes_text(self.block_tokens * g.bytes_per_token)}"
        return said + "."

    def as_dict(self) -> dict[str, Any]:
        g = self.shape
        known: dict[str, Any] = {} if g is None else {
            "layers": g.layers,
            "kv_heads": g.kv_heads,
            "head_size": g.head_size,
            "dtype": g.dtype,
            "tensor_parallel": g.tp,
            "latent_size": g.latent_size,
            "window_layers": g.window_layers,
            "window_tokens": g.window_tokens,
            "bytes_per_token": g.bytes_per_token,
            "copies": round(float(g.amplification), 6),
            "block_bytes": None if not self.block_tokens else self.block_tokens * g.bytes_per_token,
        }  # fmt: skip
        return {"server": self.server, "model": self.model, "kv": known or None, "missing": self.missing, "says": self.says}


def _plain(x: Fraction) -> str:
    return str(x) if x.denominator == 1 else f"{float(x):.2f}"


def server_kv(manifest: Manifest) -> list[ServerKv]:
    """The geometry of each server of the manifest."""
    return [ServerKv(s.name, s.model, geometry(s), s.block_size_tokens, _missing(s)) for s in manifest.servers]


def _missing(server: Server) -> list[str]:
    if geometry(server) is not None:
        return []
    out = [n for n in ("layers", "kv_heads", "head_size", "kv_dtype") if not getattr(server, n)]
    return out or [f"a KV type that is known ({server.kv_dtype})"]
