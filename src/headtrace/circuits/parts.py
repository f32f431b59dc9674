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
from headtrace.vocabulary import Kind, Side, Site


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
    """A hash of the weights, which tells the model from every other with other weights."""
    computation_sha256: Text | None = None
    """A hash of what else computes: the computing part of its config, and its buffers. Files of earlier versions have
    none."""


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
    """The tokens as the model reads them; empty in a circuit of another tool that does not say."""
    tokens: Words
    """How each token reads."""
    contributions: tuple[Number, ...] | None = None
    """What each token's embedding contributes to the root in all, through frozen attention, norms and gates, in the
    unit of the root."""
    importance: tuple[Number | None, ...] | None = None
    """What is lost of the root's number, on average, when the token's word is exchanged for others like it: measured
    (`headtrace matters`). Null where nothing was exchanged."""
    start_tokens: Words | None = None
    """The first of these tokens that the tokenizer put in front of the text, such as `<bos>`; empty if it put none
    there. Null where that is not known: for bare token ids, and in files of earlier versions."""


@stored
class ComparedPrompt:
    """A prompt that a difference circuit compares with."""

    text: Text | None
    """The text; null for bare token ids."""
    token_ids: Ids
    """Its tokens, as many as the prompt has."""
    value: Number
    """The root's number in this prompt."""
    change: Text | None = None
    """What was exchanged, where headtrace found the prompt itself."""
    flips: Flag | None = None
    """Whether the model prefers another answer here, where that was looked at."""
    naturalness: Number | None = None
    """Its log-likelihood under the model, less that of the prompt itself."""


@stored
class DifferenceInfo:
    """What a difference circuit is about: two runs, or the mean over several pairs of runs."""

    value: Number
    """The root's number in the prompt: J."""
    other_value: Number
    """The root's number in the other prompt, or the mean over several: J'."""
    shown: Number
    """The share of J - J' that the edges into the root which are shown carry (above 1: what is not shown opposes)."""
    tokens: tuple[Number, ...]
    """The flow from each token's embedding; they sum to J - J'."""
    prompts: tuple[ComparedPrompt, ...]
    """The prompts that it was compared with."""
    automatic: Flag = False
    """Whether headtrace found these prompts itself."""
    note: Text | None = None
    """What a reader must know about them."""
    error: Number | None = None
    """The largest error of the identity at any cut, relative to what is added up."""

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
    """The attention that counts as attending: a number, or the rule in words where it depends on the firing."""
    ig_steps: Written[Index | None] = None
    """Steps of integrated gradients."""
    version: Written[Text | None] = None
    """The version of headtrace."""
    settings: Mapping[Text, Scalar] | None = field(default=None, hash=False)
    """Further settings, such as the budget, by name."""


@stored
class CompetingKeySignal:
    """A key-side signal that a head wrote only at other keys than the firing's source.

    What the head read from `src` comes after the firing's own source, so no firing behind it can be followed; removing
    it raises the competing keys. It belongs to the claim, not to the graph.
    """

    layer: Index
    """The layer of the head that wrote it."""
    head: Index
    """The head that wrote it."""
    src: Index
    """The position that the head read."""
    channels: Ids
    """The firing's channels that it was written into."""
    weight: Number
    """The attention that removing it takes away."""


@stored
class Neuron:
    """A hidden unit of an mlp, and what it contributes with the mlp's gates frozen."""

    unit: Index
    """Its place among the hidden units."""
    contribution: Number
    """What it contributes to the root, in the unit of the root."""


@stored
class Node:
    """A component at its place.

    A head sits at the position it writes to (`dest`) and reads one source (`src`). What does not apply is null: an mlp,
    an attention bias and a rounding have a layer and a position, an embedding a position only, the root nothing. An
    offset is the bias of its reader: of a head (layer and head), of an mlp (layer only) or of the root (neither).
    """

    id: Index
    """The number by which edges name the node."""
    kind: Kind
    """What it is."""
    layer: Written[Index | None] = None
    """The layer of the component."""
    head: Written[Index | None] = None
    """The head within its layer."""
    dest: Written[Index | None] = None
    """The position it sits at, and writes to."""
    src: Written[Index | None] = None
    """The position that a head reads."""
    attention: Written[Number | None] = None
    """A head's attention from `dest` to `src`."""
    influence: Written[Number | None] = None
    """The share of the root's whole that passes through the node."""
    expanded: Written[Flag] = False
    """Whether its causes were looked for."""
    explained: Written[Flag] = True
    """False for a firing whose attention holds although everything was removed."""
    predicted: Mapping[Side, Number | None] | None = field(default=None, hash=False)
    """By side, the attention that is left when the signals of that side are removed: the claim that `headtrace verify`
    tests."""
    threshold: Number | None = None
    """The attention above which the head counts as attending."""
    group: Ids | None = None
    """For a head that spreads its attention: the positions, this one's source among them, that it attends to alike.
    They are explained together: `threshold` and `predicted` are about the attention on all of them."""
    label: Text | None = None
    """What the node does, in words."""
    elsewhere: tuple[CompetingKeySignal, ...] | None = None
    """Key-side signals of this firing that act on competing keys only."""
    contribution: Number | None = None
    """What the component contributes to the root in all, in the unit of the root."""
    neurons: tuple[Neuron, ...] | None = None
    """Hidden units of an mlp that carry most of its contribution, strongest first, in the unit of the root."""
    rounding: Number | None = None
    """For a firing of a model in half precision: how far its attention would be elsewhere without what rounding added
    to its query and keys, where that is more than 0.02. Such a firing depends on rounding."""
    flow: Number | None = None
    """In a difference circuit: what of the change of the root flows through the node, in the unit of the root. Nodes on
    one path carry the same flow one after the other, so flows of nodes are not to be added."""
    moves: Number | None = None
    """The part of a head's flow that comes from moving something else: mean attention times the change of values."""
    attends: Number | None = None
    """The part of a head's flow that comes from attending differently; both together are its flow."""
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
    """A pair of tokens that the signal scores highly, in its context. Nobody who wrote the words had seen it."""

    pieces: Words
    """The context in a few pieces; the two tokens are pieces of their own."""
    dest: Index
    """Which piece is the token that attends."""
    src: Index
    """Which piece is the token attended to: never after `dest`, and the same where a token attends to itself."""
    score: Number | None = None
    """What the signal scores there, as a part of the attention logit."""
    holds: Flag | None = None
    """Whether the judge found that the words hold there; null where it gave no answer."""

    @property
    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.pieces, self.dest, self.src)


@stored
class Evidence:
    """How the words of an edge came about, and whether they are right.

    A judge who knows nothing but the words labels pairs of tokens that the signal scores highest, and random ones, in
    two corpora.
    """

    supported: Flag
    """Whether the words passed: they tell the highest pairs from random ones in both corpora (AUROC above 0.75, with
    95 % confidence), at a false-discovery rate of 5 % among all signals that were tested with this one."""
    p_value: Share | None = None
    """How likely labels as good as the judge's would be at an AUROC of 0.75, in the corpus where that is likelier; null
    where there was no test."""
    accuracy: Share | None = None
    """The share of labels that are right."""
    interval: tuple[Share, Share] | None = None
    """Where the accuracy lies with 95 % confidence: lower and upper end."""
    judged: Index | None = None
    """How many pairs were labelled."""
    explainer: Text | None = None
    """Who found the words."""
    judge: Text | None = None
    """Who labelled the pairs."""
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
    """Where it enters: the query or key of a head (why it attends), its value or the input of an mlp (what is moved),
    or the root."""
    weight: Number
    """On the query and key side, the attention that removing the signal takes away. Elsewhere the share by which
    influence is passed on: the contribution in the unit of the root, mixed with shares of signals where the target is
    followed for signals as well; `contribution` is always the contribution. In a difference circuit, on every side: the
    flow, in the unit of the root."""
    channels: Written[Ids | None] = None
    """The target's channels that carry the signal; in a difference circuit those with most flow, the largest first."""
    flows: tuple[Number, ...] | None = None
    """In a difference circuit: the flow through each of `channels`."""
    logits: tuple[Number, Number] | None = None
    """In a difference circuit of a logit difference, on the root side: the flow into the answer's logit and into the
    wrong answer's; the first less the second is the edge's flow."""
    effect: Mapping[Text, Scalar] | None = field(default=None, hash=False)
    """What `headtrace verify` measured, by name."""
    description: Text | None = None
    """What the signal says, in words."""
    contribution: Number | None = None
    """The contribution to the root that passes through the edge, in the unit of the root."""
    through: Ids | None = None
    """For a signal that an mlp wrote: the ids of the nodes whose writes, removed from the mlp's input, take the signal
    below half of what it was."""
    left: Number | None = None
    """The share of the signal that the mlp then still writes: a claim that `headtrace verify` tests."""
    evidence: Evidence | None = field(default=None, hash=False)
    """How `description` was tested; without it, nobody has tested the words."""


def mark(pieces: Words, dest: int, src: int) -> str:
    """Text in pieces, with the source in ``[[...]]`` and the destination in ``<<...>>``."""
    words: list[str] = []
    for place, piece in enumerate(pieces):
        word = f"[[{piece}]]" if place == src else piece
        words.append(f"<<{word}>>" if place == dest else word)
    return "".join(words)
