"""The result of a study of sinks: tables, directions, figures, and the folder in which they are saved.

The folder has ``sinks.json``, tables as Parquet, directions and mean signals as safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headtrace.errors import InputError
from headtrace.sinks.sink_signals import SHARED, MeanSignals
from headtrace.sinks.tokens import FIRST, SINKS
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, parse_head
from headtrace.writing import replacing, write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "headtrace.sinks/1"
TABLES = ("tokens", "mass", "firings", "constancy", "directions", "groups", "collapse")
FIGURES = ("mass", "signals", "constancy", "collapse")
CONSTANT = 0.9
"""A mean cosine over prompts from which a head's signal counts as constant in a summary."""


@dataclass(frozen=True)
class SinkSettings:
    """The settings of the study, and its prompts."""

    threshold: float
    """Mean incoming attention from which a token is a sink."""
    firings_per_head: int
    seed: int
    method: str
    tau: str
    """The attention from which a head counts as attending, as the method says it."""
    prompts: Mapping[str, int]
    """How many there are of each task."""
    sinks: tuple[int, ...]
    """Token ids that are sinks wherever they stand; the first token always is."""
    skipped: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    """Of each file of prompts: the lines that could not be read, with their numbers (``line``) and ``reason``."""


@dataclass(frozen=True, eq=False, repr=False)
class Sinks:
    """Attention sinks of a model and their control signals. Made by ``headtrace.find_sinks``."""

    model: Mapping[str, str]
    settings: SinkSettings
    tokens: pl.DataFrame
    """Incoming attention by token, most first: token_id (none: the first place), token, kind, incoming, occurrences."""
    mass: pl.DataFrame
    """A row per layer, head and kind of source (``sinks``: all of them): mass, with its interval over prompts."""
    firings: pl.DataFrame = field(repr=False)
    """The firings that were traced."""
    constancy: pl.DataFrame
    """A row per head and side: the mean cosine of its signals over prompts of different tasks."""
    means: Mapping[AttentionSide, MeanSignals] = field(repr=False)
    directions: pl.DataFrame
    """A row per side and common direction: explained, cumulative, shared (heads with |cosine| >= 0.9)."""
    groups: pl.DataFrame
    """Heads that share a signal with one of them, the largest group first."""
    collapse: pl.DataFrame
    """Sink mass, loss, task with directions removed: a row per task, side, number, what was removed, and measure."""

    # -- looking ---------------------------------------------------------------------------------------------

    def cosines(self, side: AttentionSide) -> pl.DataFrame:
        """Cosines between the heads' mean signals: a column ``head``, then one for each head."""
        found = self._side(side)
        return pl.DataFrame({"head": found.names}, schema={"head": pl.String}).hstack(
            pl.DataFrame(found.cosines().double().numpy(), schema=dict.fromkeys(found.names, pl.Float64))
        )

    def vectors(self, side: AttentionSide) -> Float[Tensor, "direction d_model"]:
        """The common directions, strongest first, as residual vectors of length one."""
        return self._side(side).directions

    def _side(self, side: AttentionSide) -> MeanSignals:
        if side not in self.means:
            raise InputError(f"side={side!r}: choose 'query' or 'key'.")
        return self.means[side]

    def removed(self, side: str, directions: int, removed: str, measure: str, task: str = "all") -> float:
        """One mean of the table ``collapse``."""
        wanted = {"task": task, "side": side, "directions": directions}
        rows = self.collapse.filter(**wanted, removed=removed, measure=measure)
        if not len(rows):
            raise InputError(
                f"Nothing was measured for {wanted | {'removed': removed, 'measure': measure}}: see .collapse."
            )
        return rows["mean"][0]

    @property
    def sink_mass(self) -> float:
        """Mean over all heads."""
        return float(self.mass.filter(kind=SINKS)["mass"].mean())  # type: ignore[arg-type]

    def summary(self) -> str:
        """A few lines for people."""
        lines = [self._about_tokens()]
        lines += [self._about_side(side) for side in ATTENTION_SIDES]
        lines += self._about_collapse()
        return "\n".join(lines)

    def _about_tokens(self) -> str:
        heads = self.mass.filter(kind=SINKS)
        most = (heads["mass"] >= 0.5).sum()
        first = float(self.tokens.filter(kind=FIRST)["incoming"][0])
        others = self.tokens.filter(pl.col("token_id").is_in(list(self.settings.sinks)))
        named = ", ".join(
            f"{token!r} {incoming:.2f}" for token, incoming in others.select("token", "incoming").iter_rows()
        )
        prompts = ", ".join(f"{n} {task}" for task, n in self.settings.prompts.items())
        return (
            f"Sinks of {self.model['name']} ({prompts}): the first token receives {first:.2f} of attention"
            f"{f'; also {named}' if named else ''}. Mean mass on sinks {self.sink_mass:.2f}; {most} of {len(heads)} "
            "heads put half of their attention there or more."
        )

    def _about_side(self, side: AttentionSide) -> str:
        found, table = self.means[side], self.constancy.filter(side=side).drop_nulls("constancy")
        if not found.heads:
            return f"{side} side: no component wrote a signal."
        middle = table["constancy"].median()
        constant = (table["constancy"] >= CONSTANT).sum()
        rows = self.directions.filter(side=side)
        groups = self.groups.filter(side=side)
        said = "no head has two signals to compare" if middle is None else f"median constancy {middle:.2f}"
        few = min(4, len(rows))
        return (
            f"{side} side, {len(found.heads)} heads: {said} ({constant} heads at {CONSTANT} or more); the first "
            f"direction explains {rows['explained'][0]:.2f} of the mean signals and is shared (|cosine| >= {SHARED}) "
            f"by {rows['shared'][0]} heads; the first {few} explain {rows['cumulative'][few - 1]:.2f}; the largest "
            f"group of heads with one signal has {groups['size'][0]}."
        )

    def _about_collapse(self) -> list[str]:
        every = self.collapse.filter(task="all")
        if not len(every):
            return []
        lines: list[str] = []
        which = every.filter(removed="signals").select("side", "directions").unique(maintain_order=True)
        for side, k in which.rows():
            parts = [
                f"{measure} {self.removed('both', 0, 'nothing', measure):.2f} -> "
                f"{self.removed(side, k, 'signals', measure):.2f} "
                f"(random {self.removed(side, k, 'random', measure):.2f})"
                for measure in ("sink mass", "loss", "logit difference")
                if len(every.filter(measure=measure))
            ]
            where = "on both sides" if side == "both" else f"on the {side} side"
            lines.append(f"Without {k} direction{'s' if k > 1 else ''} {where}: {', '.join(parts)}")
        return lines

    def frame(self, of: str = "mass") -> pl.DataFrame:
        """A row per layer, head and kind of source (``mass``), or another table by its name."""
        if of not in TABLES:
            raise InputError(f"frame({of!r}): choose {', '.join(TABLES)}.")
        return getattr(self, of)

    def __repr__(self) -> str:
        return (
            f"Sinks({self.model['name']!r}: {sum(self.settings.prompts.values())} prompts, mean mass "
            f"{self.sink_mass:.2f}, {len(self.firings)} firings traced)"
        )

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return "".join(map(paragraph, self.summary().splitlines())) + frame(self.directions.head(8))

    # -- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What ``sinks.json`` holds: everything but the large tables."""
        return {
            "model": dict(self.model),
            "settings": asdict(self.settings),
            "sink_mass": self.sink_mass,
            "tokens": self.tokens.head(20).to_dicts(),
            "constancy": _constancy_by_side(self.constancy),
            "directions": self.directions.to_dicts(),
            "groups": self.groups.group_by("side", maintain_order=True).head(5).to_dicts(),
            "collapse": self.collapse.to_dicts(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``sinks.json``, the tables as Parquet, the directions as safetensors, and the figures."""
        path = save_sinks(self, folder)
        for name in FIGURES:
            if name != "collapse" or len(self.collapse):
                self.plot(name, path / f"sinks-{name}.png")
        return path

    def plot(self, which: str = "signals", path: str | Path | None = None) -> Figure:
        """``mass``, ``signals`` (cosines between heads, left and right), ``constancy`` or ``collapse``."""
        from headtrace.figures import sinks

        if which not in FIGURES:
            raise InputError(f"There is no figure {which!r}: choose {', '.join(FIGURES)}.")
        if which == "collapse" and not len(self.collapse):
            raise InputError("Nothing was removed, so there is no collapse to draw: give directions=(1, 4).")
        draw = {
            "mass": sinks.sink_masses,
            "signals": sinks.signal_cosines,
            "constancy": sinks.signal_constancy,
            "collapse": sinks.sink_collapse,
        }
        return draw[which](self, path)


def _constancy_by_side(table: pl.DataFrame) -> list[dict[str, Any]]:
    columns = pl.col("constancy")
    return (
        table.drop_nulls("constancy")
        .group_by("side", maintain_order=True)
        .agg(
            pl.len().alias("heads"),
            columns.median().alias("median"),
            columns.quantile(0.25, "linear").alias("lower_quartile"),
            columns.quantile(0.75, "linear").alias("upper_quartile"),
            (columns >= CONSTANT).sum().alias("constant"),
            pl.col("within").median().alias("within_median"),
        )
        .to_dicts()
    )


# -- the folder ----------------------------------------------------------------------------------------------


def save_sinks(found: Sinks, folder: str | Path) -> Path:
    """Write everything but the figures."""
    path = Path(folder)
    tensors = {
        f"{side}.{name}": getattr(found.means[side], name).contiguous()
        for side in ATTENTION_SIDES
        for name in ("means", "directions")
    }
    heads = {side: found.means[side].names for side in ATTENTION_SIDES}
    content = {"schema": SCHEMA, "heads": heads, **found.to_dict()}
    tables = {name: getattr(found, name) for name in TABLES}
    tables |= {f"cosines-{side}": found.cosines(side) for side in ATTENTION_SIDES}
    for name, table in tables.items():
        with replacing(path / f"{name}.parquet") as temporary:
            table.write_parquet(temporary)
    write_bytes(path / "signals.safetensors", save(tensors))
    # Last: it says that the rest is there.
    write_text(path / "sinks.json", json.dumps(content, indent=1) + "\n")
    return path


def load_sinks(folder: str | Path) -> Sinks:
    """Read what ``Sinks.save`` wrote."""
    path = Path(folder)
    content = _read(path / "sinks.json")
    if content.get("schema") != SCHEMA:
        raise InputError(
            f"{str(path / 'sinks.json')!r} has the schema {content.get('schema')!r}, not {SCHEMA!r}: this version "
            "cannot read it. Make the sinks again."
        )
    try:
        settings = dict(content["settings"])
        settings["sinks"] = tuple(settings["sinks"])
        heads, shares, model = content["heads"], content["directions"], dict(content["model"])
        tensors = _read(path / "signals.safetensors")
        means: dict[AttentionSide, MeanSignals] = {
            side: _means(side, heads[side], shares, tensors) for side in ATTENTION_SIDES
        }
        made = SinkSettings(**settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{str(path / 'sinks.json')!r} is damaged: {type(error).__name__} at {error}. Make the sinks again."
        ) from None
    tables = {name: _read(path / f"{name}.parquet") for name in TABLES}
    return Sinks(model=model, settings=made, means=means, **tables)


def _read(path: Path) -> Any:
    """The content of one file of the folder; an error that names the file where it is missing or damaged."""
    try:
        if path.suffix == ".parquet":
            return pl.read_parquet(path)
        if path.suffix == ".safetensors":
            return load(path.read_bytes())
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{str(path)!r} cannot be read: {reason}. Give the folder that was written with .save or --out, or make "
            "the sinks again."
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"{str(path)!r} is not JSON: it is damaged. Make the sinks again.") from None
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} holds no JSON object: it is damaged. Make the sinks again.")
    return content


def _means(
    side: AttentionSide, heads: list[str], shares: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> MeanSignals:
    explained = tuple(float(row["explained"]) for row in shares if row["side"] == side)
    means, directions = tensors[f"{side}.means"], tensors[f"{side}.directions"]
    if len(means) != len(heads) or len(directions) != len(explained):
        raise InputError(
            f"sinks.json names {len(heads)} heads on the {side} side, signals.safetensors has {len(means)}: the files "
            "do not belong together. Make the sinks again."
        )
    return MeanSignals(tuple(parse_head(name) for name in heads), means, directions, explained)
