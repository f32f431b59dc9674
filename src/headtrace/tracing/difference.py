"""Difference flow: what changed a root between two runs, shared exactly among all components.

Two prompts of equal length are recorded; every operation between the tokens and the root has a secant that is exact
for the pair (`headtrace.tracing.secants`). One backward sweep through them gives a multiplier g wherever something is
written, and at every cut of the network ``J - J' = sum over components of D o_c . g_c``. What is the same in both runs
has no flow: biases, sinks and constants drop out.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> prompts = ["When Mary and John went to the store, John gave a drink to",
...            "When Mary and John went to the store, Mary gave a drink to"]
>>> clean, other = (model.record(prompt, keep=DIFFERENCE_FIELDS) for prompt in prompts)
>>> root = headtrace.roots.LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
>>> flow = difference_flow(clean, other, root)
>>> change = float(flow.value - flow.other_value)
>>> bool(abs(float(flow.embedding().sum()) - change) < 1e-4 * abs(change))
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.models.identities import tolerance_for
from headtrace.roots import Root
from headtrace.tracing.component_flow import DifferenceFlow
from headtrace.tracing.root_difference import RootDifference, root_difference
from headtrace.tracing.secants import AttentionSecant, HeadFlow, MlpSecant
from headtrace.vocabulary import Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

DIFFERENCE_FIELDS = CONTENT_FIELDS
"""What both recordings must keep."""
MLPS_KEPT = 64_000_000
"""Numbers in the secants of MLPs that a flow keeps (256 MB in float32): those of short prompts, all of them."""
STRONGEST_HEADS = 128
"""Head components of each layer whose flows are kept, those with the largest."""


@torch.inference_mode()
def difference_flow(recording: Recording, other: Recording, root: Root | Sequence[Root]) -> DifferenceFlow:
    """How the difference of a root between two runs flows through the model, by one backward sweep.

    Both recordings are of prompts of equal lengths, made with ``keep=DIFFERENCE_FIELDS``; ``root`` is one root, or one
    for each pair of prompts. The identity is checked at the embeddings and behind every attention and MLP, the
    conservation at every head component and MLP: an `IdentityError` says where it fails.
    """
    roots = list(root) if isinstance(root, Sequence) else [root] * len(recording)
    _require_pair(recording, other, len(roots))
    if recording.model.half:
        for run in (recording, other):
            _refuse_more_than_rounding(run)
    with recording.model.assume_weights_unchanged():
        read = tuple(root_difference(each, recording, other, i) for i, each in enumerate(roots))
        return _Sweep(recording, other, read).run()


def _require_pair(recording: Recording, other: Recording, n_roots: int) -> None:
    if recording.model is not other.model:
        raise InputError("The two recordings are of different models.")
    if recording.lengths != other.lengths:
        raise InputError(
            f"Difference flow compares prompts of equal length: {recording.lengths} and {other.lengths} tokens."
        )
    if n_roots != len(recording):
        raise InputError(f"There are {n_roots} roots for {len(recording)} pairs of prompts.")


def _refuse_more_than_rounding(recording: Recording) -> None:
    """A recording checks the sizes of its rounding parts when it computes them."""
    _ = recording.roundings
    for layer in range(recording.model.n_layers):
        recording.reading_roundings(layer)
        recording.value_roundings(layer)


class _Sweep:
    """The backward sweep, and its checks at every cut and every node."""

    def __init__(self, recording: Recording, other: Recording, roots: tuple[RootDifference, ...]) -> None:
        self.recording, self.other, self.roots = recording, other, roots
        model, residuals = recording.model, recording.residuals
        self.allowed, self.error = tolerance_for(model.dtype), 0.0
        self.strongest = [dict[Site, tuple[float, float]]() for _ in roots]
        self.residual = torch.zeros_like(residuals)
        self.rounding = residuals.new_zeros(residuals.shape[:-1])
        self.patterns = [(prompt, firing) for prompt, root in enumerate(roots) for firing in root.patterns]
        # By layer and prompt, D of what roots read of the residual before the layer, and of its patterns.
        self.of_residuals, self.of_patterns = residuals.new_zeros(2, len(residuals), len(recording))
        self.size = residuals.new_tensor([root.size for root in roots])
        for prompt, root in enumerate(roots):
            for read in root.residuals:
                self.residual[read.layer, prompt, read.position] += read.multiplier
            if root.residuals:
                self.of_residuals[root.residuals[0].layer, prompt] += root.value - root.other_value
        for prompt, f in self.patterns:
            ends = [run.attention.at(f.layer, prompt, f.head, f.dest, f.src) for run in (recording, other)]
            self.of_patterns[f.layer, prompt] += ends[0] - ends[1]

    def run(self) -> DifferenceFlow:
        model, run, other = self.recording.model, self.recording, self.other
        parallel, n = model.architecture.parallel(model.config), model.n_layers
        attention, through = (torch.empty_like(run.mlp_writes) for _ in range(2))
        onto, layers = torch.empty_like(run.queries), list[AttentionSecant]()
        left = torch.empty_like(run.mlp_writes) if model.half else None
        mlps, kept = dict[int, MlpSecant](), 0
        if model.half:
            self._round_logits()
        self._cut(n, "before the final norm", run.residuals[n] - other.residuals[n], self.residual[n])
        for layer in reversed(range(n)):
            g, ends = self.residual[layer + 1], (run.residuals[layer], other.residuals[layer])
            own, writes = AttentionSecant.of(run, other, layer)
            read = ends if parallel else (ends[0] + writes[0], ends[1] + writes[1])
            mlp = MlpSecant.of(run, other, layer, read)
            through[layer], behind = mlp.back(g)
            attention[layer] = g if parallel else g + through[layer]
            onto[layer] = own.onto_heads(attention[layer])
            dx, written = ends[0] - ends[1], run.mlp_writes[layer] - other.mlp_writes[layer]
            if left is not None:
                left[layer] = run.residuals[layer + 1] - other.residuals[layer + 1] - dx - written
                left[layer] -= writes[0] - writes[1]
                self.rounding[layer] += (left[layer] * g).sum(-1)
                assert mlp.writes is not None
                self.rounding[layer] += ((written - mlp.writes) * g).sum(-1)
                moved = read[0] - read[1]
                normed = moved if mlp.before is None else mlp.before.forward(moved)
                self.rounding[layer] += ((mlp.inputs - normed) * behind).sum(-1)
            else:
                largest = torch.maximum(run.mlp_writes[layer].abs(), other.mlp_writes[layer].abs())
                self._conserve_mlp(
                    layer, written * g, (read[0] - read[1]) * through[layer], largest * g.abs()
                )
            total, size, down, rounding = self._attention(own, onto[layer], dx)
            self.residual[layer] += g + through[layer] + down
            self._cut(layer, f"behind the attention of layer {layer}", dx, g + through[layer], (total, size))
            self.rounding[layer] += rounding  # until here it was inside the heads' own flow
            self._cut(layer, f"at layer {layer}", dx, self.residual[layer])
            layers.append(own)
            kept += mlp.n_numbers
            if kept <= MLPS_KEPT:
                mlps[layer] = mlp
        return DifferenceFlow(
            run,
            other,
            self.roots,
            tuple(reversed(layers)),
            self.residual,
            attention,
            through,
            onto,
            self.rounding,
            left,
            self.error,
            tuple(self.strongest),
            mlps,
        )

    def _keep_strongest(self, layer: int, first: int, found: HeadFlow) -> None:
        """Remember the head components of a layer, from some destination on, with the largest flows."""
        flows, shape = found.flow.flatten(1), found.flow.shape[1:]
        places = flows.abs().topk(min(STRONGEST_HEADS, flows.shape[1])).indices
        parts = torch.stack((found.moved.flatten(1), found.attends.flatten(1)), dim=-1)
        for mine, row, both in zip(self.strongest, places, parts, strict=True):
            heads, dests, sources = (each.tolist() for each in torch.unravel_index(row, shape))
            for head, dest, src, (moved, attends) in zip(
                heads, dests, sources, both[row].tolist(), strict=True
            ):
                if moved or attends:
                    mine[Site("head", layer, head, first + dest, src)] = moved, attends

    def _round_logits(self) -> None:
        """What rounding did to the output logits, at the position where they are read first."""
        for prompt, root in enumerate(self.roots):
            final = [read for read in root.residuals if read.layer == self.recording.model.n_layers]
            if final:
                ends = [run.residuals[-1, prompt] for run in (self.recording, self.other)]
                computed = sum(float((ends[0] - ends[1])[r.position] @ r.multiplier) for r in final)
                self.rounding[-1, prompt, final[0].position] = root.value - root.other_value - computed

    def _attention(
        self, own: AttentionSecant, onto: Tensor, dx: Tensor
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"], Tensor, Float[Tensor, "batch token"]]:
        """Back through a layer's attention: the sums of its heads' flows and of their magnitudes, the multiplier of
        the residual that it reads, and what rounding adds to queries, keys and values."""
        read = own.forward(dx)
        queries, keys, values = (
            torch.empty_like(own.queries),
            *(torch.zeros_like(own.queries) for _ in range(2)),
        )
        total = size = dx.new_zeros(len(dx))
        for rows in own.blocks():
            patterns = own.of_patterns(onto, rows, self.patterns)
            queries[:, :, rows.some], more_keys, more_values = own.pulled(onto, rows, patterns)
            keys, values = keys + more_keys, values + more_values
            found = own.flow(onto, rows, patterns, read)
            entering = found.value + found.query + found.key + found.rounding
            sizes = (
                found.value.abs() + found.query.abs() + found.key.abs() + (patterns * rows.softmax.mean).abs()
            )
            self._conserve_heads(own.layer, found.flow - entering, sizes.sum(-1, keepdim=True))
            self._keep_strongest(own.layer, rows.some.start, found)
            total = total + found.flow.sum((1, 2, 3))
            size = size + (found.moved.abs() + found.attends.abs()).sum((1, 2, 3))
        keys, values = (
            x.unflatten(1, (-1, self.recording.model.weights.group)).sum(2) for x in (keys, values)
        )
        rounding = torch.zeros_like(self.rounding[0])
        if self.recording.model.half:
            for g, recorded, made in zip((queries, keys, values), own.recorded(), read, strict=True):
                rounding += ((recorded - made) * g).sum((1, 3))
        sides: dict[Side, Tensor] = {"query": queries, "key": keys, "value": values}
        down = own.back({side: g.transpose(1, 2) for side, g in sides.items()})
        return total, size, down, rounding

    def _cut(
        self,
        layer: int,
        where: str,
        dx: Tensor,
        g: Tensor,
        heads: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """All that crosses a cut, and what rounding adds behind it, sums to what the roots read behind it.

        ``heads``, of a cut behind attention: the sums of the heads' flows and of their magnitudes.
        """
        product = dx * g
        found, size = product.sum((1, 2)) + self.rounding[layer:].sum((0, 2)), product.abs().sum((1, 2))
        expected = self.of_patterns[layer:].sum(0) + self.of_residuals[layer + (heads is not None) :].sum(0)
        if heads is not None:
            found, size = found + heads[0], size + heads[1]
        self._require(found - expected, torch.maximum(size, self.size), f"The flows {where}")

    def _conserve_mlp(self, layer: int, out: Tensor, into: Tensor, subtracted: Tensor) -> None:
        """``subtracted``: the larger of the two flows whose difference is ``out``. Where runs differ by the last digit
        only, what is left of them is rounding, and no part of it must be conserved."""
        size = (out.abs() + into.abs()).sum(-1) + self._rounding_of_root()[:, None]
        size = size + 16 * torch.finfo(out.dtype).eps / self.allowed * subtracted.sum(-1)
        self._require(
            out.sum(-1) - into.sum(-1),
            size + 1e-3 * size.amax(),
            f"The flows through the MLP of layer {layer}",
        )

    def _conserve_heads(self, layer: int, left: Tensor, size: Tensor) -> None:
        size = size + self._rounding_of_root()[:, None, None, None]
        self._require(left, size + 1e-3 * size.amax(), f"The flows through heads of layer {layer}")

    def _rounding_of_root(self) -> Float[Tensor, " batch"]:
        """A node that carries nothing but the last digits of numbers as large as the root's need not conserve them."""
        return 16 * torch.finfo(self.size.dtype).eps / self.allowed * self.size

    def _require(self, left: Tensor, size: Tensor, what: str) -> None:
        errors = torch.nan_to_num(left.abs() / size.clamp_min(1e-30), nan=torch.inf)
        error = float(errors.max())
        self.error = max(self.error, error)
        if not error <= self.allowed:
            place = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
            raise IdentityError(
                f"{what} do not add up: relative error {error:.1e} (allowed {self.allowed:.0e}) in prompt {place[0]}."
            )
