"""What the explorer's server is asked, and what it answers: one statement, from which its OpenAPI schema is made.

Circuits travel as the circuit file's data with what the page adds to it (`headtrace.explorer.page.page_data`). Every
answer that shows something computed has ``python``: lines that compute the same with the library.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headtrace.tracing.complete import Paths
from headtrace.vocabulary import AttentionSide, Kind

MAX_TEXT = 100_000
"""Letters of a prompt; how many tokens it may have is a limit of the server."""
MAX_INTERVENTIONS = 64
MAX_GENERATED = 50

Position = Annotated[int, Field(ge=0, le=1_000_000)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Token = Annotated[str, Field(max_length=1_000)] | Annotated[int, Field(ge=0)]


class Request(BaseModel):
    """What a client sends: unknown fields are refused, so that a misspelt option is not silently ignored."""

    model_config = ConfigDict(extra="forbid")


class PromptRequest(Request):
    """A prompt, as text or as token ids, for one of the models that are served."""

    text: Text | None = None
    token_ids: Annotated[list[Position], Field(min_length=1, max_length=MAX_TEXT)] | None = None
    bos: bool | None = None
    """Whether a beginning-of-sequence token comes before text; by default as the model wants it."""
    model: Annotated[int, Field(ge=0, le=1)] = 0
    """0: the model that is explored; 1: the one beside it (``--beside``)."""

    @model_validator(mode="after")
    def _one_of_them(self) -> PromptRequest:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")
        return self


class RootRequest(Request):
    """What is explained: an answer rather than a wrong one (``linear``), or the likelihood of an answer."""

    answer: Token | Annotated[list[Token], Field(min_length=1, max_length=50)]
    wrong: Token | Annotated[list[Token], Field(min_length=1, max_length=50)] | None = None
    kind: Literal["linear", "probability"] | None = None


class FiringRequest(Request):
    """A head that attends from a destination to a source."""

    layer: Position
    head: Position
    dest: Position
    src: Position


class WhyRequest(Request):
    """Why does this head attend here? With a root, also what the head contributed to it there."""

    prompt: PromptRequest
    firing: FiringRequest
    root: RootRequest | None = None


class TraceRequest(Request):
    """A circuit is wanted."""

    prompt: PromptRequest
    root: RootRequest
    paths: Paths = "complete"
    counterfactual: Text | None = None
    method: Literal["acc++", "acc", "svt"] = "acc++"
    max_firings: Annotated[int, Field(ge=1, le=10_000)] | None = None
    min_influence: Annotated[float, Field(ge=0, le=1)] | None = None


class SiteRequest(Request):
    """A component at its place, as in a circuit file's nodes."""

    kind: Kind
    layer: Position | None = None
    head: Position | None = None
    dest: Position | None = None
    src: Position | None = None


class SignalIntervention(Request):
    """An edge on a query or key side: the signal is multiplied by ``factor`` where its firing reads it (local), or
    wherever it is read (global)."""

    kind: Literal["signal"] = "signal"
    source: SiteRequest
    target: FiringRequest
    side: AttentionSide
    channels: Annotated[list[Position], Field(min_length=1, max_length=1_000)]
    factor: Annotated[float, Field(ge=-100, le=100)] = 0.0
    reach: Literal["local", "global"] = "local"


class ComponentIntervention(Request):
    """What a component writes at its place (of a head without ``src``: all that it writes at ``dest``; without
    ``dest``: everywhere) is multiplied by ``factor`` for every reader."""

    kind: Literal["component"] = "component"
    site: SiteRequest
    factor: Annotated[float, Field(ge=-100, le=100)] = 0.0


Intervention = Annotated[SignalIntervention | ComponentIntervention, Field(discriminator="kind")]


class InterveneRequest(Request):
    """The model with these interventions, all at once, beside the model as it is."""

    prompt: PromptRequest
    interventions: Annotated[list[Intervention], Field(max_length=MAX_INTERVENTIONS)]
    root: RootRequest | None = None
    generate: Annotated[int, Field(ge=0, le=MAX_GENERATED)] = 0
    """How many tokens to continue with, greedily, clean and under the interventions."""


class Answer(BaseModel):
    """A next token."""

    token: str
    id: int
    probability: float


class HeadMeasures(BaseModel):
    """One head on this prompt."""

    layer: int
    head: int
    sink: float
    """Mean attention to the first token, over all destinations after it."""
    entropy: float
    """Mean entropy of attention in bits, over all destinations after the first."""
    previous: float
    """Mean attention to the token before."""
    strongest: tuple[int, int, float]
    """Destination, source and attention where it attends most, past the first token if the prompt has more."""


class RecordingView(BaseModel):
    """A recorded prompt. Its patterns are at ``/api/recordings/{id}/patterns``: one byte per attention weight
    (255: all of it), layer by layer, head by head, destination by destination, each with its sources 0 to dest."""

    id: str
    model: int
    text: str | None
    tokens: list[str]
    token_ids: list[int]
    answers: list[Answer]
    heads: list[HeadMeasures]
    python: str


class HeadPattern(BaseModel):
    """All attention of one head: per destination, its sources 0 to dest."""

    layer: int
    head: int
    attention: list[list[float]]


class Evidence(BaseModel):
    """What an atlas or an interpretation says of a channel."""

    words: str
    tokens: list[str] = []
    examples: list[str] = []
    p_value: float | None = None
    supported: bool | None = None


class ChannelBar(BaseModel):
    """What one channel contributes to the firing's attention logit."""

    channel: int
    term: float
    relative_term: float
    singular_value: float
    in_signal_set: bool
    evidence: Evidence | None = None


class CauseView(BaseModel):
    """A component whose signal holds the firing up."""

    name: str
    kind: Kind
    layer: int | None
    head: int | None
    dest: int | None
    src: int | None
    token: str
    """The token where it acts; for a head, the token it read."""
    channels: list[int]
    weight: float


class SideView(BaseModel):
    """One side of a firing."""

    causes: list[CauseView]
    predicted: float | None
    """Attention that would be left without them."""
    explained: bool


class MovedView(BaseModel):
    """What the head moved from the source to the destination."""

    norm: float
    """Length of what it wrote, against the length of the residual there."""
    promotes: list[tuple[str, float]]
    """Tokens that the write raises most, read straight through the unembedding, with their logits."""
    suppresses: list[tuple[str, float]]
    contribution: float | None = None
    """To the root, through frozen attention, norms and gates, in its unit."""
    measure: str | None = None
    """What the contribution is measured in."""


class WhyView(BaseModel):
    """Why a head attends here."""

    firing: FiringRequest
    attention: float
    threshold: float
    logit: float
    channels: list[ChannelBar]
    remainder: float
    query: SideView
    key: SideView
    moved: MovedView
    python: str


class JobView(BaseModel):
    """Work that takes a while.

    Its events are at ``/api/jobs/{id}/events`` (server-sent): ``queued`` (ahead), ``progress`` (done, of), ``partial``
    (circuit), and at the end one of ``done`` (circuit, python), ``failed`` (error), ``cancelled``.
    """

    id: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    ahead: int = 0
    done: int = 0
    of: int = 0
    error: str | None = None


class CircuitView(BaseModel):
    """A traced circuit: the data that the drawing takes."""

    circuit: dict[str, Any]
    python: str


class FiringChange(BaseModel):
    """Attention of a firing that an intervention names, before and after."""

    firing: FiringRequest
    before: float
    after: float


class MetricChange(BaseModel):
    """What the root measures, before and after."""

    measure: str
    before: float
    after: float


class InterveneView(BaseModel):
    """The model as it is, and under the interventions. ``changed`` has patterns like any recording."""

    clean: RecordingView
    changed: RecordingView
    firings: list[FiringChange]
    metric: MetricChange | None
    generated: tuple[str, str] | None
    """The continuation, clean and changed."""
    python: str


class TaskView(BaseModel):
    name: str
    description: str


class ExampleView(BaseModel):
    """A prompt of a task with its answers."""

    text: str
    answer: str
    wrong: str | None
    counterfactual: str | None


class ServedModel(BaseModel):
    name: str
    architecture: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int


class ServerView(BaseModel):
    """What is served, and within which limits."""

    version: str
    models: list[ServedModel]
    tasks: list[TaskView]
    atlas: bool
    run: bool
    max_tokens: int
    max_waiting: int


class RunPrompt(BaseModel):
    id: str
    text: str
    answer: str | None
    wrong: str | None
    family: int | None
    representative: bool
    labels: dict[str, Any]


class RunPage(BaseModel):
    """Prompts of the run that a search found."""

    found: int
    offset: int
    prompts: list[RunPrompt]


class FamilyView(BaseModel):
    family: int
    size: int
    representative: str
    words: str
    """What its circuits have that others have not, in a line."""


class RunMap(BaseModel):
    """The cluster map: circuits in the order of their tree, and how alike each two are (0 equal, 1 nothing in common).
    Of large runs a sample that has all representatives."""

    name: str
    size: int
    grain: str
    ids: list[str]
    family: list[int]
    distances: list[list[float]]
    families: list[FamilyView]


class ErrorView(BaseModel):
    """What went wrong, in words: what was given, what was expected, what to do."""

    code: str
    message: str
