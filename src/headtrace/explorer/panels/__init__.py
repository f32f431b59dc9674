"""The panels of the explorer: what each one is asked, what it computes, and how it is answered.

A panel is one module here. It holds the panel's request and answer (pydantic models, from which the OpenAPI schema is
made), the function that computes the answer, and the Python lines that compute the same with the library. Nothing here
knows about HTTP: `headtrace.explorer.server` serves the panels, and tests call them directly.

To add a panel:

1. Write its module here, with a request, an answer, and a function of a `Session` and the request.
2. Add it to `PANELS` below. It is then served at ``POST /api/NAME``, through the queue, with limits and errors.
3. Write ``app/NAME.js`` with a function that returns the panel's element (``place``), ``update(state)`` and its
   ``help``, and add it to the views in ``app/main.js``. What the address must remember is a line in ``app/address.js``.

A request about a prompt that was recorded extends `requests.RecordingRequest`, which names the recording by its id, or
`requests.RootedRequest`, which also says what to explain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headtrace.explorer.panels.changes import InterveneRequest, InterveneView, intervene
from headtrace.explorer.panels.mechanisms import QuestionRequest, QuestionView, question
from headtrace.explorer.panels.prompts import RecordingView, record
from headtrace.explorer.panels.requests import PromptRequest, Request
from headtrace.explorer.panels.session import Session, Settings
from headtrace.explorer.panels.why import PairsRequest, PairsView, WhyRequest, WhyView, pairs, why

__all__ = ["PANELS", "Panel", "Session", "Settings"]


@dataclass(frozen=True)
class Panel:
    """A panel as the server knows it: ``POST /api/NAME`` takes the request and returns the answer."""

    name: str
    request: type[Request]
    answer: type[BaseModel]
    compute: Callable[[Session, Any], BaseModel]


PANELS = (
    Panel("record", PromptRequest, RecordingView, record),
    Panel("question", QuestionRequest, QuestionView, question),
    Panel("why", WhyRequest, WhyView, why),
    Panel("pairs", PairsRequest, PairsView, pairs),
    Panel("intervene", InterveneRequest, InterveneView, intervene),
)
