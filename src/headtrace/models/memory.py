"""How much memory a recording needs, estimated before the run, and how much there is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import psutil
import torch

from headtrace.errors import OutOfMemoryError
from headtrace.models.attention import SCORES_AT_ONCE
from headtrace.models.fields import axis_sizes, choose
from headtrace.models.record import Recording, patterns_kept
from headtrace.tables import human

if TYPE_CHECKING:
    from headtrace.models.model import Model


def recording_bytes(
    model: Model, length: int, batch: int = 1, logits: int | None = None, keep: Iterable[str] | None = None
) -> int:
    """Bytes that a recording of ``batch`` prompts of ``length`` tokens takes at its peak, weights not included."""
    kept = length if logits is None else logits
    sizes = axis_sizes(model, batch, length, kept)
    fields = choose(Recording.FIELDS, keep, model)
    recorded = sum(math.prod(fields[name].shape(sizes)) for name in fields)
    # While a layer runs: scores and their softmax, the MLP's hidden units, and the output logits once more.
    hidden = getattr(model.hf.config, "intermediate_size", None) or 4 * model.d_model
    scores = 3 * batch * model.n_heads * length**2
    if "patterns" not in fields:  # then some rows at a time, and masks of all pairs
        scores = min(scores, 6 * SCORES_AT_ONCE) + 2 * batch * length**2
    working = scores + batch * (4 * length * hidden + kept * model.d_vocab)
    return torch.finfo(model.dtype).bits // 8 * (recorded + working)


def tracing_bytes(model: Model, length: int) -> int:
    """Bytes that tracing one firing of a prompt takes at its peak, its recording included, weights not: what is read of
    every upstream value on both sides, values and plain writes by prompt, and contributions over tokens."""
    keep = patterns_kept(model, None, "auto", 1, length)
    d_head, width = model.d_head, torch.finfo(model.dtype).bits // 8
    upstream = model.n_layers * model.n_heads * length * d_head
    plain = (model.n_layers + 1) * length * (model.d_model + 4 * d_head)
    return recording_bytes(model, length, 1, 1, keep) + width * (3 * upstream + plain)


def available_bytes() -> int:
    """Memory of this machine that can still be had."""
    return psutil.virtual_memory().available


def require_memory(
    model: Model, length: int, batch: int, logits: int | None, keep: Iterable[str] | None = None
) -> None:
    """Stop before the run if the estimate is more than there is."""
    needed = recording_bytes(model, length, batch, logits, keep)
    on_gpu = model.device.type == "cuda"
    available = torch.cuda.mem_get_info(model.device)[0] if on_gpu else available_bytes()
    if needed > available:
        raise OutOfMemoryError(
            f"Recording {batch} prompt(s) of {length} tokens needs about {human(needed)}, and {human(available)} is "
            "available. Shorten the prompt, record fewer prompts at once, or use a machine with more memory."
        )
