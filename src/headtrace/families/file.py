"""The file of families, ``families.json``: which prompt is in which family, who represents it, what it agrees with.

>>> import tempfile
>>> agreed = {"order": {"ari": 1.0, "nmi": 1.0, "p": 0.01}}
>>> made = FamiliesFile("edges", {"a": 1, "b": 1, "c": 2}, {"1": "a", "2": "c"}, agreed)
>>> with tempfile.TemporaryDirectory() as folder:
...     again = load_families(made.save(folder))
>>> again == made, again.members(1)
(True, ['a', 'b'])
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from headtrace.errors import InputError
from headtrace.validation import Index, Text, checked, parse
from headtrace.writing import write_text

SCHEMA = "headtrace.families/1"
NAME = "families.json"


@checked
class FamiliesFile:
    """What the file says. Families are numbered from 1 by falling size."""

    grain: Text
    """What circuits were compared by: ``components``, ``edges`` or ``edge-channel``."""
    labels: Mapping[Text, Index] = field(hash=False)
    """The family of each prompt, by its id."""
    representatives: Mapping[Text, Text] = field(hash=False)
    """The prompt whose circuit has the least summed distance to the others of its family, by family."""
    agreement: Mapping[Text, Mapping[Text, float]] = field(hash=False)
    """By label column: the adjusted Rand index, normalised mutual information, and a p-value by permutation."""
    n: Index | None = None
    """How many families there are."""
    left_out: tuple[Text, ...] = ()
    """Prompts that failed, or whose circuits have no edges."""
    more: Mapping[Text, Any] | None = field(default=None, hash=False)
    """How the number was chosen, stability, exclusive edges, their ablation; see the documentation."""

    def members(self, family: int) -> list[str]:
        """The prompts of a family."""
        found = [id for id, each in self.labels.items() if each == family]
        if not found:
            there = ", ".join(map(str, sorted(set(self.labels.values())))) or "none"
            raise InputError(f"There is no family {family}; there are: {there}.")
        return found

    def to_dict(self) -> dict[str, Any]:
        """What the file holds, with its schema."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        return {"schema": SCHEMA, **plain, "left_out": list(self.left_out), **(self.more or {})}

    def save(self, folder: str | Path) -> Path:
        """Write ``families.json`` into a folder."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        return write_text(Path(folder) / NAME, text + "\n")


def load_families(path: str | Path) -> FamiliesFile:
    """Read ``families.json``, or that of a folder. A damaged file gets an error that names the field."""
    place = Path(path) / NAME if Path(path).is_dir() else Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{str(place)!r} cannot be read: {reason}. `headtrace families RUN --out FOLDER` writes {NAME}."
        ) from None
    try:
        data = parse(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"it is no file of families (schema {SCHEMA})")
        names = [each.name for each in fields(FamiliesFile)]  # type: ignore[arg-type]
        known = {name: data.pop(name) for name in names if name in data}
        del data["schema"]
        missing = [name for name in ("grain", "labels", "representatives", "agreement") if name not in known]
        if missing:
            raise InputError(f"{missing[0]}: missing")
        return FamiliesFile(**known, more=data or None)
    except InputError as error:
        raise InputError(f"{str(place)!r}: {error}") from None
