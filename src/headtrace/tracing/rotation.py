"""Rotary positions as algebra on channel bases: exact for full, partial and scaled rotary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Turns:
    """Cosines and sines of a layer's rotary positions for some firings' prompts; half as wide as the turned part.

    A row vector m turns at token t into ``(m1 cos - m2 sin, m2 cos + m1 sin, rest)``.
    """

    cos: Float[Tensor, "firing token half"]
    sin: Float[Tensor, "firing token half"]

    @property
    def half(self) -> int:
        return self.cos.shape[-1]

    @classmethod
    def of(cls, recording: Recording, layer: int, prompt: Int[Tensor, " firing"], length: int) -> Turns:
        """Turns of the first ``length`` tokens; zero wide for models without rotary positions."""
        rotary = recording.rotary[layer]
        if rotary is None:
            empty = recording.norm_scales.new_empty(prompt.shape[0], length, 0)
            return cls(empty, empty)
        half = rotary.cos.shape[-1] // 2
        rows = prompt if rotary.cos.shape[0] > 1 else torch.zeros_like(prompt)
        # Some models keep these tables in float32 whatever their dtype.
        dtype = recording.norm_scales.dtype
        return cls(rotary.cos[rows, :length, :half].to(dtype), rotary.sin[rows, :length, :half].to(dtype))

    def __getitem__(self, which: Int[Tensor, " active"]) -> Turns:
        return Turns(self.cos[which], self.sin[which])

    @property
    def stretch(self) -> Float[Tensor, "firing token"]:
        """By how much a turn can lengthen a vector (scaled rotary does)."""
        if self.half == 0:
            return self.cos.new_ones(self.cos.shape[:-1])
        return (self.cos.square() + self.sin.square()).amax(-1).sqrt().clamp_min(1.0)

    def basis_at(
        self, basis: Float[Tensor, "firing d_head channel"], token: Int[Tensor, " firing"]
    ) -> Tensor:
        """``R_t^T basis``: what the basis reads from a vector that has not been turned yet, at one token per firing."""
        rows = torch.arange(token.shape[0], device=token.device)
        cos, sin = self.cos[rows, token][..., None], self.sin[rows, token][..., None]
        first, second, rest = self.split(basis, dim=1)
        return torch.cat((cos * first + sin * second, cos * second - sin * first, rest), dim=1)

    def turn(
        self, x: Float[Tensor, "firing n token d_head"], times: Float[Tensor, "firing token"]
    ) -> Float[Tensor, "firing n token d_head"]:
        """Turn vectors that stand at every token, times a number for each token."""
        one = times[:, None, :, None]
        return self._turned(x, self.cos[:, None] * one, self.sin[:, None] * one, one)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor, one: Tensor) -> Tensor:
        first, second, rest = self.split(x, dim=-1)
        out = torch.empty_like(x)
        out_first, out_second, out_rest = self.split(out, dim=-1)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        torch.mul(rest, one, out=out_rest)
        return out

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """First half, second half and rest of the head dimension."""
        n = x.shape[dim]
        return x.split([self.half, self.half, n - 2 * self.half], dim=dim)  # type: ignore[return-value]

    def weighted_table(self, weight: Float[Tensor, "firing token"]) -> Float[Tensor, "firing token table"]:
        """Columns ``weight cos``, ``weight sin`` and ``weight``: all that a weighted sum over tokens needs."""
        w = weight[..., None]
        return torch.cat((w * self.cos, w * self.sin, w), dim=-1)

    def turn_summed(
        self, m: Float[Tensor, "firing n d_head"], sums: Float[Tensor, "firing n table"]
    ) -> Tensor:
        """``sum over t of weight_t (m turned at t)``, from the sums of the weighted table over tokens."""
        return self._turned(m, *sums.split([self.half, self.half, 1], dim=-1))

    def turned_dot(
        self, m: Float[Tensor, "firing n d_head"], g: Float[Tensor, "firing n d_head"]
    ) -> Float[Tensor, "firing n token"]:
        """``(m turned at t) . g`` for every token t."""
        m1, m2, m3 = self.split(m, dim=-1)
        g1, g2, g3 = self.split(g, dim=-1)
        even, odd = m1 * g1 + m2 * g2, m1 * g2 - m2 * g1
        return even @ self.cos.mT + odd @ self.sin.mT + (m3 * g3).sum(-1, keepdim=True)
