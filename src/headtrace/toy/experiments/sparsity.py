"""Relative attention in the SVD basis: sparse where features of interest are present, and only there.

Token pairs are drawn with one, two or no feature pairs of interest. All other features come and go as in
training; the other keys of the context hold none of interest. The control turns the singular vectors at
random and keeps the spectrum: low rank alone does not make attention sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from scipy.stats import norm
from torch import Tensor

from headtrace.measures import n_recon, relative, sparseness
from headtrace.progress import Progress
from headtrace.toy.alignment import Channels, channels
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.model import FeaturePair, Setting
from headtrace.toy.train import ToyModel, train

CLASSES = {"one": 1, "two": 2, "none": 0}


@dataclass(frozen=True)
class TokenPairs:
    """Strengths in the query, in the attended key and in the other keys of the context."""

    query: Float[Tensor, "pairs features"]
    attended: Float[Tensor, "pairs features"]
    others: Float[Tensor, "pairs others features"]

    @property
    def relative_key(self) -> Float[Tensor, "pairs features"]:
        """Strengths in the attended key less their mean over the other keys."""
        attended, others = self.attended.double(), self.others.double()
        return relative(attended, attended + others.sum(1), 1 + others.shape[1])

    def products(self, pairs: Sequence[FeaturePair]) -> Float[Tensor, "pairs feature_pairs"]:
        """The product of strengths of each feature pair: query feature times relative key feature."""
        query, key = [pair.query for pair in pairs], [pair.key for pair in pairs]
        return self.query[:, query] * self.relative_key[:, key]

    def terms(
        self, features: Float[Tensor, "d_model features"], found: Channels
    ) -> Float[Tensor, "pairs channels"]:
        """Relative attention, channel by channel."""
        w = features.T.double()
        return found.terms(self.query.double() @ w, self.relative_key @ w)


def draw(setting: Setting, count: int, interesting: int | None, generator: torch.Generator) -> TokenPairs:
    """Token pairs with exactly this many feature pairs of interest; None: as in training, whatever comes."""

    def tokens(*shape: int) -> Tensor:
        size = (*shape, setting.n_features)
        present = torch.rand(size, generator=generator) < setting.probability
        return present * torch.rand(size, generator=generator)

    query, attended, others = tokens(count), tokens(count), tokens(count, setting.context - 1)
    if interesting is not None:
        special = sorted({pair.query for pair in setting.pairs} | {pair.key for pair in setting.pairs})
        for strengths in (query, attended, others):
            strengths[..., special] = 0
        for row in range(count):
            for index in torch.randperm(len(setting.pairs), generator=generator)[:interesting].tolist():
                pair = setting.pairs[index]
                query[row, pair.query] = torch.rand((), generator=generator)
                attended[row, pair.key] = torch.rand((), generator=generator)
    return TokenPairs(query, attended, others)


def sparsity(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Decompose relative attention over training, for each class of token pairs."""
    n_seeds, steps, every = (1, 5000, 500) if quick else (5, 10_000, 200)
    count = 128 if quick else 500  # token pairs per class and seed
    trained = train(
        [Setting()], range(seed, seed + n_seeds), steps, snapshots=range(0, steps, every), progress=progress
    )
    generator = torch.Generator().manual_seed(seed)
    table = pl.concat([_curves(model, count, generator) for model in trained.models])
    pooled = _pool(table)
    model = trained.models[0]
    strength, arrays = _strength(trained.models, count, generator)
    arrays |= _examples(model, generator)
    for name in CLASSES:
        for basis in ("svd", "rotated"):
            part = pooled.filter(pl.col("token_pairs") == name, pl.col("basis") == basis)
            arrays["steps"] = part["step"].to_numpy()
            arrays[f"curve_{name}_{basis}"] = part["sparseness"].to_numpy()
            arrays[f"interval_{name}_{basis}"] = part["interval"].to_numpy()
    return Experiment("sparsity", _findings(pooled, table, strength, quick, model), table, arrays)


def _curves(model: ToyModel, count: int, generator: torch.Generator) -> pl.DataFrame:
    found = channels(model.query, model.key)
    rows: list[dict[str, object]] = []
    for name, interesting in CLASSES.items():
        pairs = draw(model.setting, count, interesting, generator)
        for place, step in enumerate(model.snapshot_steps):
            for basis, chosen in (("svd", found[place]), ("rotated", found[place].rotated(generator))):
                terms = pairs.terms(model.features[place], chosen)
                # A token may hold no feature at all; then there is no attention to speak of.
                terms = terms[terms.abs().sum(-1) > 0]
                measured = sparseness(terms)
                rows.append(
                    {
                        "seed": model.seed,
                        "step": step,
                        "token_pairs": name,
                        "basis": basis,
                        "count": count,
                        "sparseness": float(measured.mean()),
                        "sparseness_variance": float(measured.var()),
                        "n_recon": float(n_recon(terms)[terms.sum(-1) > 0].double().mean()),
                    }
                )
    return pl.DataFrame(rows)


def _pool(table: pl.DataFrame) -> pl.DataFrame:
    """Mean over seeds and token pairs, with the 95% interval of that mean.

    Token pairs of one seed share a model, so the interval adds the spread between seeds to that inside them.
    """
    inside = (pl.col("sparseness_variance") / pl.col("count")).mean() / pl.len()
    between = (pl.col("sparseness").var() / pl.len()).fill_null(0)
    return (
        table.group_by("token_pairs", "basis", "step")
        .agg(
            pl.col("sparseness").mean(),
            (float(norm.interval(0.95)[1]) * pl.max_horizontal(inside, between).sqrt()).alias("interval"),
            pl.col("n_recon").mean(),
        )
        .sort("token_pairs", "basis", "step")
    )


def _strength(
    models: tuple[ToyModel, ...], count: int, generator: torch.Generator
) -> tuple[list[dict[str, object]], dict[str, np.ndarray]]:
    """Term k against the product of strengths of pair k, in token pairs as they come in training."""
    rows: list[dict[str, object]] = []
    arrays: dict[str, np.ndarray] = {}
    for model in models:
        found = channels(model.query[-1], model.key[-1])
        pairs = draw(model.setting, count, None, generator)
        terms = pairs.terms(model.features[-1], found)
        products = pairs.products(model.setting.ordered_pairs)
        for place, pair in enumerate(model.setting.ordered_pairs):
            product = products[:, place]
            together = torch.stack([product, terms[:, place]])
            slope = float((product @ terms[:, place]) / (product @ product))
            rows.append(
                {
                    "seed": model.seed,
                    "pair": place,
                    "target_logit": pair.logit,
                    "correlation": float(torch.corrcoef(together)[0, 1]),
                    "slope": slope,
                }
            )
            if model is models[0]:
                arrays[f"product_{place}"], arrays[f"term_{place}"] = together.numpy()
    return rows, arrays


def _examples(model: ToyModel, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Five token pairs of each kind, early and late in training (figures 4 and 19), and five as they come."""
    found, arrays = channels(model.query, model.key), dict[str, np.ndarray]()
    only_first = Setting(pairs=model.setting.pairs[:1])
    plain = draw(model.setting, 5, 0, generator)
    one = draw(only_first, 5, 1, generator)
    special = [feature for pair in model.setting.pairs[1:] for feature in (pair.query, pair.key)]
    for strengths in (one.query, one.attended, one.others):
        strengths[..., special] = 0
    early = min(2, len(model.snapshot_steps) - 2)
    for name, pairs in (("one", one), ("none", plain)):
        for when, place in (("early", early), ("late", -1)):
            arrays[f"{name}_{when}"] = pairs.terms(model.features[place], found[place]).numpy()
    arrays["early_step"] = np.array(model.snapshot_steps[early])
    mixed = draw(model.setting, 5, None, generator)
    arrays["mixed_terms"] = mixed.terms(model.features[-1], found[-1]).numpy()
    arrays["mixed_products"] = mixed.products(model.setting.ordered_pairs).numpy()
    return arrays


def _findings(
    pooled: pl.DataFrame, table: pl.DataFrame, strength: list[dict[str, object]], quick: bool, model: ToyModel
) -> dict[str, object]:
    last = pooled.filter(pl.col("step") == pl.col("step").max())
    first = pooled.filter(pl.col("step") == pl.col("step").min())

    def read(frame: pl.DataFrame, column: str, basis: str = "svd") -> dict[str, float]:
        part = frame.filter(pl.col("basis") == basis)
        return dict(zip(part["token_pairs"].to_list(), part[column].to_list(), strict=True))

    late = read(last, "sparseness")
    correlations = [float(str(row["correlation"])) for row in strength]
    return {
        "quick": quick,
        "seeds": sorted(set(table["seed"].to_list())),
        "steps": model.snapshot_steps[-1],
        "token_pairs_per_class_and_seed": int(table["count"][0]),
        "sparseness_before_training": read(first, "sparseness"),
        "sparseness_after_training": late,
        "interval_after_training": read(last, "interval"),
        "sparseness_after_training_rotated": read(last, "sparseness", "rotated"),
        "n_recon_after_training": read(last, "n_recon"),
        "least_possible_sparseness": 1 / model.setting.d_head,
        "term_against_product_of_strengths": {
            "smallest_correlation": min(correlations),
            "by_seed_and_pair": strength,
        },
        "paper": [
            against_paper(
                "sparser with one pair of interest than with two, and with two than with none",
                "one < two < none",
                late,
                late["one"] < late["two"] < late["none"],
            ),
            against_paper(
                "the strength of a term follows the product of feature strengths",
                "correlates",
                min(correlations),
                min(correlations) > 0.9,
                "smallest correlation over pairs and seeds",
            ),
        ],
    }
