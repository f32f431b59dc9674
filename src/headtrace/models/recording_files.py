"""Recordings on disk: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headtrace.errors import InputError
from headtrace.models.observer import Rotary
from headtrace.models.record import Recording

if TYPE_CHECKING:
    from torch import Tensor

    from headtrace.models.model import Model

SCHEMA = "headtrace.recording/1"


def _unique(items: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """Layers share masks and rotary tables: keep each once, and say which layer uses which."""
    kept: list[Any] = []
    index: list[int] = []
    for item in items:
        place = next((i for i, other in enumerate(kept) if other is item or _same(other, item)), None)
        if place is None:
            place = len(kept)
            kept.append(item)
        index.append(place)
    return kept, index


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Rotary) and isinstance(b, Rotary):
        return torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)


def save_recording(recording: Recording, folder: str | Path) -> None:
    """Write ``recording.safetensors`` and ``recording.json`` into ``folder``."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {name: t.contiguous() for name, t in recording.tensors.items()}
    rotary, rotary_of_layer = _unique(recording.rotary)
    visible, visible_of_layer = _unique(recording.visible)
    for i, table in enumerate(rotary):
        if table is not None:
            tensors[f"rotary.{i}.cos"], tensors[f"rotary.{i}.sin"] = (
                table.cos.contiguous(),
                table.sin.contiguous(),
            )
    for i, mask in enumerate(visible):
        tensors[f"visible.{i}"] = mask.contiguous()
    facts = {
        "schema": SCHEMA,
        "model": {"name": recording.model.name, "weights_sha256": recording.model.weights_sha256},
        "lengths": list(recording.lengths),
        "scales": list(recording.scales),
        "softcaps": list(recording.softcaps),
        "rotary_of_layer": rotary_of_layer,
        "visible_of_layer": visible_of_layer,
    }
    save_file(tensors, path / "recording.safetensors")
    (path / "recording.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_recording(folder: str | Path, model: Model) -> Recording:
    """Read a recording that ``save_recording`` wrote; ``model`` must have the same weights."""
    path = Path(folder)
    try:
        facts: dict[str, Any] = json.loads((path / "recording.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "recording.safetensors", device=str(model.device))
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise InputError(f"There is no readable recording in {str(path)!r}: {error}") from error
    if facts.get("schema") != SCHEMA:
        raise InputError(
            f"{str(path)!r} is not a recording: schema {facts.get('schema')!r}, expected {SCHEMA!r}."
        )
    if facts["model"]["weights_sha256"] != model.weights_sha256:
        raise InputError(
            f"The recording was made with {facts['model']['name']!r}, whose weights are not those of {model.name!r}."
        )
    rotary = tuple(
        Rotary(tensors[f"rotary.{i}.cos"], tensors[f"rotary.{i}.sin"])
        if f"rotary.{i}.cos" in tensors
        else None
        for i in facts["rotary_of_layer"]
    )
    own = {name: tensor for name, tensor in tensors.items() if "." not in name}
    if "logit_positions" not in own:  # an older file: every position, or each prompt's last one
        everywhere = own["logits"].shape[1] == own["token_ids"].shape[1]
        ends = torch.tensor(facts["lengths"], device=model.device)[:, None] - 1
        own["logit_positions"] = (
            torch.arange(own["logits"].shape[1]).expand(len(ends), -1) if everywhere else ends
        )
    return Recording(
        model=model,
        lengths=tuple(facts["lengths"]),
        tensors=own,
        rotary=rotary,
        visible=tuple(tensors[f"visible.{i}"] for i in facts["visible_of_layer"]),
        scales=tuple(facts["scales"]),
        softcaps=tuple(facts["softcaps"]),
    )
