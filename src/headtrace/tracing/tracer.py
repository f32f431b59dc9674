"""From a prompt to its circuit.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> circuit = tracer.trace(prompt, answer=" Mary", wrong=" John")
>>> circuit.root.question()
'"Mary" rather than "John"'
>>> why = tracer.explain(prompt, firing="L2H0:14:10")
>>> why.firing
Firing(layer=2, head=0, dest=14, src=10)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from headtrace.circuits import Circuit, ComparedPrompt, MethodInfo, ModelInfo, PromptInfo
from headtrace.errors import InputError, deprecated
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.models.identities import check_values, roundings_of
from headtrace.models.integrity import require_same_weights
from headtrace.progress import Progress, scaled
from headtrace.prompts.encoding import decoded
from headtrace.request import (
    AUTO,
    TRACER_SETTINGS,
    PatternsKept,
    ResolvedRequest,
    TraceRequest,
    batch_requests,
    split_prompts,
    standard_settings,
    takes_request_options,
)
from headtrace.roots.base import Answer
from headtrace.tracing.assemble import assemble, model_info, with_equal_channels
from headtrace.tracing.attribute_root import NO_HEAD, Seeds, attribute_roots, find_seeds
from headtrace.tracing.causes import Causes, Explanation
from headtrace.tracing.complete import CONTENT_INFLUENCE, SMALL, WHOLE_INFLUENCE, CompleteSweep
from headtrace.tracing.components import Firings
from headtrace.tracing.content import Content, add_amounts
from headtrace.tracing.difference_circuit import (
    MOST_NODES,
    FlowBudget,
    PairFlow,
    PromptPair,
    difference_circuit,
    trace_pairs,
)
from headtrace.tracing.measured_replacements import BUDGET, Measured, measure
from headtrace.tracing.methods import IG_STEPS, Method, make_method
from headtrace.tracing.prompt_words import Replacement
from headtrace.tracing.rather_than import FiringParts, RatherThan
from headtrace.tracing.readings import Composer
from headtrace.tracing.sweep import Budget, OnPartial, PromptTrace, sweep
from headtrace.vocabulary import Firing, Prompt, TokenPlace

if TYPE_CHECKING:
    from headtrace.models import Model, Recording


PAIRS_AT_ONCE, PAIR_TOKENS = 16, 512
"""Pairs of prompts that are recorded together for difference circuits, and their tokens in all."""


@dataclass(frozen=True)
class PromptComparison:
    """One prompt beside those that it is compared with."""

    request: ResolvedRequest
    circuit: Circuit
    flows: list[PairFlow]
    measured: Measured | None
    """The changed prompts that were run, where headtrace found the counterfactuals itself."""


def _flow_budget(request: TraceRequest) -> FlowBudget:
    """The budget of a difference circuit: components by flow, unless the request says otherwise."""
    nodes = MOST_NODES if request.max_firings == Budget.max_firings else request.max_firings
    least = request.min_influence
    return FlowBudget(nodes) if least is None else FlowBudget(nodes, least, carried=1.0)


class Tracer:
    """Traces prompts of one model. Keeps composed weights, so one tracer for many prompts is fastest.

    ``method`` is a name (``"acc++"``, the default, ``"acc"``, ``"svt"``, or what another package registered) with its
    ``options``, such as ``tau``, a number or a function of the number of visible keys (default
    ``min(0.9, 2.5 / keys)``); or a method object (`headtrace.tracing.methods`). ``max_firings`` and ``min_influence``
    are the budget that keeps circuits readable (by default the influence that is followed is at least 0 for attention
    and 0.02 for content and complete circuits; difference circuits count flow instead: at most 100 components that
    carry nine tenths of it, none with less than 0.01 of the difference). ``patterns`` says whether attention patterns
    are kept in memory (``"keep"``) or computed again where they are read (``"recompute"``; ``"auto"``: by their size).
    """

    def __init__(
        self,
        model: Model,
        *,
        method: str | Method = "acc++",
        max_firings: int | None = Budget.max_firings,
        min_influence: float | None = None,
        patterns: PatternsKept = "auto",
        **options: Any,
    ) -> None:
        self.settings: dict[str, Any] = {"method": method, "method_options": options}
        self.settings |= {"max_firings": max_firings, "min_influence": min_influence, "patterns": patterns}
        TraceRequest("checks the settings", **self.settings)
        self.model = model
        self.method = make_method(method, **options)
        self.composer = Composer(model)

    @classmethod
    def for_request(cls, model: Model, request: TraceRequest) -> Tracer:
        """A tracer with the method, budget and other settings of a request."""
        settings = dict(request.tracer_settings)
        return cls(model, **settings.pop("method_options"), **settings)

    @takes_request_options
    def trace(
        self,
        prompt: Any,
        answer: Answer | None = None,
        wrong: Answer | None = None,
        *,
        progress: Progress | None = None,
        on_partial: Callable[[Circuit], None] | None = None,
        **options: Any,
    ) -> Circuit:
        """The circuit of one prompt: text, token ids in any form, a conversation, an example of a task, a mapping in
        the JSON form of a request, or a `TraceRequest`.

        ``answer`` and ``wrong`` are text, a token id, or a list of alternatives. With neither, nor anything else to
        explain, the model's own answer is taken, and its strongest rival; the circuit says so. Without ``root``, a
        wrong answer makes it ``"linear"`` (the logit difference) and anything else ``"probability"``; an answer of
        several tokens is then a continuation. ``heads=["L9H9", ...]`` starts from those heads at the last token
        instead.

        ``paths`` says what is followed: ``"attention"``, why heads attend (queries and keys); ``"content"``, what is
        moved to the root, through values and MLPs; ``"complete"``, both, and through the MLPs that wrote a query or key
        signal; ``"difference"``, what changed the root between the prompt and a ``counterfactual`` of the same length
        (several: the mean; ``"auto"``, or none: natural changes that flip the answer, found by the model itself, as are
        the answer and its rival where none is given). With ``neurons``, each MLP of a content or complete circuit lists
        as many of its hidden units, those that contribute most. Where no paths are asked for, those of attention are
        followed; if there are none, because MLPs give the answer, the complete circuit is traced, and says so.

        ``progress`` is called with the number of firings traced and the number known to be needed.
        ``on_partial`` is called with the circuit as far as it is known, again and again while it is traced: what is
        not followed yet is not ``expanded``. An exception raised by either ends the trace and is passed on.
        """
        if "grown" in options:
            deprecated("grown=", "0.5", "on_partial=")
            on_partial = options.pop("grown")
        request = self.request(prompt, answer=answer, wrong=wrong, **options)
        resolved = request.resolve(self.model)
        circuit = self._trace([resolved], progress, on_partial)[0]
        chosen = (
            options.get("paths") is not None
            or isinstance(prompt, TraceRequest)
            or (isinstance(prompt, Mapping) and "paths" in prompt)
        )
        if chosen or not (circuit.reason or "").startswith(NO_HEAD) or self.method.name != "acc++":
            return circuit
        # Attention has nothing to begin with: MLPs give the answer. Rather than nothing, what they read is followed.
        notice = (
            "The circuit of attention is empty (no head writes the answer itself), so this is the complete one, "
            'through MLPs and values; paths="attention" (--paths attention) says what is missing.'
        )
        said = notice if resolved.notice is None else f"{resolved.notice} {notice}"
        complete = replace(resolved, request=replace(resolved.request, paths="complete"), notice=said)
        return self._trace([complete], progress, on_partial)[0]

    @takes_request_options
    def trace_batch(
        self,
        prompts: Any,
        answer: Answer | None = None,
        wrong: Answer | None = None,
        *,
        counterfactual: Sequence[Prompt] | Literal["auto"] | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[Circuit]:
        """Circuits of many prompts, recorded and traced together; options mean what they mean in ``trace``.

        Prompts with answers of their own are mappings in the JSON form of a request, with ``text`` (or ``tokens``, or
        ``messages``), ``answer``, ``wrong``, ``counterfactual`` ..., or examples of a task, or requests; ``answer`` and
        ``wrong`` here hold for all others. ``counterfactual`` has one prompt for each, or is ``"auto"``.
        """
        given = split_prompts(prompts)
        same = counterfactual is None or counterfactual == AUTO
        others: list[Any] = [counterfactual] * len(given) if same else list(counterfactual or ())
        if len(others) != len(given):
            raise InputError(
                f"{len(others)} counterfactual prompts for {len(given)} prompts: give one for each."
            )
        resolved = [
            self.request(one, answer=answer, wrong=wrong, counterfactual=other, **options).resolve(self.model)
            for one, other in zip(given, others, strict=True)
        ]
        return self.trace_resolved(resolved, progress)

    def trace_resolved(
        self, requests: Sequence[ResolvedRequest], progress: Progress | None = None
    ) -> list[Circuit]:
        """Circuits of requests that are resolved for this model, in batches of similar length."""
        circuits: dict[int, Circuit] = {}
        for batch in batch_requests(requests):
            inside = scaled(progress, len(circuits), len(batch), len(requests))
            found = self._trace([requests[place] for place in batch], inside)
            circuits.update(zip(batch, found, strict=True))
            if progress is not None:
                progress(len(circuits), len(requests))
        return [circuits[place] for place in range(len(requests))]

    @takes_request_options
    def difference_flows(
        self,
        prompt: Any,
        answer: Answer | None = None,
        wrong: Answer | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[PairFlow]:
        """What a difference circuit is made from: the flows between the prompt and each prompt that it is compared
        with, before the budget chooses what to show. Options mean what they mean in ``trace``."""
        return self.compare(
            self.request(prompt, answer=answer, wrong=wrong, paths="difference", **options), progress
        ).flows

    def compare(
        self,
        request: TraceRequest | ResolvedRequest,
        progress: Progress | None = None,
        *,
        budget: int = BUDGET,
        seed: int = 0,
    ) -> PromptComparison:
        """One prompt beside those that it is compared with: flows, circuit, and the changed prompts that were run (at
        most ``budget``, where they are to be found)."""
        resolved = request.resolve(self.model) if isinstance(request, TraceRequest) else request
        resolved = replace(resolved, root=resolved.root.measured(self.model, resolved.ids))
        asked = resolved.request
        with self.model.assume_weights_unchanged():
            pairs, measured = self._pairs(resolved, progress, budget, seed)
            flows = trace_pairs(self.model, pairs, asked.patterns)
            circuit = self._difference_circuit(
                resolved, model_info(self.model), flows, _flow_budget(asked), measured
            )
        return PromptComparison(resolved, circuit, flows, measured)

    def request(self, prompt: Any, **options: Any) -> TraceRequest:
        """The request that ``trace`` makes of a prompt and its options, with the settings of this tracer.

        What is wrong with it is found before anything runs, here or when it is resolved for the model.

        >>> import headtrace
        >>> tracer = headtrace.Tracer(headtrace.load("builtin"))
        >>> tracer.request("When Mary and John", answer=" went").resolve(tracer.model).root.question()
        '"went"'
        """
        given = {name: value for name, value in options.items() if value is not None}
        settings = [name for name in TRACER_SETTINGS if name in given]
        if settings:
            raise InputError(f"{settings[0]} is a setting of the tracer: give it to Tracer(...).")
        if isinstance(prompt, TraceRequest) and given:
            raise InputError(f"The request has its options already: leave out {', '.join(given)}.")
        request = TraceRequest.create(prompt, **given)
        standard = standard_settings()
        for name, value in request.tracer_settings.items():
            if value not in (standard[name], self.settings[name]):
                raise InputError(
                    f"{name} is a setting of all prompts that are traced together: give it to the command or to "
                    "Tracer(...) (Tracer.for_request makes one), not to a single prompt."
                )
        return replace(request, **self.settings)

    def ask(self, prompt: Any, **options: Any) -> ResolvedRequest:
        """The old name of ``request(...).resolve(model)``."""
        deprecated("Tracer.ask", "0.5", "Tracer.request(...).resolve(model)")
        return self.request(prompt, **options).resolve(self.model)

    def explain(
        self,
        prompt: Prompt,
        firing: Firing | str,
        *,
        rather_than: str | int | None = None,
        bos: bool | None = None,
    ) -> Explanation:
        """Why does this head attend here? The causes of one firing, side by side.

        The firing is given by positions (``"L9H6:14:3"``) or words (``"L9H6:to:John"``, ``"L9H6:to:John#2"``); a head
        alone means its strongest pair. With ``rather_than``, another source (a word or a position): the two attentions
        compared, as exact sums over components and channels. Where the head does not attend, what it attends to
        instead, and what holds the pair down.
        """
        recording = self.model.record(
            [self.model.to_ids(prompt, bos=bos)], last_logits=True, patterns=self.settings["patterns"]
        )
        check_values(recording)
        return self.explain_recorded(recording, firing, rather_than=rather_than)

    def explain_recorded(
        self,
        recording: Recording,
        firing: Firing | str,
        prompt: int = 0,
        *,
        rather_than: str | int | None = None,
    ) -> Explanation:
        """As ``explain``, for a prompt that is already recorded."""
        wanted, notice = recording.find_firing(firing, prompt)
        tokens, name, prompt = recording.tokens(prompt), self.model.name, prompt % len(recording)
        other = None if rather_than is None else _other_source(recording, wanted, rather_than, prompt)
        found = self.trace_firings(recording, [wanted], prompt)[0]
        why = Explanation(found, tokens, name, notice)
        most = wanted.src
        if not why.attends:
            most = int(recording.attention.row(wanted.layer, prompt, wanted.head, wanted.dest).argmax())
        instead = None if most == wanted.src else replace(wanted, src=most)
        sources = list(dict.fromkeys([wanted, *(each for each in (other, instead) if each is not None)]))
        parts: FiringParts | None = None
        if len(sources) > 1:
            parts = FiringParts.of(recording, self.composer, sources, prompt)

        def split() -> FiringParts:
            require_same_weights(recording)
            return parts or FiringParts.of(recording, self.composer, sources, prompt)

        def against(source: Firing | None) -> RatherThan | None:
            found = None if source is None or parts is None else sources.index(source)
            return None if found is None or parts is None else RatherThan.of(parts, name, tokens, found)

        return replace(why, split=split, rather_than=against(other), instead=against(instead))

    def trace_firings(
        self, recording: Recording, firings: Sequence[Firing | str], prompt: int | Sequence[int] = 0
    ) -> list[Causes]:
        """Causes of chosen firings, in the order given: of one recorded prompt, or of one for each firing."""
        require_same_weights(recording)
        prompts = [prompt] * len(firings) if isinstance(prompt, int) else list(prompt)
        if len(prompts) != len(firings):
            raise InputError(f"{len(prompts)} prompts for {len(firings)} firings: give one for each.")
        parsed = [
            (place, recording.find_firing(firing, place)[0])
            for place, firing in zip(prompts, firings, strict=True)
        ]
        asked = [(place % len(recording), firing.site) for place, firing in parsed]
        rows = Firings.of(list(dict.fromkeys(asked)), self.model.device)
        with self.model.assume_weights_unchanged():
            traced = self.method.trace(recording, rows, self.composer)
        found = {(causes.prompt, causes.site): causes for causes in traced}
        return [found[each] for each in asked]

    # -- inside ----------------------------------------------------------------------------------------------

    def _trace(
        self,
        requests: Sequence[ResolvedRequest],
        progress: Progress | None = None,
        on_partial: Callable[[Circuit], None] | None = None,
    ) -> list[Circuit]:
        """Circuits of prompts that are recorded together; ``on_partial`` is shown that of the first."""
        requests = [replace(each, root=each.root.measured(self.model, each.ids)) for each in requests]
        first = requests[0].request
        paths, patterns = first.paths, first.patterns
        if paths == "difference":
            with self.model.assume_weights_unchanged():
                return self._trace_differences(requests, progress)
        steps: int = getattr(self.method, "ig_steps", IG_STEPS)
        least = first.min_influence
        if least is None:
            least = Budget.min_influence if paths == "attention" else CONTENT_INFLUENCE
        budget = Budget(first.max_firings, least)
        with self.model.assume_weights_unchanged():
            recording = self.model.record(
                [each.ids for each in requests],
                last_logits=max(each.logits_needed for each in requests),
                keep=None if paths == "attention" else CONTENT_FIELDS,
                patterns=patterns,
            )
            check_values(recording)
            roots = find_seeds([each.root for each in requests], recording, steps)
            info = model_info(self.model)
            roundings = roundings_of(recording)
            methods = [
                self._described(each, budget, rounding)
                for each, rounding in zip(requests, roundings, strict=True)
            ]

            def assembled(place: int, trace: PromptTrace) -> Circuit:
                each = requests[place]
                prompt = self._prompt(each.text, each.ids)
                return with_equal_channels(assemble(info, prompt, trace, methods[place]), self.model)

            show: OnPartial | None = (
                None if on_partial is None else lambda found: on_partial(assembled(0, found[0]))
            )
            if paths == "attention":
                traces = sweep(recording, roots, self.method, budget, self.composer, progress, show)
            else:
                content = self._content(recording, requests, roots, steps)
                parts = recording, roots, content, self.method
                complete = CompleteSweep(*parts, budget, self.composer, paths)
                traces = complete.run(progress, show)
                if paths == "complete" and first.min_influence is None:
                    whole = Budget(min(first.max_firings or SMALL, SMALL), WHOLE_INFLUENCE)
                    small = [place for place, trace in enumerate(traces) if trace.expanded <= SMALL // 2]
                    again = CompleteSweep(*parts, whole, self.composer, paths, small).run() if small else []
                    for place in small:
                        if again[place].expanded < (whole.max_firings or SMALL):
                            traces[place] = again[place]
                            far = replace(budget, min_influence=WHOLE_INFLUENCE)
                            methods[place] = self._described(requests[place], far, roundings[place])
                add_amounts(content, traces, first.neurons)
            return [assembled(place, trace) for place, trace in enumerate(traces)]

    def _trace_differences(
        self, requests: Sequence[ResolvedRequest], progress: Progress | None
    ) -> list[Circuit]:
        """Difference circuits: every prompt beside those that it is compared with, pairs in batches."""
        first, model, info = requests[0].request, self.model, model_info(self.model)
        budget = _flow_budget(first)
        pairs: list[list[PromptPair]] = []
        found: list[Measured | None] = []
        for place, each in enumerate(requests):
            some, measured = self._pairs(each, scaled(progress, place, 1, len(requests)))
            found.append(measured)
            pairs.append(some)
        every = [pair for some in pairs for pair in some]
        size = max(1, min(PAIRS_AT_ONCE, PAIR_TOKENS // max(len(pair.ids) for pair in every)))
        circuits: list[Circuit] = []
        ready: list[PairFlow] = []
        waiting = iter(zip(requests, pairs, found, strict=True))
        for start in range(0, len(every), size):
            ready += trace_pairs(model, every[start : start + size], first.patterns)
            while len(circuits) < len(requests) and len(ready) >= len(pairs[len(circuits)]):
                each, some, measured = next(waiting)
                mine, ready = ready[: len(some)], ready[len(some) :]
                circuits.append(self._difference_circuit(each, info, mine, budget, measured))
                if progress is not None:
                    progress(len(circuits), len(requests))
        return circuits

    def _pairs(
        self,
        request: ResolvedRequest,
        progress: Progress | None,
        budget: int = BUDGET,
        seed: int = 0,
    ) -> tuple[list[PromptPair], Measured | None]:
        """The prompts that one prompt is compared with: as given, or found by exchanging words."""
        measured = None
        others: list[tuple[Sequence[int], Replacement | None]] = [
            (ids, None) for ids in request.counterfactuals
        ]
        if request.request.automatic:
            measured = measure(self.model, request, budget=budget, seed=seed, progress=progress)
            others = [(change.ids, change) for change in measured.counterfactuals()]
        pairs = [self._pair(request, list(ids), change, i) for i, (ids, change) in enumerate(others)]
        return pairs, measured

    def _pair(
        self, request: ResolvedRequest, other: list[int], change: Replacement | None, place: int
    ) -> PromptPair:
        given = request.request.counterfactual
        text: Any = given if isinstance(given, str) or given is None else given[place]
        if change is not None:
            text = change.text
        elif not isinstance(text, str):
            text = None if self.model.tokenizer is None else decoded(self.model.tokenizer, other)
        compared = ComparedPrompt(text, tuple(other), 0.0)
        if change is not None:
            compared = replace(
                compared, change=str(change), flips=change.flips, naturalness=change.naturalness
            )
        return PromptPair(request.ids, other, request.root, compared)

    def _prompt(self, text: str | None, ids: Sequence[int]) -> PromptInfo:
        reader = self.model.reader
        return PromptInfo(text, tuple(ids), reader.labels(ids), start_tokens=reader.start_tokens(text, ids))

    def _difference_circuit(
        self,
        request: ResolvedRequest,
        info: ModelInfo,
        flows: Sequence[PairFlow],
        budget: FlowBudget,
        measured: Measured | None,
    ) -> Circuit:
        settings: dict[str, Any] = {
            "paths": "difference",
            "max_nodes": budget.nodes,
            "min_flow": budget.least,
            "min_carried": budget.carried,
        }
        if self.model.half:
            settings["dtype"] = self.model.own_dtype
        if request.notice is not None:
            settings["notice"] = request.notice
        method = MethodInfo("difference", version=self.method.describe().version, settings=settings)
        prompt = self._prompt(request.text, request.ids)
        note = None
        if measured is not None:
            prompt = replace(prompt, importance=measured.by_token(len(request.ids)))
            if not measured.flips:
                how = "come closest to it" if measured.weakens else "change it most"
                note = f"No change that was tried flips the answer: these {how}."
        return difference_circuit(
            info, prompt, method, flows, budget, automatic=measured is not None, note=note
        )

    def _content(
        self,
        recording: Recording,
        requests: Sequence[ResolvedRequest],
        roots: list[Seeds],
        steps: int,
    ) -> Content:
        """Contributions to each root; none where there is nothing to explain, or where heads are the root."""
        read = [
            (place, each.root)
            for place, (each, found) in enumerate(zip(requests, roots, strict=True))
            if not found.nothing and (each.root.has_directions or each.request.paths == "content")
        ]
        found = attribute_roots(read, recording, steps)
        parts = {place: each.parts for (place, _), each in zip(read, found, strict=True)}
        return Content.of(recording, [parts.get(place, ()) for place in range(len(requests))])

    def _described(self, request: ResolvedRequest, budget: Budget, rounding: float | None) -> MethodInfo:
        """The method's own options, the budget, and the steps of a likelihood's integrated gradients."""
        info = self.method.describe()
        settings: dict[str, Any] = {
            "max_firings": budget.max_firings,
            "min_influence": budget.min_influence,
        }
        if request.request.paths != "attention":
            settings["paths"] = request.request.paths
        if self.model.architecture.position_embedding is not None:
            settings["positions"] = "apart"
        if rounding is not None:
            settings |= {"dtype": self.model.own_dtype, "rounding": rounding}
        if request.notice is not None:
            settings["notice"] = request.notice
        steps = IG_STEPS if info.ig_steps is None and request.root.integrates_gradients else info.ig_steps
        return replace(info, ig_steps=steps, settings={**(info.settings or {}), **settings})


def _other_source(recording: Recording, firing: Firing, given: str | int, prompt: int) -> Firing:
    """The source that a firing is compared with: a word or position that its destination sees, and not its own."""
    place, tokens = TokenPlace.parse(given), recording.tokens(prompt)
    choices = place.choices(tokens)
    seen = recording.visible[firing.layer][prompt, firing.dest]
    free = [i for i in choices if i != firing.src and i < len(tokens) and bool(seen[i])]
    if len(free) > 1:
        listed = ", ".join(f"{choices[i]} (position {i})" for i in free)
        raise InputError(f"rather_than={given!r} could mean {len(free)} tokens: write {listed}.")
    if not free and firing.src in choices:
        raise InputError(f"rather_than={given!r} is the source of {firing} itself: name another token.")
    found = replace(firing, src=free[0] if free else next(iter(choices)))
    recording.check_firing(found, prompt)
    return found
