"""What a circuit is made of: model, prompt, method, nodes, edges and the evidence for their descriptions.

The annotations are the one statement of what a circuit file may hold: `files.py` reads and writes these fields,
`describe.py` makes the documentation from their docstrings. Parts are plain frozen dataclasses; a `Circuit` checks
those that it is given. Positions are integers; token text is a label, never a key.

>>> Edge(source=1, target=0, side="root", weight=2.5).weight
2.5
>>> Node(1, "head", layer=9, head=6, dest=14, src=3).name
'L9H6 14->3'
>>> Evidence(supported=False, p_value=0.31, accuracy=0.55, judged=40).verdict
'unsupported, p 0.31'
>>> EvidenceExample((" the park,", " Paul", " gave a book", " to"), dest=3, src=1, score=2.5, holds=True).marked
' the park,[[ Paul]] gave a book<< to>>'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from headtrace.validation import (
    Flag,
    Ids,
    Index,
    Number,
    NumberOrText,
    Scalar,
    Share,
    Text,
    Words,
    Written,
    stored,
)
from headtrace.vocabulary import Component, Kind, Side, Site


@stored
class ModelInfo:
    """The model that was traced."""

    name: Text
    """The name it was loaded by."""
    revision: Written[Text | None] = None
    """The revision on the hub."""
    architecture: Written[Text | None] = None
    """The family of architectures, such as `llama`."""
    weights_sha256: Written[Text | None] = None
    """A hash of the weights: models with different weights have different hashes."""
    computation_sha256: Text | None = None
    """A hash of everything else that affects the computation: part of the config, and the buffers. Files of earlier
    versions have none."""


def same_model(a: ModelInfo, b: ModelInfo) -> bool:
    """Whether two circuits are of one model: by the hashes that both have, or else by name and revision.

    >>> from headtrace.circuits import ModelInfo
    >>> same_model(ModelInfo("here", weights_sha256="ab"), ModelInfo("there", weights_sha256="ab"))
    True
    """
    if a.computation_sha256 and b.computation_sha256 and a.computation_sha256 != b.computation_sha256:
        return False
    if a.weights_sha256 is not None and b.weights_sha256 is not None:
        return a.weights_sha256 == b.weights_sha256
    return (a.name, a.revision) == (b.name, b.revision)


@stored
class PromptInfo:
    """The prompt, token by token."""

    text: Text | None
    """The text; null for bare token ids."""
    token_ids: Ids
    """The token ids that the model reads; empty in a circuit imported from a tool that does not store them."""
    tokens: Words
    """The text of each token."""
    contributions: tuple[Number, ...] | None = None
    """The total contribution of each token's embedding to the root, with attention, norms and gates frozen, in the
    unit of the root. A position embedding that is a component of its own is not counted."""
    importance: tuple[Number | None, ...] | None = None
    """How much the root's value drops, on average, when the token's word is replaced by similar words: measured
    (`headtrace matters`). Null if the word was not replaced."""
    start_tokens: Words | None = None
    """The special tokens that the tokenizer added in front of the text, such as `<bos>`; empty if there are none. Null
    if unknown: for bare token ids, and in files of earlier versions."""


@stored
class ComparedPrompt:
    """A prompt that a difference circuit compares with."""

    text: Text | None
    """The text; null for bare token ids."""
    token_ids: Ids
    """Its token ids, the same number as the prompt's."""
    value: Number
    """The root's value on this prompt."""
    change: Text | None = None
    """The words that were replaced, if headtrace found the prompt itself."""
    flips: Flag | None = None
    """Whether the model prefers another answer on this prompt, if that was checked."""
    naturalness: Number | None = None
    """Its log-likelihood under the model, minus that of the prompt itself, in nats."""


@stored
class DifferenceInfo:
    """What a difference circuit compares: two runs, or the mean over several pairs of runs."""

    value: Number
    """The root's value on the prompt: J."""
    other_value: Number
    """The root's value on the other prompt, or the mean over several: J'."""
    shown: Number
    """The share of J - J' carried by the shown edges into the root (above 1: the edges not shown oppose it)."""
    tokens: tuple[Number, ...]
    """The flow from each token's embedding; the flows sum to J - J'."""
    prompts: tuple[ComparedPrompt, ...]
    """The other prompts."""
    automatic: Flag = False
    """Whether headtrace found these prompts itself."""
    note: Text | None = None
    """A warning about these prompts, if one is needed."""
    error: Number | None = None
    """The largest error of the sum of flows at any layer, relative to the size of what is added up."""

    @property
    def change(self) -> float:
        """J - J'."""
        return self.value - self.other_value


@stored
class MethodInfo:
    """How the circuit was found."""

    name: Text
    """The tracing method, such as `acc++`."""
    tau: Written[NumberOrText] = None
    """The least attention that counts as attending: a number, or the rule as text if it depends on the firing."""
    ig_steps: Written[Index | None] = None
    """The number of steps of integrated gradients."""
    version: Written[Text | None] = None
    """The version of headtrace."""
    settings: Mapping[Text, Scalar] | None = field(default=None, hash=False)
    """Further settings, such as the budget, by name."""


@stored
class CompetingKeySignal:
    """A key-side signal that was written only at other keys, not at the firing's source, so that it is not followed
    further upstream.

    A head that wrote it read a position `src` after the firing's own source, or does not attend at the source to what
    it read. Removing the signal raises the keys that compete with the source, or lowers other keys of the same `group`.
    It is part of the claim, but not of the graph.
    """

    layer: Index | None
    """The layer of the component that wrote it."""
    head: Index | None
    """The head that wrote it."""
    src: Index | None
    """The position that the head read."""
    channels: Ids
    """The channels of the firing that it was written into."""
    weight: Number
    """The attention that is lost when it is removed."""
    kind: Kind | None = None
    """The kind of component that wrote it; null for a head."""

    @property
    def component(self) -> Component:
        """The component that wrote it."""
        return Component(self.kind or "head", self.layer, self.head, self.src)


@stored
class Neuron:
    """A hidden unit of an mlp, and what it contributes with the mlp's gates frozen."""

    unit: Index
    """The index of the hidden unit."""
    contribution: Number
    """What it contributes to the root, in the unit of the root."""


@stored
class Node:
    """A component at its position.

    A head is at the position it writes to (`dest`) and reads one source (`src`). Fields that do not apply are null: an
    mlp, an attention bias and a rounding have a layer and a position, an embedding only a position, the root neither.
    In models that add position embeddings, an embedding is the token's alone, and a node of kind `position` is what its
    position adds; in files of earlier versions, and of other tools, an embedding is both. An offset is the bias of its
    reader: of a head (layer and head), of an mlp (layer only) or of the root (neither).
    """

    id: Index
    """The number by which edges refer to the node."""
    kind: Kind
    """The kind of component."""
    layer: Written[Index | None] = None
    """The layer of the component."""
    head: Written[Index | None] = None
    """The head within its layer."""
    dest: Written[Index | None] = None
    """The position it is at and writes to."""
    src: Written[Index | None] = None
    """The position that a head reads."""
    attention: Written[Number | None] = None
    """A head's attention from `dest` to `src`."""
    influence: Written[Number | None] = None
    """The share of the root that passes through the node, from 0 to 1."""
    expanded: Written[Flag] = False
    """Whether its causes were traced."""
    explained: Written[Flag] = True
    """False for a firing that still attends after all candidate signals were removed."""
    predicted: Mapping[Side, Number | None] | None = field(default=None, hash=False)
    """By side, the attention that is left when the signals of that side are removed: the claim that `headtrace verify`
    tests."""
    threshold: Number | None = None
    """The attention at which the head counts as attending."""
    group: Ids | None = None
    """For a head that spreads its attention: the positions, including `src`, that it attends to about equally. They
    are explained together: `threshold` and `predicted` are about their total attention."""
    equal_channels: tuple[Ids, ...] | None = None
    """For a head with channels of equal singular values: its groups of such channels. Within a group any basis is as
    good as another, so signals have all channels of a group or none, and a group counts as one channel."""
    held_down_by: Words | None = None
    """For a head that attends in part: the components without each of which, in its query or its keys, it would attend
    far more (at least half of what it does not attend now). In a complete circuit they are its causes."""
    label: Text | None = None
    """What the node does, in words."""
    elsewhere: tuple[CompetingKeySignal, ...] | None = None
    """Key-side signals of this firing that act on other keys only."""
    contribution: Number | None = None
    """The component's total contribution to the root, in the unit of the root."""
    neurons: tuple[Neuron, ...] | None = None
    """Hidden units of an mlp that carry most of its contribution, strongest first, in the unit of the root."""
    rounding: Number | None = None
    """For a model in half precision: how much the firing's attention would change without the rounding in its query
    and keys, if that is more than 0.02. Such a firing depends on rounding."""
    flow: Number | None = None
    """In a difference circuit: the part of the root's change that flows through the node, in the unit of the root.
    Nodes on one path carry the same flow one after the other, so do not add the flows of nodes."""
    moves: Number | None = None
    """The part of a head's flow that comes from moving different content: mean attention times the change of values."""
    attends: Number | None = None
    """The part of a head's flow that comes from attending differently; `moves` and `attends` sum to its flow."""
    other_attention: Number | None = None
    """A head's attention from `dest` to `src` in the other run (the mean over several)."""
    spread: tuple[Number, Number] | None = None
    """The smallest and the largest flow over several other prompts."""

    @property
    def site(self) -> Site:
        """What the node stands for, whatever was found out about it."""
        return Site(self.kind, self.layer, self.head, self.dest, self.src)

    @property
    def name(self) -> str:
        """The node in one word: ``L9H6 14->3``, ``MLP 5 @13``, ``Embedding @2``."""
        return str(self.site)

    def __str__(self) -> str:
        return self.name


@stored
class EvidenceExample:
    """A pair of tokens that the signal scores highly, in context. The explainer had not seen it."""

    pieces: Words
    """The context in pieces; each of the two tokens is one piece."""
    dest: Index
    """The number of the piece that attends."""
    src: Index
    """The number of the piece attended to: at most `dest`, and equal to it if a token attends to itself."""
    score: Number | None = None
    """The signal's score for the pair, as a part of the attention logit."""
    holds: Flag | None = None
    """Whether the judge found that the words fit the pair; null if it gave no answer."""

    @property
    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.pieces, self.dest, self.src)


@stored
class Evidence:
    """How the words of an edge were found, and whether they passed their test.

    A judge that sees only the words labels pairs of tokens from two corpora: those that the signal scores highest, and
    random ones.
    """

    supported: Flag
    """Whether the words passed: they tell the highest pairs from random ones in both corpora (AUROC above 0.75 with
    95 % confidence), at a false-discovery rate of 5 % over all signals tested together."""
    p_value: Share | None = None
    """The probability of labels at least as good as the judge's at an AUROC of 0.75, in the corpus where it is larger;
    null without a test."""
    accuracy: Share | None = None
    """The share of the judge's labels that are right."""
    interval: tuple[Share, Share] | None = None
    """The 95 % interval of the accuracy: lower and upper end."""
    judged: Index | None = None
    """How many pairs were labelled."""
    explainer: Text | None = None
    """The explainer that found the words."""
    judge: Text | None = None
    """The judge that labelled the pairs."""
    examples: tuple[EvidenceExample, ...] | None = None
    """A few of the pairs that the signal scores highest, highest first; none was shown to the explainer."""

    @property
    def verdict(self) -> str:
        """The result in a few words: ``supported, p 6e-05``, ``unsupported, not judged``."""
        p_value = "not judged" if self.p_value is None else f"p {self.p_value:.2g}"
        return f"{'supported' if self.supported else 'unsupported'}, {p_value}"


@stored
class Edge:
    """A signal: what `source` writes into `channels` of `target`, on one side."""

    source: Index
    """The id of the node that writes it."""
    target: Index
    """The id of the node that reads it."""
    side: Side
    """Where the signal enters: the query or key of a head (why it attends), the value of a head or the input of an mlp
    (what is moved), or the root."""
    weight: Number
    """On the query and key side, the attention that is lost when the signal is removed. On the other sides, the number
    in proportion to which influence is passed on: the contribution in the unit of the root, mixed with shares of
    signals if the target is followed for signals as well (`contribution` is always the contribution alone). In a
    difference circuit, on every side: the flow, in the unit of the root."""
    channels: Written[Ids | None] = None
    """The target's channels that carry the signal; in a difference circuit, those with most flow, largest first."""
    flows: tuple[Number, ...] | None = None
    """In a difference circuit: the flow through each of `channels`; that of a group of equal ones is at its first."""
    logits: tuple[Number, Number] | None = None
    """In a difference circuit of a logit difference, on the root side: the flow into the answer's logit and into the
    wrong answer's; the first minus the second is the edge's flow."""
    effect: Mapping[Text, Scalar] | None = field(default=None, hash=False)
    """What `headtrace verify` measured, by name."""
    description: Text | None = None
    """What the signal looks for or says, in words."""
    contribution: Number | None = None
    """The contribution to the root that passes through the edge, in the unit of the root."""
    through: Ids | None = None
    """For a signal that an mlp wrote: the ids of the nodes whose writes, once removed from the mlp's input, leave less
    than half of the signal."""
    left: Number | None = None
    """The share of the signal that the mlp still writes without them: a claim that `headtrace verify` tests."""
    evidence: Evidence | None = field(default=None, hash=False)
    """How `description` was tested; null if the words have not been tested."""
    alone: Flag | None = None
    """True for a query or key edge in a complete circuit that was found by removing this signal alone: without it the
    head would attend far more (the weight is negative), or less than half as much. It is no part of what the target's
    `predicted` removes."""


def mark(pieces: Words, dest: int, src: int) -> str:
    """Text in pieces, with the source in ``[[...]]`` and the destination in ``<<...>>``."""
    words: list[str] = []
    for place, piece in enumerate(pieces):
        word = f"[[{piece}]]" if place == src else piece
        words.append(f"<<{word}>>" if place == dest else word)
    return "".join(words)
