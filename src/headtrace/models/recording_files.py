"""Recordings on disk: tensors in safetensors, everything else in JSON, each with the checksum of the other.

>>> import headtrace, tempfile
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     model.record("When Mary and John").save(folder)
...     headtrace.Recording.load(folder, model)
Recording('builtin': 5 tokens, 3 layers x 4 heads, ...)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.models.identities import check_tokens
from headtrace.models.integrity import difference, require_same_weights, warn_if_not_compared
from headtrace.models.observer import Rotary
from headtrace.models.recording import Recording
from headtrace.writing import file_sha256, replacing, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from headtrace.models.model import Model

SCHEMA = "headtrace.recording/2"
_FIRST = "headtrace.recording/1"
"""Without checksums."""
TENSORS, FACTS = "recording.safetensors", "recording.json"
_AGAIN = "Record the prompt again, and save that."


class _Model(BaseModel):
    name: str
    """The name it was loaded by."""
    weights_sha256: str
    """A hash of its weights: a recording is read with the model that it was made of."""
    computation_sha256: str | None = None
    """A hash of what else computes: its config's computing part, and its buffers; earlier versions kept none."""


class _Facts(BaseModel):
    """What a recording is besides its tensors."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_: str = Field(alias="schema")
    """The form of the files."""
    model: _Model
    """The model that was recorded."""
    lengths: list[int]
    """How many tokens each prompt has, without padding."""
    scales: list[float]
    """By layer, what attention logits are multiplied by."""
    softcaps: list[float | None]
    """By layer, the softcap of attention logits, where there is one."""
    rotary_of_layer: list[int]
    """By layer, the number of its rotary tables."""
    visible_of_layer: list[int]
    """By layer, the number of its mask."""
    tensors_sha256: str | None = None
    """The checksum of the tensors' file, which in turn holds that of everything else here."""


# -- writing -----------------------------------------------------------------------------------------------------


def save_recording(recording: Recording, folder: str | Path) -> None:
    """Write ``recording.safetensors`` and ``recording.json`` into ``folder``."""
    require_same_weights(recording)  # the file names the weights that it belongs to
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
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "model": {
            "name": recording.model.name,
            "weights_sha256": recording.model.weights_sha256,
            "computation_sha256": recording.model.computation_sha256,
        },
        "lengths": list(recording.lengths),
        "scales": list(recording.scales),
        "softcaps": list(recording.softcaps),
        "rotary_of_layer": rotary_of_layer,
        "visible_of_layer": visible_of_layer,
    }
    with replacing(Path(folder) / TENSORS) as temporary:
        save_file(tensors, temporary, {"facts_sha256": _facts_sha256(facts)})
        facts["tensors_sha256"] = file_sha256(temporary)
    write_text(Path(folder) / FACTS, json.dumps(facts, indent=1) + "\n")


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


def _facts_sha256(facts: dict[str, Any]) -> str:
    said = {key: value for key, value in facts.items() if key != "tensors_sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- reading -----------------------------------------------------------------------------------------------------


def load_recording(folder: str | Path, model: Model) -> Recording:
    """Read a recording that ``save_recording`` wrote; ``model`` must have the same weights, config and buffers.

    The two files must belong together, and all they hold must fit each other and the model. A recording of an earlier
    version says nothing about the config: it is compared by its weights, and a warning says so.
    """
    path = Path(folder)
    data = _json(path / FACTS)
    facts = _facts(path / FACTS, data)
    other = difference(facts.model, model)
    if other is not None:
        raise InputError(
            f"The recording was made with another model than {model.name!r}: {facts.model.name!r} has {other}. Load "
            "the model that was recorded, or record the prompt again."
        )
    warn_if_not_compared(f"The recording in {str(path)!r}", facts.model)
    tensors = _tensors(path, facts, None if facts.schema_ == _FIRST else _facts_sha256(data))
    try:
        return _recording(facts, {name: tensor.to(model.device) for name, tensor in tensors.items()}, model)
    except HeadtraceError as error:
        raise InputError(f"The recording in {str(path)!r} is damaged: {error} {_AGAIN}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"There is no recording in {str(path.parent)!r}: {path.name}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not JSON that can be read ({error}). {_AGAIN}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (SCHEMA, _FIRST):
        raise InputError(f"{str(path)!r} is not a recording: schema {shown(schema)}, expected {SCHEMA!r}.")
    return data


def _facts(path: Path, data: dict[str, Any]) -> _Facts:
    try:
        facts = _Facts.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise InputError(
            f"{str(path)!r} is damaged: {field}: {first['msg']}, got {shown(first['input'])}. {_AGAIN}"
        ) from error
    if facts.schema_ == SCHEMA and facts.tensors_sha256 is None:
        raise InputError(f"{str(path)!r} is damaged: tensors_sha256 is missing. {_AGAIN}")
    return facts


def _tensors(folder: Path, facts: _Facts, facts_sha256: str | None) -> dict[str, Tensor]:
    """The tensors of the file that belongs to these facts."""
    path = folder / TENSORS
    try:
        own = facts.tensors_sha256 is None or file_sha256(path) == facts.tensors_sha256
        with safe_open(path, framework="pt", device="cpu") as file:
            own = own and facts_sha256 in (None, (file.metadata() or {}).get("facts_sha256"))
            tensors = {name: file.get_tensor(name) for name in file.keys()} if own else {}  # noqa: SIM118
    except OSError as error:
        raise InputError(
            f"There is no recording in {str(folder)!r}: {path.name}: {error.strerror or error}."
        ) from error
    except (SafetensorError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error}. It is damaged, or cut short. {_AGAIN}"
        ) from error
    if not own:
        raise InputError(
            f"{FACTS} and {TENSORS} in {str(folder)!r} do not belong together: one of them was changed, is damaged, or "
            f"comes from another recording. {_AGAIN}"
        )
    return tensors


def _recording(facts: _Facts, tensors: dict[str, Tensor], model: Model) -> Recording:
    own = {name: tensor for name, tensor in tensors.items() if "." not in name}
    for name in ("token_ids", "logits"):
        _require(name, own)
    if "logit_positions" not in own:  # an older file: every position, or each prompt's last one
        own["logit_positions"] = _positions_of(own, facts.lengths)
    shared = {name: tensor for name, tensor in tensors.items() if "." in name}
    recording = Recording(
        model=model,
        lengths=tuple(facts.lengths),
        tensors=own,
        rotary=tuple(_rotary(shared, i) for i in facts.rotary_of_layer),
        visible=tuple(_require(f"visible.{i}", shared) for i in facts.visible_of_layer),
        scales=tuple(facts.scales),
        softcaps=tuple(facts.softcaps),
    )
    _check_values(recording, shared)
    if facts.schema_ == _FIRST and "residuals" in own:  # nothing else says that these tokens were recorded
        check_tokens(recording)
    return recording


def _require(name: str, tensors: dict[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise InputError(f"the tensor {name!r} is missing.")
    return tensors[name]


def _rotary(tensors: dict[str, Tensor], i: int) -> Rotary | None:
    if f"rotary.{i}.cos" not in tensors and f"rotary.{i}.sin" not in tensors:
        return None
    return Rotary(_require(f"rotary.{i}.cos", tensors), _require(f"rotary.{i}.sin", tensors))


def _positions_of(own: dict[str, Tensor], lengths: list[int]) -> Tensor:
    token_ids, logits = own["token_ids"], own["logits"]
    if token_ids.ndim != 2 or logits.ndim != 3 or len(lengths) != len(token_ids):
        raise InputError("its tensors do not have the axes of a recording.")
    if logits.shape[1] == token_ids.shape[1]:
        return torch.arange(logits.shape[1], device=logits.device).expand(len(token_ids), -1)
    return torch.tensor(lengths, device=logits.device)[:, None] - 1


def _check_values(recording: Recording, shared: dict[str, Tensor]) -> None:
    """Every tensor has its type and holds numbers; token ids and positions exist."""
    model, fields = recording.model, Recording.FIELDS
    expected = {name: fields[name].dtype or model.dtype for name in recording.tensors}
    expected |= {name: torch.bool if name.startswith("visible") else model.dtype for name in shared}
    for name, tensor in {**recording.tensors, **shared}.items():
        if tensor.dtype != expected[name]:
            raise InputError(f"the tensor {name!r} holds {tensor.dtype}, expected {expected[name]}.")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"the tensor {name!r} holds numbers that are not finite.")
    limits = {"token_ids": model.d_vocab, "logit_positions": recording.token_ids.shape[1]}
    for name, limit in limits.items():
        values = recording.tensors[name]
        if not bool(((values >= 0) & (values < limit)).all()):
            raise InputError(f"the tensor {name!r} must hold numbers from 0 to {limit - 1}.")
