"""What a mechanism is made of: steps, the arrows between them, a ledger that closes, and what was measured.

The annotations say what a mechanism file may hold, as those of `headtrace.circuits.parts` do for circuits.

>>> Step(1, "lowers", "to lowers John", heads=(StepHead("L23H3", 23, 3, 13, 9, flow=2.5),), flow=2.5, root=2.5).title
'to lowers John'
"""

from __future__ import annotations

from dataclasses import replace

from headtrace.validation import Flag, Index, Number, Text, Words, stored
from headtrace.vocabulary import Side, Site

LOOKS_AWAY = 0.5
"""A head looks away from a token if its attention to it is less than this share of that in the other prompts."""


def looks_away(attention: float | None, other: float | None) -> bool:
    """Whether a head attends less than half as much as in the prompts that were compared with.

    >>> looks_away(0.03, 0.28), looks_away(0.53, 0.62), looks_away(None, 0.3)
    (True, False, False)
    """
    return attention is not None and other is not None and attention < LOOKS_AWAY * other


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
    looks: tuple[tuple[Index, Number, Number], ...] = ()
    """Where else it looks from `dest`: positions with its attention to them, here and in the other prompts; those with
    most of either."""
    causes: Words = ()
    """Why it attends there: the strongest causes of its query and key."""
    roles: Words = ()
    """What the head does over a corpus, as it was measured there: `copying 0.71 (by chance 0.02)`."""

    @property
    def looks_away(self) -> bool:
        """Whether it attends less than half as much as in the other prompts: its part is then that it does not look."""
        return looks_away(self.attention, self.other_attention)

    @property
    def site(self) -> Site:
        """The component at its place."""
        return Site("head", self.layer, self.head, self.dest, self.src)


CLEAR = 2.0
"""Removing a step is evidence for it if that changes the root's number at least so many times as much as removing its
control does."""
NOTHING, OPPOSITE = "next to nothing", "the opposite way to the flow"
SLIGHT = 0.01
"""Removing a step changes next to nothing if the change is less than this share of its flow."""


@stored
class StepMeasurement:
    """What the model does without a step: the step's components are set to their values in the other runs.

    Means over the prompts that were compared with. An intervention is another experiment than a flow: other components
    make up for what is missing, so that the two agree in direction and order, not in size.
    """

    before: Number
    """The root's number in the prompt."""
    without: Number
    """The root's number without the step."""
    random: Number | None = None
    """The root's number without as many others drawn at random: head components of the same layers and about the same
    attention that read a token at which the runs differ, or MLPs of the same layers at other tokens whose writes differ
    about as much between the runs. None where there is none."""

    @property
    def text(self) -> str:
        """`removed: 6.12 -> 3.23; random 6.10`."""
        control = "no control" if self.random is None else f"random {self.random:.2f}"
        return f"removed: {self.before:.2f} -> {self.without:.2f}; {control}"

    def doubt(self, flow: float, others: str) -> str | None:
        """Where removing a step of this flow is no evidence for it: what it changes, beside random ``others``. None
        where it is evidence.

        >>> StepMeasurement(6.0, 3.0, 5.8).doubt(4.0, "heads")
        >>> StepMeasurement(6.0, 3.0, 1.0).doubt(4.0, "MLPs")
        'no more than random MLPs do'
        >>> StepMeasurement(6.0, 3.0, 4.0).doubt(4.0, "MLPs")
        'hardly more than random MLPs do'
        >>> StepMeasurement(6.0, 7.0, 5.9).doubt(4.0, "heads")
        'the opposite way to the flow'
        """
        effect = self.before - self.without
        control = 0.0 if self.random is None else abs(self.before - self.random)
        if abs(effect) <= SLIGHT * abs(flow):
            return NOTHING
        if abs(effect) <= control:
            return f"no more than random {others} do"
        if effect * flow < 0:
            return OPPOSITE
        return f"hardly more than random {others} do" if abs(effect) < CLEAR * control else None


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

    @property
    def doubt(self) -> str | None:
        """What removing the step changes, in words, where that is no evidence for it: `no more than random MLPs do`.
        None where it is evidence, or where nothing was measured."""
        others = "heads" if self.heads else "MLPs"
        return None if self.measured is None else self.measured.doubt(self.flow, others)

    @property
    def doubt_text(self) -> str:
        """What removing the step changes, as a clause: `removing it changes the answer no more than random MLPs do`.
        Empty where `doubt` is None."""
        if self.doubt is None:
            return ""
        them = "it" if len({head.name for head in self.heads}) == 1 else "them"
        if self.doubt == NOTHING:
            return f"removing {them} changes {NOTHING}"
        verb = "moves" if self.doubt == OPPOSITE else "changes"
        return f"removing {them} {verb} the answer {self.doubt}"

    @property
    def badge(self) -> str:
        """What was measured, and what speaks against it: `removed: 6.12 -> 5.90; random 5.10 (no more than random MLPs
        do)`."""
        if self.measured is None:
            return "not measured"
        return self.measured.text + ("" if self.doubt is None else f" ({self.doubt})")

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
    """All shown steps together, tested in the model. Means over the prompts that were compared with."""

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
    pairs: Index | None = None
    """How many of the prompts that were compared with everything was measured with, the badges of steps too."""

    @property
    def sufficiency(self) -> float:
        """The share of J - J' that the shown heads alone bring back."""
        return (self.kept - self.other) / (self.before - self.other)

    @property
    def necessity(self) -> float:
        """The share of J - J' that is lost without them."""
        return (self.before - self.without) / (self.before - self.other)
