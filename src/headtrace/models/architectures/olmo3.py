"""OLMo-3: OLMo-2 with sliding windows, which have rotary bases of their own."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import olmo2

ARCHITECTURE = replace(
    olmo2.ARCHITECTURE,
    name="OLMo-3",
    model_type="olmo3",
)
