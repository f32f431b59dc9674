"""What is known of channels: from an atlas, or from an interpretation, each a folder that headtrace wrote.

    evidence = AtlasEvidence("atlas", model)
    evidence.channel(9, 6, 3)

An interpretation has words that were put to the test; an atlas has what stands out among the pairs that score highest.
A folder may be both: then tested words come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.explorer.server.schemas import Evidence
from headtrace.interpret import open_atlas
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.interpret import Atlas
    from headtrace.models import Model

EXAMPLES, TOKENS, KEPT = 3, 8, 4096
Key = tuple[int, int, int]


class AtlasEvidence:
    """A folder of ``headtrace atlas`` or ``headtrace interpret``; it must be of the model that is explored."""

    def __init__(self, folder: str | Path, model: Model) -> None:
        place = Path(folder)
        self.words = read_interpretation(place) if (place / "interpretation.json").is_file() else {}
        self.atlas: Atlas | None = None
        self.in_atlas: frozenset[str] = frozenset()
        if (place / "atlas.json").is_file():
            self.atlas = open_atlas(place, model)
            self.in_atlas = frozenset(self.atlas.channels["channel"])
        elif not (place / "interpretation.json").is_file():
            raise InputError(
                f"{str(folder)!r} is neither an atlas nor an interpretation: it has no atlas.json and no "
                "interpretation.json. Make one: headtrace atlas MODEL --corpus C --out DIR."
            )
        self.channel = lru_cache(KEPT)(self._channel)

    def _channel(self, layer: int, head: int, channel: int) -> Evidence | None:
        """What is known of a channel; None where nothing is."""
        found = self.words.get((layer, head, channel))
        if (
            found is not None
            or self.atlas is None
            or f"{head_name(layer, head)}:{channel}" not in self.in_atlas
        ):
            return found
        entry = self.atlas.channel(layer, head, channel)
        tokens = [each.what for each in entry.tokens][:TOKENS]
        examples = [pair.excerpt() for pair in entry.top[:EXAMPLES]]
        return Evidence(words=entry.words, tokens=tokens, examples=examples)


def read_interpretation(folder: Path) -> dict[Key, Evidence]:
    """The words of a folder of interpretations, by channel: of several signals that share one, the clearest."""
    path = folder / "interpretation.json"
    try:
        signals: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["signals"]
        described = [signal for signal in signals if signal["description"]]
        # Later ones stand over earlier ones: those of fewer channels, and supported ones, come last.
        described.sort(key=lambda signal: (-len(signal["channels"]), signal["supported"]))
        return {
            (signal["layer"], signal["head"], channel): _evidence(signal)
            for signal in described
            for channel in signal["channels"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The interpretation {str(folder)!r} cannot be read ({error}). Make it anew: headtrace interpret."
        ) from error


def _evidence(signal: Mapping[str, Any]) -> Evidence:
    shared = len(signal["channels"]) > 1
    together = f" (channels {', '.join(map(str, signal['channels']))} together)" if shared else ""
    return Evidence(
        words=signal["description"] + together,
        examples=[example["marked"] for example in signal.get("examples", [])][:EXAMPLES],
        p_value=signal["p_value"],
        supported=signal["supported"],
    )
