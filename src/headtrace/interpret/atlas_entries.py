"""What an atlas says of one head, or of one channel: typed, and read by itself.

>>> import headtrace, tempfile
>>> from headtrace.interpret.atlas import atlas
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     made = atlas(model, "sampled:300", folder, channels="top:2", length=50)
...     head = made.head(1, 2)
...     channel = made.channel(1, 2, head.channels[0])
>>> head.name, len(head.channels), head.measures["induction"] > 0
('L1H2', 2, True)
>>> channel.share == head.shares[channel.channel], channel.top[0].score == channel.highest
(True, True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headtrace.interpret.examples import Pair
from headtrace.interpret.heads import MEASURES
from headtrace.interpret.standing_out import StandsOut
from headtrace.vocabulary import head_name

Row = Mapping[str, Any]
Tokens = tuple[tuple[str, float], ...]
"""Tokens with their coefficients, strongest first."""
READS = ("query", "key", "opposite_query", "opposite_key")
SAID = 3
"""Relations, and tokens of either side, that the words of a channel name."""


@dataclass(frozen=True)
class HeadEntry:
    """A head over the corpus."""

    layer: int
    head: int
    measures: Mapping[str, float | None]
    """As in `headtrace.interpret.heads`; None where the corpus had no occasion for it."""
    shares: tuple[float, ...]
    """Of all its channels; they sum to one."""
    channels: tuple[int, ...]
    """Those that the atlas has more of, strongest first."""

    @property
    def name(self) -> str:
        """Such as ``L9H6``."""
        return head_name(self.layer, self.head)

    @classmethod
    def of(cls, row: Row, channels: Sequence[int]) -> HeadEntry:
        """The entry of a row of the table of heads."""
        measures = {name: row[name] for name in MEASURES}
        return cls(row["layer"], row["number"], measures, tuple(row["shares"]), tuple(channels))


@dataclass(frozen=True)
class ChannelEntry:
    """A channel over the corpus."""

    layer: int
    head: int
    channel: int
    share: float
    """Of what its head attends by."""
    highest: float | None
    """None if no pair scores above zero."""
    n_pairs: int
    quantiles: tuple[tuple[float, float], ...]
    tokens: tuple[StandsOut, ...]
    relations: tuple[StandsOut, ...]
    reads: Mapping[str, Tokens]
    """Through the embedding: ``query`` and ``key``, ``opposite_query`` and ``opposite_key``."""
    notes: tuple[str, ...]
    top: tuple[Pair, ...]
    """The highest pairs, highest first."""

    @property
    def name(self) -> str:
        """Such as ``L9H6:3``."""
        return f"{head_name(self.layer, self.head)}:{self.channel}"

    @property
    def words(self) -> str:
        """What stands out, in a line: of examples, not a tested claim.

        >>> found = StandsOut("the same token", None, 30, 0.75, 12.0)
        >>> comma = StandsOut(",", "src", 20, 0.5, 8.0)
        >>> ChannelEntry(9, 6, 3, 0.4, 7.5, 100, (), (comma,), (found,), {}, (), ()).words
        'the same token (75 %); to "," (50 %)'
        """
        said = [f"{each.what} ({each.share:.0%})".replace("%", " %") for each in self.relations[:SAID]]
        for side, word in (("dest", "from"), ("src", "to")):
            mine = [each for each in self.tokens if each.side == side][:SAID]
            if mine:
                named = ", ".join(json.dumps(each.what, ensure_ascii=False) for each in mine)
                said.append(f"{word} {named} ({sum(each.share for each in mine):.0%})".replace("%", " %"))
        return "; ".join(said) or "nothing stands out"

    @classmethod
    def of(cls, row: Row, head: int, pairs: Sequence[Row]) -> ChannelEntry:
        """The entry of a row of the table of channels, with its pairs."""
        return cls(
            layer=row["layer"],
            head=head,
            channel=row["number"],
            share=row["share"],
            highest=row["highest"],
            n_pairs=row["n_pairs"],
            quantiles=tuple((each["q"], each["score"]) for each in row["quantiles"]),
            tokens=_stand_out(row["tokens"]),
            relations=_stand_out(row["relations"]),
            reads={side: tuple((each["token"], each["coefficient"]) for each in row[side]) for side in READS},
            notes=tuple(json.loads(row["notes"])),
            top=tuple(_pair(each) for each in pairs),
        )


def _stand_out(text: str) -> tuple[StandsOut, ...]:
    return tuple(StandsOut(**each) for each in json.loads(text))


def _pair(row: Row) -> Pair:
    ids, tokens = tuple(row["token_ids"]), tuple(row["tokens"])
    return Pair(row["text"], row["dest"], row["src"], row["score"], ids, tokens)
