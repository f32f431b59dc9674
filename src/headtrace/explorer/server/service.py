"""What the routes do, inside the worker: models, their tracers, recordings that are kept, and what lies beside them.

Methods here compute; none of them knows of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import headtrace
from headtrace.circuits.files import dumps
from headtrace.errors import InputError
from headtrace.explorer.page import json_for_script, page, page_data
from headtrace.explorer.server.answers import RefusedError, not_kept
from headtrace.explorer.server.jobs import Finished, Job
from headtrace.explorer.server.recordings import Kept, Recordings
from headtrace.explorer.server.schemas import (
    CircuitView,
    ExampleView,
    HeadPattern,
    InterveneRequest,
    InterveneView,
    PromptRequest,
    RecordingView,
    RootRequest,
    RunMap,
    RunPage,
    ServedModel,
    ServerView,
    TraceRequest,
    WhyRequest,
    WhyView,
)
from headtrace.explorer.server.settings import Settings
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing import Tracer

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.explorer.views.runs import RunSource
    from headtrace.explorer.views.why import Known
    from headtrace.models import Model, Recording


EVERY = 0.5
"""Seconds between two circuits that are shown while one is traced."""


class Explorer:
    """One model, or two beside each other; with an atlas and a run, where there are any."""

    def __init__(
        self,
        models: Sequence[Model],
        settings: Settings,
        *,
        atlas: Known | None = None,
        run: RunSource | None = None,
    ) -> None:
        if not 1 <= len(models) <= 2:
            raise InputError(f"{len(models)} models: give one, or two to compare them.")
        self.models, self.settings, self.atlas, self.run = tuple(models), settings, atlas, run
        self.tracers = tuple(Tracer(model) for model in models)
        self.recordings = Recordings(settings.cached_bytes, settings.cached_recordings)

    # -- what is served ----------------------------------------------------------------------------------------

    @cached_property
    def server(self) -> ServerView:
        from headtrace.explorer.views.tasks import task_views

        return ServerView(
            version=headtrace.__version__,
            models=[_served(model) for model in self.models],
            tasks=task_views(),
            atlas=self.atlas is not None,
            run=self.run is not None,
            max_tokens=self.settings.max_tokens,
            max_waiting=self.settings.max_waiting,
        )

    def examples(self, task: str, count: int, seed: int) -> list[ExampleView]:
        from headtrace.explorer.views.tasks import examples

        return examples(self.models[0], task, count, seed)

    # -- prompts -----------------------------------------------------------------------------------------------

    def record(self, prompt: PromptRequest) -> RecordingView:
        from headtrace.explorer.views.prompts import record_view

        return record_view(self.model(prompt), self.recorded(prompt), prompt.model, prompt)

    def recorded(self, prompt: PromptRequest) -> Recording:
        """The recording of a prompt: the one that is kept, or a new one."""
        from headtrace.explorer.views.prompts import recording_id

        model, ids = self.model(prompt), self.token_ids(prompt)
        id = recording_id(prompt.model, ids)
        kept = self.recordings.get(id)
        if kept is not None and kept.recording.weights_version is model.refresh():
            return kept.recording
        recording = model.record([ids], last_logits=True, keep=CONTENT_FIELDS, patterns="keep")
        self.recordings.put(id, recording, prompt.model)
        return recording

    def patterns(self, id: str) -> bytes:
        from headtrace.explorer.views.prompts import pattern_bytes

        return pattern_bytes(self._kept(id).recording)

    def head(self, id: str, layer: int, head: int) -> HeadPattern:
        from headtrace.explorer.views.prompts import head_pattern

        return head_pattern(self._kept(id).recording, layer, head)

    def why(self, request: WhyRequest) -> WhyView:
        from headtrace.explorer.views.why import why_view

        self._check_root(request.prompt, request.root)
        evidence = self.atlas if request.prompt.model == 0 else None
        return why_view(
            self.tracer(request.prompt), self.recorded(request.prompt), request, evidence=evidence
        )

    def intervene(self, request: InterveneRequest) -> InterveneView:
        from headtrace.explorer.views.changing import intervene_view

        self._check_root(request.prompt, request.root)
        recording = self.recorded(request.prompt)
        if recording.lengths[0] + request.generate > self.settings.max_tokens:
            raise InputError(
                f"{recording.lengths[0]} tokens of the prompt and {request.generate} new ones are more than "
                f"{self.settings.max_tokens}. Generate fewer."
            )
        view, changed = intervene_view(self.tracer(request.prompt), recording, request)
        self.recordings.put(view.changed.id, changed, request.prompt.model)
        return view

    # -- circuits ----------------------------------------------------------------------------------------------

    def trace(self, request: TraceRequest, job: Job[Finished]) -> Finished:
        """A circuit, told as it grows; the job's cancellation is raised from within."""
        from headtrace.explorer.views.tracing import trace_view

        self._check_root(request.prompt, request.root)
        if request.counterfactual is not None:
            other = PromptRequest(
                text=request.counterfactual, bos=request.prompt.bos, model=request.prompt.model
            )
            self.token_ids(other)

        told = 0.0

        def partial(circuit: Circuit) -> None:
            nonlocal told
            job.check()
            if time.monotonic() - told > EVERY:
                job.tell("partial", json_for_script({"circuit": page_data(circuit)}))
                told = time.monotonic()

        view, circuit = trace_view(
            self.tracer(request.prompt), request, progress=job.progress, partial=partial
        )
        return Finished(view.model_dump_json(), circuit)

    def run_prompts(self, search: str, family: int | None, offset: int, limit: int) -> RunPage:
        return self._run().prompts(search, family, offset, limit)

    def run_map(self) -> RunMap:
        return self._run().map()

    def run_circuit(self, id: str) -> CircuitView:
        return self._run().circuit(id)

    # -- inside ------------------------------------------------------------------------------------------------

    def model(self, prompt: PromptRequest) -> Model:
        if prompt.model >= len(self.models):
            raise InputError(
                "There is no second model: start the server with --beside MODEL, or ask for model 0."
            )
        return self.models[prompt.model]

    def tracer(self, prompt: PromptRequest) -> Tracer:
        self.model(prompt)
        return self.tracers[prompt.model]

    def token_ids(self, prompt: PromptRequest) -> list[int]:
        """Of a prompt that is not too long."""
        from headtrace.explorer.views.prompts import token_ids

        ids, most = token_ids(self.model(prompt), prompt), self.settings.max_tokens
        if len(ids) > most:
            raise InputError(
                f"The prompt has {len(ids)} tokens, and {most} are served. Shorten it, or start the server with a "
                "larger --max-tokens: memory grows with its square."
            )
        return ids

    def _check_root(self, prompt: PromptRequest, root: RootRequest | None) -> None:
        """An answer of several tokens makes the prompt longer."""
        from headtrace.explorer.views.prompts import given

        if root is None:
            return
        length, model = len(self.token_ids(prompt)), self.model(prompt)
        answers = root.answer if isinstance(root.answer, list) else [root.answer]
        for answer in answers:
            new = len(model.continuation(given(prompt), answer))
            if length + new - 1 > self.settings.max_tokens:
                raise InputError(
                    f"The prompt has {length} tokens and the answer {new}, and {self.settings.max_tokens} are served. "
                    "Shorten one of them."
                )

    def _kept(self, id: str) -> Kept:
        kept = self.recordings.get(id)
        if kept is None or kept.recording.weights_version is not self.models[kept.model].refresh():
            raise not_kept()
        return kept

    def _run(self) -> RunSource:
        if self.run is None:
            raise RefusedError(404, "no_run", "No run is served: start the server with --run DIR.")
        return self.run


def circuit_file(circuit: Circuit) -> bytes:
    return dumps(circuit).encode()


def circuit_page(circuit: Circuit) -> bytes:
    return page(circuit).encode()


def _served(model: Model) -> ServedModel:
    return ServedModel(
        name=model.name,
        architecture=model.architecture.name,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        d_model=model.d_model,
        d_head=model.d_head,
    )
