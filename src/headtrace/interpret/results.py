"""Signals in words, and whether the words are right: what a run hands back, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits import Circuit
from headtrace.interpret.controls import Controls, Exchange
from headtrace.interpret.judging import LEAST_TOP, Judged
from headtrace.interpret.protocols import Ledger
from headtrace.interpret.statistics import FALSE_DISCOVERY_RATE, Counts, Proportion
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    import polars as pl

SCHEMA = "headtrace.interpretation/1"


@dataclass(frozen=True)
class Interpretation:
    """Signals, their words, and whether the words are right."""

    signals: tuple[Judged, ...]
    controls: Controls
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    circuits: tuple[Circuit, ...] = ()
    """The circuits with words on their edges."""
    exchanged: tuple[Exchange, ...] = ()
    """The signals as they were judged by the words of others, behind the controls."""
    asked: Ledger = field(default_factory=Ledger)
    """Questions to language models, and how many of them have no answer that can be used."""

    @cached_property
    def fraction(self) -> Proportion:
        """The interpretable fraction: of the signals that were tested, those whose words are supported."""
        return self._fraction(self.signals)

    @cached_property
    def by_layer(self) -> dict[int, Proportion]:
        """The share of signals whose words are supported, layer by layer."""
        layers = sorted({each.signal.layer for each in self.signals})
        return {
            layer: self._fraction([each for each in self.signals if each.signal.layer == layer])
            for layer in layers
        }

    @staticmethod
    def _fraction(signals: Sequence[Judged]) -> Proportion:
        tested = [each for each in signals if each.tested]
        return Proportion(sum(each.supported for each in tested), len(tested))

    @property
    def failures(self) -> dict[str, int]:
        """What is not in the fraction: signals without an answer, signals without examples, pairs without a label."""
        return {
            "signals": sum(each.status == "failed" for each in self.signals),
            "too few examples": sum(each.status == "too few" for each in self.signals),
            "pairs": sum(each.counts.failed for each in self.signals),
        }

    @property
    def counts(self) -> Counts:
        """Over all supported signals: highest pairs against random ones."""
        return _sum(each.counts for each in self.signals if each.supported)

    @property
    def against_middle(self) -> Counts:
        """Over all supported signals: highest pairs against those in the middle."""
        return _sum(each.against_middle for each in self.signals if each.supported)

    @property
    def against_sibling(self) -> Counts:
        """Over all supported signals: highest pairs against those of another channel of the same head."""
        return _sum(each.against_sibling for each in self.signals if each.supported)

    def summary(self) -> str:
        """A few lines: the fraction, its controls, what failed."""
        failed, controls, asked = self.failures, self.controls, self.asked
        described = sum(each.description is not None for each in self.signals)
        lines = [
            f"{len(self.signals)} signals, {described} with words; supported: {self.fraction.count} of "
            f"{self.fraction.total} = {self.fraction} (Wilson 95%; false-discovery rate {FALSE_DISCOVERY_RATE:.0%})",
            f"With the words of another signal: {controls.shuffled_words} pass; with words of another that have "
            f"nothing in common with their own: {controls.different_words} of {controls.different_words.total}; with "
            f"labels dealt at random: {controls.shuffled_labels}; words shared by several signals: "
            f"{controls.shared_words}",
            f"Supported words hold for {self.counts.recall} of their own held-out pairs, "
            f"{_alarms(self.counts)} of random ones, {_alarms(self.against_middle)} of those that score in the middle, "
            f"{_alarms(self.against_sibling)} of another channel's highest",
        ]
        if any(failed.values()):
            lines.append(
                f"Not counted: {failed['signals']} signals without an answer, {failed['too few examples']} with fewer "
                f"than {LEAST_TOP} pairs above zero; {failed['pairs']} pairs without a label"
            )
        if asked.questions:
            lines.append(
                f"Of {asked.questions} questions to a language model {asked.unanswered} have no answer, and "
                f"{asked.unreadable} one that is not in the form that was asked for"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``interpretation.json`` keeps it."""
        return {
            "schema": SCHEMA,
            "settings": dict(self.settings),
            "interpretable": self.fraction.to_dict(),
            "by_layer": {str(layer): each.to_dict() for layer, each in self.by_layer.items()},
            "controls": {name: each.to_dict() for name, each in vars(self.controls).items()},
            "failures": self.failures,
            "asked": dict(vars(self.asked)),
            "supported": {
                "against_random": self.counts.to_dict(),
                "against_middle": self.against_middle.to_dict(),
                "against_sibling": self.against_sibling.to_dict(),
            },
            "signals": [each.to_dict() for each in self.signals],
            "exchanged": [each.to_dict() for each in self.exchanged],
        }

    @property
    def table(self) -> pl.DataFrame:
        """One row per signal."""
        import polars as pl

        return pl.DataFrame([_row(each) for each in self.signals], schema=_COLUMNS)

    def save(self, folder: str | Path) -> Path:
        """Write interpretation.json, descriptions.parquet and the circuits with their words into a folder."""
        folder = Path(folder)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(folder / "interpretation.json", text + "\n")
        with replacing(folder / "descriptions.parquet") as temporary:
            self.table.write_parquet(temporary)
        if len(self.circuits) == 1:
            self.circuits[0].save(folder / "circuit.json")
        elif self.circuits:
            from headtrace.circuits import write_parquet

            write_parquet(self.circuits, folder / "circuits.parquet")
        return folder


_COLUMNS: dict[str, Any] = {
    "id": str,
    "layer": int,
    "head": int,
    "channels": str,
    "kind": str,
    "side": str,
    "status": str,
    "description": str,
    "supported": bool,
    "p_value": float,
    "q_value": float,
    "accuracy": float,
    "precision": float,
    "recall": float,
    "failed": int,
}


def _row(each: Judged) -> dict[str, Any]:
    told, counts = each.to_dict(), each.counts
    measures = {name: getattr(counts, name).value for name in ("accuracy", "precision", "recall")}
    told |= measures | {"channels": "+".join(map(str, each.signal.channels)), "failed": counts.failed}
    return {name: told[name] for name in _COLUMNS}


def _sum(counts: Iterable[Counts]) -> Counts:
    total = Counts()
    for each in counts:
        total = Counts(**{name: value + getattr(total, name) for name, value in vars(each).items()})
    return total


def _alarms(counts: Counts) -> Proportion:
    """How many of the other pairs the words hold for."""
    return Proportion(counts.false_positive, counts.false_positive + counts.true_negative)
