"""What a mechanism is made of: steps, the arrows between them, a ledger that closes, and what was measured.

The annotations say what a mechanism file may hold, as those of `headtrace.circuits.parts` do for circuits.

>>> Step(1, "lowers", "to lowers John", heads=(StepHead("L23H3", 23, 3, 13, 9, flow=2.5),), flow=2.5, root=2.5).title
'to lowers John'
"""

from __future__ import annotations

from dataclasses import replace

from headtrace.validation import Flag, Index, Number, Text, Words, stored
from headtrace.vocabulary import Side, Site


@stored
class StepHead:
    """A head component of a step: what one head read from one token and wrote at another."""

    name: Text
    """The head, such as `L23H3`."""
    layer: Index
    head: Index
    dest: Index
    """The position that it writes to."""
    src: Index
    """The position that it reads."""
    flow: Number
    """What of the change of the root passes through it."""
    root: Number = 0.0
    """What of that it brings straight into the root."""
    attention: Number | None = None
    """Its attention from `dest` to `src`."""
    other_attention: Number | None = None
    """... in the prompts that were compared with (their mean)."""
    raises: Words = ()
    """The tokens whose logits its write raises most, through the final norm as it is in this run."""
    lowers: Words = ()
    """... and lowers most."""
    causes: Words = ()
    """Why it attends there: the strongest causes of its query and key."""

    @property
    def site(self) -> Site:
        """The component at its place."""
        return Site("head", self.layer, self.head, self.dest, self.src)


@stored
class StepMeasurement:
    """What the model itself does without a step: its components take what they had in the other runs.

    Means over the prompts that were compared with. An intervention is another experiment than a flow: other components
    make up for what is missing, so that the two agree in direction and order, not in size.
    """

    before: Number
    """The root's number in the prompt."""
    without: Number
    """The root's number without the step."""
    random: Number | None = None
    """The root's number without as many others drawn at random: head components of the same layers and about the same
    attention that read a token at which the runs differ, or the MLPs of the same layers at another such token. None
    where there is none."""

    @property
    def text(self) -> str:
        """`removed: 6.12 -> 3.23; random 6.10`."""
        control = "" if self.random is None else f"; random {self.random:.2f}"
        return f"removed: {self.before:.2f} -> {self.without:.2f}{control}"


@stored
class Step:
    """Head components that do the same thing at the same place, or the MLPs at the position of the answer."""

    id: Index
    """Its number, as in the sentence and on its card."""
    role: Text
    """The rule that named it (`headtrace.mechanism.RULES`), or `mlps`."""
    text: Text
    """What it does, in words."""
    flow: Number
    """What of the change of the root enters the step from outside, in the unit of the root. Steps on one path carry the
    same flow one after the other: these are not to be added."""
    root: Number
    """What it brings straight into the root. Over all lines of the ledger these add up to the whole."""
    dest: Index | None = None
    """The position that it writes to."""
    src: Index | None = None
    """The position that most of it reads."""
    heads: tuple[StepHead, ...] = ()
    """Its head components, the largest flow first."""
    layers: tuple[Index, Index] | None = None
    """For MLPs: the first and the last layer that carry its flow."""
    stage: Index = 0
    """Its row: above everything that feeds it."""
    logits: tuple[Number, Number] | None = None
    """Of `root`: the flow into the answer's logit and into the wrong answer's."""
    measured: StepMeasurement | None = None
    """What the model does without it; none where nothing was measured."""
    name: Text | None = None
    """A name that a person gave it."""
    hidden: Flag = False
    """Whether a person hid it from views. It stays in the ledger."""

    @property
    def title(self) -> str:
        """The name that a person gave it, or what it does."""
        return self.name or self.text

    def renamed(self, name: str) -> Step:
        """The step under another name."""
        return replace(self, name=name)


@stored
class Arrow:
    """What flows from a token or a step into a step, MLPs on the way folded in."""

    target: Index
    """The id of the step that it enters."""
    side: Side
    """Where it enters: the query or key of its heads (why they attend), their value (what they move), or the input of
    the MLPs."""
    flow: Number
    """In the unit of the root."""
    step: Index | None = None
    """The id of the step that it comes from; null for a token."""
    token: Index | None = None
    """The position of the token whose embedding it comes from; null for a step."""
    through_mlps: Number = 0.0
    """The part of `flow` that passes through MLPs on its way."""
    shown: Flag = True
    """Whether views draw it. Weaker ones, and those between steps of one height, are kept so that steps can be merged
    exactly."""

    @property
    def words(self) -> str:
        """What the arrow tells the step that it enters."""
        said = {
            "query": "where to look",
            "key": "what to find",
            "value": "what it moves",
            "input": "what they read",
            "root": "",
        }[self.side]
        mostly = abs(self.through_mlps) > abs(self.flow) / 2 and self.side != "input"
        return f"{said}, through MLPs" if mostly else said


@stored
class LedgerLine:
    """One line of the sum that gives the whole change of the root."""

    text: Text
    amount: Number
    step: Index | None = None
    """The id of the step that it belongs to."""


@stored
class Clause:
    """A part of the sentence, and the step that it speaks of."""

    text: Text
    step: Index | None = None


@stored
class MechanismTest:
    """All shown steps together, put to the test in the model. Means over the prompts that were compared with."""

    before: Number
    """The root's number in the prompt: J."""
    other: Number
    """The root's number in the prompts that were compared with: J'."""
    without: Number
    """Without all head components that are shown."""
    kept: Number
    """With these alone: all other head components take what they had in the other runs."""
    random_without: Number
    """Without as many others, drawn at random as the controls of steps are."""
    random_kept: Number
    """With as many others alone."""

    @property
    def sufficiency(self) -> float:
        """The share of J - J' that the shown heads alone bring back."""
        return (self.kept - self.other) / (self.before - self.other)

    @property
    def necessity(self) -> float:
        """The share of J - J' that is lost without them."""
        return (self.before - self.without) / (self.before - self.other)
