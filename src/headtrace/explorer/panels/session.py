"""A session of the explorer: the models that are served, their limits, and the prompts recorded so far.

A prompt is recorded once. From then on every request names the recording by its id, so that a click neither sends the
prompt again nor runs the model again.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> recorded = session.record(PromptRequest(text="When Mary and John went"))
>>> session.recorded(recorded.id) is recorded
True
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import BaseModel
from torch import Tensor

from headtrace.errors import HeadtraceError, InputError
from headtrace.explorer.panels.requests import PromptRequest
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing import Tracer

if TYPE_CHECKING:
    from headtrace.explorer.panels.circuits import RunSource
    from headtrace.explorer.panels.why import EvidenceView
    from headtrace.interpret import HeadRole
    from headtrace.models import Model, Recording
    from headtrace.request import ResolvedRequest, TraceRequest


@dataclass(frozen=True)
class Settings:
    """Limits of the explorer. Every number is at least one; a request beyond a limit is refused with an explanation.

    >>> Settings(max_tokens=64).max_tokens
    64
    """

    max_tokens: int = 512
    """Tokens of a prompt. Memory for attention patterns grows with its square."""
    max_waiting: int = 32
    """Computations in the queue."""
    max_requests: int = 256
    """Requests answered at the same time, including those that wait in the queue."""
    max_listeners: int = 64
    """Event streams open at the same time."""
    max_connections: int = 512
    """Connections open at the same time, or fewer where the system's limit on open files asks for it. Where there are
    more, the one that has waited longest for the head of a request is closed."""
    head_seconds: int = 10
    """Seconds that a client may take to send the head of a request."""
    body_bytes: int = 2_000_000
    """Bytes of a request body."""
    body_seconds: int = 30
    """Seconds that a client may take to send a request body."""
    cached_bytes: int = 1_000_000_000
    """Memory for recent recordings; the latest one is kept whatever its size."""
    cached_recordings: int = 32
    kept_jobs: int = 32
    """Finished jobs whose circuits can still be requested."""
    token: str | None = field(default=None, repr=False)
    """The token that clients must present; required unless only this machine can reach the server."""
    hosts: tuple[str, ...] = ()
    """Host names of the server, besides those of the loopback interface."""
    loopback: bool = True
    """Whether only this machine can reach the server."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1 and not isinstance(value, bool):
                raise InputError(f"{each.name}={value}: expected at least 1.")
        if not self.loopback and not self.token:
            raise InputError(
                "A server that other machines can reach needs a token: give one (--token), or serve on 127.0.0.1."
            )


# -- recordings ------------------------------------------------------------------------------------------------


class NotFoundError(HeadtraceError):
    """Something that does not exist, or that is not kept any more; ``code`` says which, for programs."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class RecordedPrompt:
    """A recorded prompt. Its id is made from the prompt and the interventions, so recording again restores it."""

    prompt: PromptRequest
    recording: Recording = field(repr=False)
    interventions: tuple[BaseModel, ...] = ()

    @property
    def id(self) -> str:
        return recording_id(self.prompt, self.interventions)


def recording_id(prompt: PromptRequest, interventions: Sequence[BaseModel] = ()) -> str:
    """The address of a recording.

    >>> recording_id(PromptRequest(text="a")) == recording_id(PromptRequest(text="a", model=1))
    False
    """
    parts = [each.model_dump(mode="json") for each in (prompt, *interventions)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


class Recordings:
    """A cache of recordings, limited in bytes and in number. Least recently used ones are dropped first."""

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes, self.max_count = max_bytes, max_count
        self._kept: OrderedDict[str, RecordedPrompt] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        with self._lock:
            return self._bytes()

    def get(self, id: str) -> RecordedPrompt | None:
        with self._lock:
            if id in self._kept:
                self._kept.move_to_end(id)
            return self._kept.get(id)

    def put(self, id: str, recorded: RecordedPrompt) -> None:
        with self._lock:
            self._kept[id] = recorded
            self._kept.move_to_end(id)
            while len(self._kept) > 1 and (
                len(self._kept) > self.max_count or self._bytes() > self.max_bytes
            ):
                self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(held_bytes(each.recording) for each in self._kept.values())


def held_bytes(recording: Recording) -> int:
    """Memory that a recording takes now: what was recorded, its masks, and tensors derived from it since."""
    found = [each for each in tuple(vars(recording).values()) if isinstance(each, Tensor)]
    derived = {id(each): each for each in found}.values()  # one tensor may have two names
    masks = {id(mask): mask for mask in recording.visible}.values()
    return recording.n_bytes + sum(each.numel() * each.element_size() for each in (*derived, *masks))


# -- the session -----------------------------------------------------------------------------------------------


@runtime_checkable
class ChannelEvidence(Protocol):
    """What is known about channels and heads of the first model, for example from an atlas."""

    def channel(self, layer: int, head: int, channel: int) -> EvidenceView | None: ...

    def roles(self, layer: int, head: int) -> Sequence[HeadRole]: ...


class Session:
    """One model, or two side by side, with their tracers and recordings; optionally an atlas and a run."""

    def __init__(
        self,
        models: Sequence[Model],
        settings: Settings | None = None,
        *,
        atlas: ChannelEvidence | None = None,
        run: RunSource | None = None,
    ) -> None:
        if not 1 <= len(models) <= 2:
            raise InputError(f"{len(models)} models: give one, or two to compare them.")
        self.models, self.settings = tuple(models), Settings() if settings is None else settings
        if run is not None:
            run.require_model(models)
        self.atlas, self._run = atlas, run
        self.tracers = tuple(Tracer(model) for model in models)
        self.recordings = Recordings(self.settings.cached_bytes, self.settings.cached_recordings)

    @property
    def run(self) -> RunSource:
        if self._run is None:
            raise NotFoundError("no_run", "No run is served: start the server with --run DIR.")
        return self._run

    @property
    def has_run(self) -> bool:
        return self._run is not None

    def record(self, prompt: PromptRequest) -> RecordedPrompt:
        """The recording of a prompt: one forward pass, unless it is in the cache."""
        if prompt.model >= len(self.models):
            raise InputError(
                "There is no second model: start the server with --beside MODEL, or ask for model 0."
            )
        found = self._current(recording_id(prompt))
        if found is None:
            model = self.models[prompt.model]
            ids = model.to_ids(prompt.tokens or prompt.text or "", bos=prompt.bos)
            self._check_length(len(ids))
            recording = model.record([ids], last_logits=True, keep=CONTENT_FIELDS, patterns="keep")
            found = RecordedPrompt(prompt, recording)
            self.recordings.put(found.id, found)
        return found

    def recorded(self, id: str) -> RecordedPrompt:
        """A recording by its id, of the model as it is or under interventions."""
        found = self._current(id)
        if found is None:
            raise NotFoundError(
                "not_kept", "This recording is not kept any more (or never was). Record the prompt again."
            )
        return found

    def clean(self, id: str) -> RecordedPrompt:
        """A recording by its id, of the model as it is."""
        found = self.recorded(id)
        if found.interventions:
            raise InputError(
                "This recording is of the model under interventions. Ask about the recording of the prompt itself."
            )
        return found

    def _current(self, id: str) -> RecordedPrompt | None:
        """A cached recording, unless the model's weights have changed since."""
        found = self.recordings.get(id)
        if found is None or found.recording.weights_version is not self.models[found.prompt.model].refresh():
            return None
        return found

    def resolve(self, request: TraceRequest, model: int) -> ResolvedRequest:
        """A request for one of the models, within the limits of the server.

        An answer of several tokens makes the prompt longer, up to the limit.
        """
        served = self.models[model]
        resolved = request.resolve(served)
        self._check_length(len(resolved.ids), "prompt and the answer have")
        return resolved

    def _check_length(self, length: int, what: str = "prompt has") -> None:
        if length > self.settings.max_tokens:
            raise InputError(
                f"The {what} {length} tokens, and {self.settings.max_tokens} are served. Shorten it, or start the "
                "server with a larger --max-tokens: memory grows with its square."
            )

    def tracer(self, request: TraceRequest, model: int) -> Tracer:
        """A tracer with the settings of a request, which shares the composed weights of the session."""
        tracer = Tracer.for_request(self.models[model], request)
        tracer.composer = self.tracers[model].composer
        return tracer

    def subject(self, recorded: RecordedPrompt, question: ResolvedRequest) -> Recording:
        """The recording that a root is read from: a longer one for an answer of several tokens."""
        if question.ids == recorded.recording.token_ids[0].tolist():
            return recorded.recording
        model = self.models[recorded.prompt.model]
        return model.record([question.ids], last_logits=question.logits_needed, keep=CONTENT_FIELDS)
