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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from headtrace.circuits import Circuit, MethodInfo, PromptInfo
from headtrace.errors import InputError
from headtrace.models.checks import require_same_weights
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.models.identities import roundings_of
from headtrace.progress import Progress, scaled
from headtrace.prompts import batches
from headtrace.roots import Root
from headtrace.roots.base import Answer
from headtrace.tracing.assemble import assemble, model_info
from headtrace.tracing.attribute_root import Seeds, attribute_roots, find_seeds
from headtrace.tracing.causes import Causes, Explanation
from headtrace.tracing.complete import CONTENT_INFLUENCE, CompleteSweep, Paths
from headtrace.tracing.components import Firings
from headtrace.tracing.content import Content, add_amounts
from headtrace.tracing.firing import IG_STEPS
from headtrace.tracing.methods import Method, make_method
from headtrace.tracing.questions import Asked, Question, as_asked, ask
from headtrace.tracing.readings import Composer
from headtrace.tracing.sweep import Budget, OnPartial, PromptTrace, sweep
from headtrace.vocabulary import Firing, Prompt

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.models.record import PatternsKept


class Tracer:
    """Traces prompts of one model. Keeps composed weights, so one tracer for many prompts is fastest.

    ``method`` is a name (``"acc++"``, the default, ``"acc"``, ``"svt"``, or what another package registered) with its
    ``options``, such as ``tau``, a number or a function of the number of visible keys (default
    ``min(1, 2.5 / keys)``); or a method that is made already (`headtrace.tracing.methods`). ``max_firings`` and
    ``min_influence`` are the budget that keeps circuits readable (by default the influence that is followed is at least
    0 for attention and 0.02 for content and complete circuits). ``patterns`` says whether attention patterns are kept
    in memory (``"keep"``) or computed again where they are read (``"recompute"``; ``"auto"``: by their size).
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
        if max_firings is not None and max_firings < 1:
            raise InputError(f"max_firings={max_firings}: expected at least 1, or None for no limit.")
        if min_influence is not None and not 0 <= min_influence <= 1:
            raise InputError(f"min_influence={min_influence}: a share of influence is between 0 and 1.")
        self.model = model
        self.method = make_method(method, **options)
        self.max_firings, self.min_influence = max_firings, min_influence
        self.patterns: PatternsKept = patterns
        self.composer = Composer(model)

    def trace(
        self,
        prompt: Asked,
        answer: Answer | None = None,
        wrong: Answer | None = None,
        *,
        root: str | Root | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        direction: Tensor | Sequence[float] | None = None,
        layer: int | None = None,
        position: int | None = None,
        heads: str | Sequence[str] | None = None,
        paths: Paths = "attention",
        counterfactual: Prompt | None = None,
        neurons: int = 0,
        bos: bool | None = None,
        progress: Progress | None = None,
        grown: Callable[[Circuit], None] | None = None,
    ) -> Circuit:
        """The circuit of one prompt: text, token ids in any form, a conversation, an example of a task, or a mapping
        with a prompt and its answers.

        ``answer`` and ``wrong`` are text, a token id, or a list of alternatives. Without ``root``, a wrong answer
        makes it ``"linear"`` (the logit difference) and anything else ``"probability"``; an answer of several tokens
        is then a continuation. ``heads=["L9H9", ...]`` starts from those heads at the last token instead.

        ``paths`` says what is followed: ``"attention"``, why heads attend (queries and keys); ``"content"``, what is
        moved to the root, through values and MLPs; ``"complete"``, both, and through the MLPs that wrote a query or key
        signal. With a ``counterfactual`` prompt of the same length, content is what this prompt has and that one has
        not. With ``neurons``, each MLP of a content or complete circuit lists as many of its hidden units, those that
        contribute most. ``progress`` hears of firings that are traced, of as many as are known to be needed by then.
        ``grown`` is given the circuit as far as it is known, again and again while it is traced: what is not followed
        yet is not ``expanded``. What either raises ends the trace at once, and comes out of here.
        """
        asked = {"answer": answer, "wrong": wrong, "top_k": top_k, "top_p": top_p, "direction": direction}
        asked |= {"layer": layer, "position": position, "heads": heads or None}
        questions = [ask(self.model, prompt, root=root, bos=bos, **asked)]
        others = None if counterfactual is None else [counterfactual]
        against = self._counterfactuals(questions, others, paths, bos)
        _check_neurons(neurons, paths)
        return self._trace(questions, paths, against, neurons, progress, grown)[0]

    def trace_batch(
        self,
        prompts: Asked | Sequence[Asked],
        answer: Answer | None = None,
        wrong: Answer | None = None,
        *,
        root: str | Root | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        direction: Tensor | Sequence[float] | None = None,
        layer: int | None = None,
        position: int | None = None,
        heads: str | Sequence[str] | None = None,
        paths: Paths = "attention",
        counterfactual: Sequence[Prompt] | None = None,
        neurons: int = 0,
        bos: bool | None = None,
        progress: Progress | None = None,
    ) -> list[Circuit]:
        """Circuits of many prompts, recorded and traced together; options mean what they mean in ``trace``.

        Prompts with answers of their own are mappings with ``text`` (or ``tokens``, or ``messages``), ``answer``,
        ``wrong`` and ``counterfactual``, or examples of a task; ``answer`` and ``wrong`` here hold for all others.
        ``counterfactual`` has one prompt for each.
        """
        asked = {"answer": answer, "wrong": wrong, "top_k": top_k, "top_p": top_p, "direction": direction}
        asked |= {"layer": layer, "position": position, "heads": heads or None}
        questions = [ask(self.model, prompt, root=root, bos=bos, **asked) for prompt in as_asked(prompts)]
        others = self._counterfactuals(questions, counterfactual, paths, bos)
        _check_neurons(neurons, paths)
        circuits: dict[int, Circuit] = {}
        for group in batches([len(question.ids) for question in questions]):
            against = None if others is None else [others[i] for i in group]
            inside = scaled(progress, len(circuits), len(group), len(questions))
            found = self._trace([questions[i] for i in group], paths, against, neurons, inside)
            circuits.update(zip(group, found, strict=True))
            if progress is not None:
                progress(len(circuits), len(questions))
        return [circuits[i] for i in range(len(questions))]

    def ask(
        self, prompt: Asked, *, root: str | Root | None = None, bos: bool | None = None, **how: Any
    ) -> Question:
        """A question that ``trace_batch`` takes as it is, with the options of ``trace``: what is wrong with it is found
        before anything runs.

        >>> import headtrace
        >>> headtrace.Tracer(headtrace.load("builtin")).ask("When Mary and John", answer=" went").root.question()
        '"went"'
        """
        return ask(self.model, prompt, root=root, bos=bos, **how)

    def explain(self, prompt: Prompt, firing: Firing | str, *, bos: bool | None = None) -> Explanation:
        """Why does this head attend here? The causes of one firing, side by side."""
        wanted = Firing.parse(firing)
        recording = self.model.record(
            [self.model.to_ids(prompt, bos=bos)], last_logits=True, patterns=self.patterns
        )
        found = self.trace_firings(recording, [wanted])[0]
        return Explanation(found, recording.tokens(), self.model.name)

    def trace_firings(
        self, recording: Recording, firings: Sequence[Firing | str], prompt: int | Sequence[int] = 0
    ) -> list[Causes]:
        """Causes of chosen firings, in the order given: of one recorded prompt, or of one for each firing."""
        require_same_weights(recording)
        prompts = [prompt] * len(firings) if isinstance(prompt, int) else list(prompt)
        if len(prompts) != len(firings):
            raise InputError(f"{len(prompts)} prompts for {len(firings)} firings: give one for each.")
        parsed = [(place, Firing.parse(firing)) for place, firing in zip(prompts, firings, strict=True)]
        for place, firing in parsed:
            recording.check_firing(firing, place)
        asked = [(place % len(recording), firing.site) for place, firing in parsed]
        rows = Firings.of(list(dict.fromkeys(asked)), self.model.device)
        with self.model.assume_weights_unchanged():
            traced = self.method.trace(recording, rows, self.composer)
        found = {(causes.prompt, causes.site): causes for causes in traced}
        return [found[each] for each in asked]

    # -- inside ----------------------------------------------------------------------------------------------

    def _trace(
        self,
        questions: list[Question],
        paths: Paths,
        counterfactual: list[list[int]] | None,
        neurons: int,
        progress: Progress | None = None,
        grown: Callable[[Circuit], None] | None = None,
    ) -> list[Circuit]:
        """Circuits of prompts that are recorded together; ``grown`` is shown that of the first."""
        needed = max(question.logits_needed for question in questions)
        steps: int = getattr(self.method, "ig_steps", IG_STEPS)
        budget, keep = self._budget(paths), None if paths == "attention" else CONTENT_FIELDS
        ids = [question.ids for question in questions]
        others = counterfactual or [None] * len(questions)
        with self.model.assume_weights_unchanged():
            recording = self.model.record(ids, last_logits=needed, keep=keep, patterns=self.patterns)
            roots = find_seeds([question.root for question in questions], recording, steps)
            info = model_info(self.model)
            told = zip(questions, others, roundings_of(recording), strict=True)
            methods = [self._described(q.root, budget, paths, other, rounding) for q, other, rounding in told]

            def assembled(place: int, trace: PromptTrace) -> Circuit:
                return assemble(info, self._prompt(questions[place]), trace, methods[place])

            show: OnPartial | None = None if grown is None else lambda found: grown(assembled(0, found[0]))
            if paths == "attention":
                traces = sweep(recording, roots, self.method, budget, self.composer, progress, show)
            else:
                other = (
                    None
                    if counterfactual is None
                    else self.model.record(counterfactual, last_logits=1, patterns=self.patterns)
                )
                content = self._content(recording, questions, roots, other, paths, steps)
                complete = CompleteSweep(recording, roots, content, self.method, budget, self.composer, paths)
                traces = complete.run(progress, show)
                add_amounts(content, traces, neurons)
        return [assembled(place, trace) for place, trace in enumerate(traces)]

    def _content(
        self,
        recording: Recording,
        questions: list[Question],
        roots: list[Seeds],
        other: Recording | None,
        paths: Paths,
        steps: int,
    ) -> Content:
        """Contributions to each root; none where there is nothing to explain, or where heads are the root."""
        asked = [
            (place, question.root)
            for place, (question, found) in enumerate(zip(questions, roots, strict=True))
            if not (found.nothing or (paths == "complete" and not question.root.has_directions))
        ]
        shares = attribute_roots(asked, recording, steps)
        parts = {place: found.parts for (place, _), found in zip(asked, shares, strict=True)}
        read = [parts.get(place, ()) for place in range(len(questions))]
        return Content.of(recording, read, other)

    def _budget(self, paths: Paths) -> Budget:
        least = self.min_influence
        if least is None:
            least = Budget.min_influence if paths == "attention" else CONTENT_INFLUENCE
        return Budget(self.max_firings, least)

    def _counterfactuals(
        self,
        questions: list[Question],
        given: Sequence[Prompt] | None,
        paths: Paths,
        bos: bool | None,
    ) -> list[list[int]] | None:
        """Token ids of counterfactual prompts, each as long as the prompt that it is for."""
        if paths not in get_args(Paths):
            raise InputError(f"paths={paths!r}: choose {', '.join(map(repr, get_args(Paths)))}.")
        if given is None and paths != "attention":  # which has no use for what a prompt came with
            given = _own_counterfactuals(questions)
        if given is None:
            return None
        if paths == "attention":
            raise InputError(
                'A counterfactual prompt says what content is new: it goes with paths="content" or "complete".'
            )
        if len(given) != len(questions):
            raise InputError(
                f"{len(given)} counterfactual prompts for {len(questions)} prompts: give one for each."
            )
        found: list[list[int]] = []
        for question, prompt in zip(questions, given, strict=True):
            ids, extra = self.model.to_ids(prompt, bos=bos), question.logits_needed - 1
            ids = self.model.to_ids([*ids, *question.ids[len(question.ids) - extra :]]) if extra else ids
            if len(ids) != len(question.ids):
                raise InputError(
                    f"The counterfactual prompt has {len(ids) - extra} tokens, the prompt {len(question.ids) - extra}: "
                    "they must be equally long, so that every position has its counterpart. Exchange words for others "
                    "of as many tokens."
                )
            if ids == question.ids:
                raise InputError(
                    "The counterfactual prompt is the prompt itself, so nothing is new in it. Exchange the words that "
                    "the answer depends on."
                )
            found.append(ids)
        return found

    def _prompt(self, question: Question) -> PromptInfo:
        return PromptInfo(question.text, tuple(question.ids), self.model.token_labels(question.ids))

    def _described(
        self,
        root: Root,
        budget: Budget,
        paths: Paths,
        counterfactual: list[int] | None,
        rounding: float | None,
    ) -> MethodInfo:
        """The method's own options, the budget, and the steps of a likelihood's integrated gradients."""
        info = self.method.describe()
        settings: dict[str, Any] = {
            "max_firings": budget.max_firings,
            "min_influence": budget.min_influence,
        }
        if paths != "attention":
            settings["paths"] = paths
        if counterfactual is not None:
            settings["counterfactual"] = " ".join(map(str, counterfactual))
        if rounding is not None:
            settings |= {"dtype": self.model.own_dtype, "rounding": rounding}
        steps = IG_STEPS if info.ig_steps is None and root.integrates_gradients else info.ig_steps
        return replace(info, ig_steps=steps, settings={**(info.settings or {}), **settings})


def _own_counterfactuals(questions: list[Question]) -> list[Prompt] | None:
    """The counterfactual prompts that came with the prompts: with all of them, or with none."""
    own = [question.counterfactual for question in questions]
    without = [place for place, other in enumerate(own) if other is None]
    if len(without) == len(own):
        return None
    if without:
        raise InputError(
            f"{len(own) - len(without)} of {len(own)} prompts come with a counterfactual prompt, and prompt "
            f"{without[0]} (counted from 0) does not: contributions and contrasts cannot be compared. Give each one, "
            "or leave all out."
        )
    return [other for other in own if other is not None]


def _check_neurons(neurons: int, paths: Paths) -> None:
    if neurons < 0:
        raise InputError(f"neurons={neurons}: expected how many hidden units each MLP lists, or 0 for none.")
    if neurons and paths == "attention":
        raise InputError(
            f"neurons={neurons} lists hidden units by what they contribute to the root, which is known where content "
            'is followed: it goes with paths="content" or "complete".'
        )
