"""How much memory a recording needs, estimated before the run, and how much there is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import psutil
import torch

from headtrace.errors import OutOfMemoryError
from headtrace.models.fields import axis_sizes, choose
from headtrace.models.record import Recording
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
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    working = batch * (3 * model.n_heads * length**2 + 4 * length * hidden + kept * model.d_vocab)
    return torch.finfo(model.dtype).bits // 8 * (recorded + working)


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
