"""How much memory a recording needs, estimated before the run, and how much there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headtrace.errors import OutOfMemoryError

if TYPE_CHECKING:
    from headtrace.models.model import Model


def recording_bytes(model: Model, length: int, batch: int = 1, logits: int | None = None) -> int:
    """Bytes that a recording of ``batch`` prompts of ``length`` tokens takes at its peak, weights not included."""
    width = torch.finfo(model.dtype).bits // 8
    L, H, KV, d, r = model.n_layers, model.n_heads, model.n_kv_heads, model.d_model, model.d_head
    patterns = L * H * length * length
    working = 3 * H * length * length
    residuals = (2 * L + 1) * length * d
    heads = L * (H + 2 * KV) * length * r
    mlp = 4 * length * getattr(model.hf.config, "intermediate_size", 4 * d)
    output = 2 * (length if logits is None else logits) * model.d_vocab
    return width * batch * (patterns + working + residuals + heads + mlp + output)


def available_bytes() -> int | None:
    """Memory that can still be had, or None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def human(n_bytes: float) -> str:
    """``4.2 GB`` and the like."""
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "KB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def require_memory(model: Model, length: int, batch: int, logits: int | None) -> None:
    """Stop before the run if the estimate is more than there is."""
    needed = recording_bytes(model, length, batch, logits)
    if model.device.type == "cuda":
        available: int | None = torch.cuda.mem_get_info(model.device)[0]
    else:
        available = available_bytes()
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"Recording {batch} prompt(s) of {length} tokens needs about {human(needed)}, and {human(available)} is "
            "available. Shorten the prompt, record fewer prompts at once, or use a machine with more memory."
        )
