"""What the channels of a head do over many prompts: how many it uses, which ones, and what they are about.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> places = ("store", "school", "park")
>>> prompts = [f"When Mary and John went to the {place}, John gave a drink to" for place in places]
>>> found = survey(model, prompts, rotations=5)
>>> found.heads.height                                                # one row per head: firings, sizes, sparseness
12
>>> found.slices_used(1, 2).shape                                     # (prompts, channels): which channels L1H2 used
torch.Size([3, 32])
>>> len(found.consensus(1, 2)) < 16                                   # the channels that most of its firings share
True
>>> test = rotation_test(found, "spectrum")
>>> test.mean_true < test.mean_rotated                                # is the true basis sparser than rotated ones?
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.channels.sparsity import CONTROLS, Control
from headtrace.channels.svd import layer_svd
from headtrace.channels.terms import FiringTerms, Places, firing_places, real_positions, terms_of
from headtrace.errors import InputError
from headtrace.models.devices import exact
from headtrace.progress import Progress
from headtrace.prompts import as_prompts
from headtrace.vocabulary import AttentionSide, Prompt, head_name

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

FIRES_ABOVE = 0.5
"""A head fires where it puts more than this on one source (the 2024 definition)."""


@dataclass(frozen=True, eq=False)
class Survey:
    """Firings of many prompts, and as many pairs at which the heads do not fire."""

    frame: pl.DataFrame
    """One row per pair: prompt, layer, head, dest, src, fires, attention, logit, relative, sparseness,
    n_recon, signal_size, and with rotations sparseness_basis, sparseness_spectrum (means over rotations)."""
    signal_sets: Bool[Tensor, "row channel"]
    n_prompts: int

    @property
    def heads(self) -> pl.DataFrame:
        """One row per head: how often it fires, and the medians of its firings and of its quiet pairs."""
        fires, quiet = pl.col("fires"), ~pl.col("fires")
        return (
            self.frame.group_by("layer", "head")
            .agg(
                firings=fires.sum(),
                signal_size=pl.col("signal_size").filter(fires).median(),
                signal_size_quiet=pl.col("signal_size").filter(quiet).median(),
                sparseness=pl.col("sparseness").filter(fires).median(),
                n_recon=pl.col("n_recon").filter(fires).median(),
            )
            .sort("layer", "head")
        )

    def sizes(self, *, fires: bool = True, layer: int | None = None, head: int | None = None) -> list[int]:
        """Signal-set sizes of all rows that fire (or do not), of one head or of all."""
        rows = self.frame.filter(pl.col("fires") == fires)
        if layer is not None:
            rows = rows.filter(pl.col("layer") == layer)
        if head is not None:
            rows = rows.filter(pl.col("head") == head)
        return rows["signal_size"].to_list()

    def rows_of(self, layer: int, head: int, *, fires: bool = True) -> list[int]:
        wanted = (pl.col("layer") == layer) & (pl.col("head") == head) & (pl.col("fires") == fires)
        return self.frame.with_row_index("row").filter(wanted)["row"].to_list()

    def slices_used(self, layer: int, head: int, *, fires: bool = True) -> Float[Tensor, "prompt channel"]:
        """For each prompt, the share of the head's firings (or quiet pairs) whose signal set has each
        channel.

        Prompts without such a pair are rows of NaN.
        """
        rows = self.rows_of(layer, head, fires=fires)
        prompts = torch.tensor(self.frame["prompt"].gather(rows).to_list(), dtype=torch.long)
        used = torch.zeros(self.n_prompts, self.signal_sets.shape[1], dtype=torch.float64)
        used.index_add_(0, prompts, self.signal_sets[rows].double())
        return used / torch.bincount(prompts, minlength=self.n_prompts)[:, None]

    def consensus(self, layer: int, head: int, least: float = 0.4) -> tuple[int, ...]:
        """Channels that are in the signal sets of at least this share of the head's firings."""
        rows = self.rows_of(layer, head)
        if not rows:
            raise InputError(f"{head_name(layer, head)} does not fire on any of these prompts.")
        share = self.signal_sets[rows].double().mean(dim=0)
        return tuple((share >= least).nonzero()[:, 0].tolist())


def survey(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    above: float = FIRES_ABOVE,
    quiet_per_head: int = 2,
    rotations: int = 0,
    batch_size: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Decompose every firing of every head on many prompts, and some pairs per head and prompt that do not
    fire.

    The first token, the usual sink, counts neither as source nor as destination. ``progress`` hears of
    prompts.
    """
    prompts = as_prompts(prompts)
    frames: list[pl.DataFrame] = []
    sets: list[Tensor] = []
    for start, recording in _batches(model, prompts, batch_size):
        firing = firing_places(recording, above=above)
        places = torch.cat((firing, quiet_places(recording, above, quiet_per_head, seed + start)))
        terms = terms_of(recording, places)
        frame = _frame(terms, start).with_columns(fires=pl.Series(range(len(places))) < len(firing))
        frames.append(_with_rotations(frame, terms, rotations, seed))
        sets.append(terms.signal_sets.cpu())
        if progress is not None:
            progress(start + len(recording), len(prompts))
    return Survey(pl.concat(frames), torch.cat(sets), len(prompts))


def _batches(model: Model, prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, Recording]]:
    """Recordings of so many prompts each, and the number of the first of them."""
    for start in range(0, len(prompts), size):
        yield start, model.record(prompts[start : start + size], last_logits=True)


def quiet_places(recording: Recording, above: float, per_head: int, seed: int) -> Places:
    """Random pairs of visible tokens at which a head does not fire: up to so many per head and prompt."""
    generator = torch.Generator().manual_seed(seed)  # on the host, so that a seed draws alike on every device
    real = real_positions(recording, skip_first=True)
    found = [recording.token_ids.new_empty((0, 5))]
    for layer, pattern in enumerate(recording.patterns):
        allowed = (recording.visible[layer] & real[:, :, None] & real[:, None, :])[:, None] & (
            pattern <= above
        )
        draw = torch.rand(pattern.shape, generator=generator).to(pattern.device).masked_fill(~allowed, -1)
        values, flat = draw.flatten(2).topk(min(per_head, draw[0, 0].numel()), dim=-1)
        prompt, head, column = (values >= 0).nonzero().T
        place = flat[prompt, head, column]
        width = pattern.shape[-1]
        rows = (torch.full_like(prompt, layer), prompt, head, place // width, place % width)
        found.append(torch.stack(rows, dim=1))
    return torch.cat(found)


def _frame(terms: FiringTerms, first_prompt: int) -> pl.DataFrame:
    layer, prompt, head, dest, src = terms.places.T.tolist()
    return pl.DataFrame(
        {
            "prompt": [p + first_prompt for p in prompt],
            "layer": layer,
            "head": head,
            "dest": dest,
            "src": src,
            "attention": terms.attention.tolist(),
            "logit": terms.logit.tolist(),
            "relative": terms.relative.tolist(),
            "sparseness": terms.sparseness.tolist(),
            "n_recon": terms.n_recon.tolist(),
            "signal_size": terms.signal_sets.sum(dim=-1).tolist(),
        }
    )


def _with_rotations(frame: pl.DataFrame, terms: FiringTerms, rotations: int, seed: int) -> pl.DataFrame:
    """Means over rotations, for the rows that fire."""
    if rotations == 0:
        return frame
    rows = torch.tensor(frame["fires"].to_list(), device=terms.places.device)
    for control in CONTROLS:
        turned = terms[rows].rotated(rotations, control, seed)
        column = torch.full((len(frame),), torch.nan, dtype=torch.float64)
        column[rows.cpu()] = turned.mean_sparseness
        frame = frame.with_columns(pl.Series(f"sparseness_{control}", column.tolist()).fill_nan(None))
    return frame


@dataclass(frozen=True)
class RotationTest:
    """Sparseness in the true basis against rotated ones, head by head."""

    control: Control
    n_heads: int
    n_firings: int
    mean_true: float
    mean_rotated: float
    share_of_heads_sparser: float
    p_value: float
    """Wilcoxon signed-rank test over heads (a head's firings averaged first), one-sided: true is sparser."""


def rotation_test(found: Survey, control: Control) -> RotationTest:
    """Paired test of true against rotated sparseness. Heads are the sample: one head's firings are alike."""
    from scipy.stats import wilcoxon

    name = f"sparseness_{control}"
    if name not in found.frame.columns:
        raise InputError("This survey has no rotations: call survey(model, prompts, rotations=20).")
    firing = found.frame.filter(pl.col("fires"))
    by_head = firing.group_by("layer", "head", maintain_order=True)
    heads = by_head.agg(pl.col("sparseness").mean(), pl.col(name).mean())
    true, rotated = heads["sparseness"].to_numpy(), heads[name].to_numpy()
    outcome: Any = wilcoxon(true, rotated, alternative="less")
    return RotationTest(
        control=control,
        n_heads=len(heads),
        n_firings=len(firing),
        mean_true=float(true.mean()),
        mean_rotated=float(rotated.mean()),
        share_of_heads_sparser=float((true < rotated).mean()),
        p_value=float(outcome.pvalue),
    )


@torch.inference_mode()
def token_strengths(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    layer: int,
    head: int,
    channels: Sequence[int],
    groups: Sequence[Mapping[int, str]],
    *,
    side: AttentionSide = "key",
    other: str = "other",
    batch_size: int = 16,
) -> pl.DataFrame:
    """How strongly every token lies in a head's consensus subspace: ``|P x|`` of its normalised residual,
    averaged.

    ``groups`` names, for each prompt, the group of some positions (``{1: "name", 3: "name"}``); all others
    are ``other``. The first token is left out. Columns: token, group, strength, n; strongest first.
    """
    prompts = as_prompts(prompts)
    if len(groups) != len(prompts):
        raise InputError(f"{len(prompts)} prompts need {len(prompts)} mappings of groups, not {len(groups)}.")
    svd = layer_svd(model, layer)
    basis = (svd.V if side == "key" else svd.U)[head][:, list(channels)]
    rows: list[tuple[str, str, float]] = []
    for start, recording in _batches(model, prompts, batch_size):
        xhat = exact(recording.residuals[layer]) / exact(recording.norm_scales[layer])[..., None]
        strengths = (xhat @ basis).norm(dim=-1).tolist()
        for i, length in enumerate(recording.lengths):
            tokens, group = recording.tokens(i), groups[start + i]
            rows += [(tokens[t], group.get(t, other), strengths[i][t]) for t in range(1, length)]
    frame = pl.DataFrame(rows, schema=["token", "group", "strength"], orient="row")
    return (
        frame.group_by("token", "group")
        .agg(pl.col("strength").mean(), n=pl.len())
        .sort("strength", "token", descending=[True, False])
    )


def separation(strengths: pl.DataFrame, group: str) -> tuple[float, float]:
    """How well strength tells a group's tokens from all others: the area under the ROC curve, and a p-value.

    One token type counts once. The test is Mann and Whitney's, two-sided.
    """
    from scipy.stats import mannwhitneyu

    inside = strengths.filter(pl.col("group") == group)["strength"].to_numpy()
    outside = strengths.filter(pl.col("group") != group)["strength"].to_numpy()
    if not len(inside) or not len(outside):
        raise InputError(f"There must be tokens in the group {group!r} and outside it.")
    outcome: Any = mannwhitneyu(inside, outside, alternative="two-sided")
    return float(outcome.statistic) / (len(inside) * len(outside)), float(outcome.pvalue)
