"""A Hugging Face causal language model, seen as heads and components."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, local
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headtrace.errors import InputError, UnsupportedModelError, deprecated
from headtrace.models.architectures import find_architecture
from headtrace.models.devices import compute_dtype, device_of, dtype_name, first_number, is_spread
from headtrace.models.fit import Sizes, fitted, require_heads, require_sizes
from headtrace.models.forward import forward
from headtrace.models.integrity import (
    Watcher,
    WeightsVersion,
    check_adapters,
    check_devices,
    check_parameters,
    check_surroundings,
    computation_sha256,
    weights_sha256,
)
from headtrace.models.observer import Observer
from headtrace.models.record import PatternsKept, patterns_kept, record, require_memory
from headtrace.models.recording import Recording
from headtrace.models.weights import FoldedWeights, fold_weights
from headtrace.prompts import Chat, PromptReader, as_prompts
from headtrace.prompts.encoding import encode
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from headtrace.channels import Decomposition, ModelChannels
    from headtrace.vocabulary import Firing

T = TypeVar("T")


class Model:
    """A causal language model of a supported architecture. Made by ``headtrace.load``.

    ``hf`` is the Hugging Face module and ``tokenizer`` its tokenizer (or None). The model runs its own forward pass;
    headtrace adds one attention function and a few hooks while it records or intervenes.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        facts = find_architecture(hf.config)
        require_sizes(facts, hf.config.get_text_config())
        self.architecture = fitted(facts, hf)
        if self.architecture.rotary_in_float32 and hf.dtype == torch.float64:
            raise UnsupportedModelError(
                f"{self.architecture.name} models rotate queries and keys in float32 whatever their dtype is, so "
                "float64 would not be exact. Load the model in float32."
            )
        self.hf = hf
        self.tokenizer = tokenizer
        self.name = name or hf.config.name_or_path or type(hf).__name__
        self.revision = revision

        config = self.config
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = (
            self.architecture.n_kv_heads
            or getattr(config, "num_key_value_heads", None)
            or config.num_attention_heads
        )
        self.d_model: int = config.hidden_size
        sizes = self.architecture.head_sizes
        self.d_head: int = (
            max(sizes)
            if sizes
            else getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.final_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._lock, self._cache, self._thread = RLock(), dict[str, Any](), local()
        self.invalidate()
        require_heads(
            self.architecture, self.layers, Sizes(self.n_heads, self.n_kv_heads, self.d_model, self.d_head)
        )
        check_devices(hf.dtype, (self.device, *map(device_of, self.layers)))

    @property
    def config(self) -> Any:
        """The transformers config of the language model: of a multimodal model, that of its text part."""
        return self.hf.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where prompts go in and recordings are kept: with a device map, where its embedding is."""
        return device_of(self.hf.get_input_embeddings())

    def device_of(self, layer: int) -> torch.device:
        """Where a layer runs.

        >>> import headtrace
        >>> headtrace.load("builtin", device="cpu").device_of(0)
        device(type='cpu')
        """
        return device_of(self.layers[layer])

    @property
    def device_map(self) -> dict[str, int | str] | None:
        """Where a device map put the parts of the model, by the names of modules; None if it is all in one place.

        >>> import headtrace
        >>> headtrace.load("builtin").device_map is None
        True
        """
        found: Mapping[str, Any] = getattr(self.hf, "hf_device_map", None) or {}
        if not found or not is_spread(self.hf):
            return None
        return {name: place if isinstance(place, int) else str(place) for name, place in found.items()}

    @property
    def dtype(self) -> torch.dtype:
        """What headtrace computes in: the model's own dtype, and float32 for one that runs in half precision."""
        return compute_dtype(self._first.dtype)

    @property
    def own_dtype(self) -> str:
        """What the model itself computes in: ``"bfloat16"``, ``"float32"`` ..."""
        return dtype_name(self._first.dtype)

    @property
    def half(self) -> bool:
        """Whether the model itself runs in half precision, so that its own sums are rounded (`roundings`)."""
        return self._first.dtype != self.dtype

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, {self.architecture.name}, {self.n_layers} layers x {self.n_heads} heads, "
            f"d_model={self.d_model}, d_head={self.d_head})"
        )

    @property
    def layers(self) -> list[nn.Module]:
        """The model's blocks, from the first to the last."""
        blocks = vars(self.hf.get_submodule(self.architecture.layers))["_modules"].values()
        return list(dict.fromkeys(block for block in blocks if block is not None))

    @property
    def d_vocab(self) -> int:
        """How many tokens the model has embeddings for."""
        embeddings: Any = self.hf.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def d_output(self) -> int:
        """How many tokens the model has output logits for: in nearly all models as many as it has embeddings for."""
        unembedding: Any = self.hf.get_output_embeddings()
        return unembedding.weight.shape[0]

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """How many dimensions a head has, layer by layer; ``d_head`` is the largest."""
        return self.architecture.head_sizes or (self.d_head,) * self.n_layers

    @property
    def head_order(self) -> Int[Tensor, " d_head"] | None:
        """The order in which headtrace sees a head's dimensions, where it is not the model's own."""
        order = self.architecture.head_order(self.config, self.d_head)
        return None if order is None else order.to(self.device)

    @property
    def weights(self) -> FoldedWeights:
        """All heads' projections with norms folded in (`headtrace.models.weights`)."""
        return self.cached(
            "weights", lambda: fold_weights(self.hf, self.architecture, self.d_head, self.head_order)
        )

    @property
    def weights_sha256(self) -> str:
        """A hash of the weights themselves: names, shapes and float32 values of all parameters.

        It reads them all, so it is made when a file or a comparison needs it, and kept with their version.
        """

        def compute() -> str:
            self._version.weights_sha256 = found = weights_sha256(self.hf)
            return found

        return self.cached("weights_sha256", compute)

    @property
    def computation_sha256(self) -> str:
        """A hash of what else computes: the computing part of the config, and buffers (`headtrace.models.integrity`).

        >>> import headtrace
        >>> len(headtrace.load("builtin").computation_sha256)
        64
        """
        return computation_sha256(self)

    @property
    def channels(self) -> ModelChannels:
        """The SVD of every head's query-key form."""
        from headtrace.channels import model_channels

        return self.cached("channels", lambda: model_channels(self))

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """A value computed on first use, by one thread while others wait, and kept until the weights change."""
        self.refresh()
        if name not in self._cache:
            with self._lock:
                if name not in self._cache:
                    self._cache[name] = make()
        return self._cache[name]

    # -- when weights change -----------------------------------------------------------------------------------

    def refresh(self) -> WeightsVersion:
        """Compare the weights with what they were, and drop everything derived from them if they have changed.

        Returns the version of the weights: the same object as long as no change is seen.
        """
        if not getattr(self._thread, "assumed", False):
            check_surroundings(self._first.device)
            with self._lock:
                if not self._watcher.unchanged():
                    self.invalidate()
        return self._version

    def invalidate(self) -> None:
        """Drop everything derived from the weights: to be called after an edit that cannot be noticed.

        Edits in place, replaced parameters and modules are noticed. What only changes a few numbers through
        ``parameter.data`` or a NumPy view is not (`headtrace.models.integrity`): call this afterwards.
        """
        with self._lock:
            check_parameters(self.hf)
            check_adapters(self.hf)
            if not self.n_layers:
                raise UnsupportedModelError(
                    f"{self.name!r} has no layers (num_hidden_layers is 0): nothing attends in it, so there is "
                    "nothing to explain."
                )
            if len(self.layers) != self.n_layers:
                raise InputError(
                    f"The config says {self.n_layers} layers, and the model has {len(self.layers)}. Set "
                    f"model.config.num_hidden_layers to what is there and load the module again: headtrace.load(hf)."
                )
            self._cache.clear()
            self._watcher, self._version = Watcher(self.hf), WeightsVersion()
            self._first = first_number(self.hf)

    @contextmanager
    def assume_weights_unchanged(self) -> Generator[None]:
        """Check the weights for changes once, now, and not inside: for work that reads them many times."""
        self.refresh()
        before = getattr(self._thread, "assumed", False)
        self._thread.assumed = True
        try:
            yield
        finally:
            self._thread.assumed = before

    def settled(self) -> AbstractContextManager[None]:
        """The old name of ``assume_weights_unchanged``."""
        deprecated("Model.settled", "0.5", "Model.assume_weights_unchanged")
        return self.assume_weights_unchanged()

    def forget(self) -> None:
        """The old name of ``invalidate``."""
        deprecated("Model.forget", "0.5", "Model.invalidate")
        self.invalidate()

    @property
    def stamp(self) -> WeightsVersion:
        """The old name of ``refresh()``."""
        deprecated("Model.stamp", "0.5", "Model.refresh()")
        return self.refresh()

    # -- running ---------------------------------------------------------------------------------------------

    def record(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        bos: bool | None = None,
        last_logits: bool | int = False,
        keep: Iterable[str] | None = None,
        patterns: PatternsKept = "auto",
    ) -> Recording:
        """One forward pass on a prompt, or on many at once, kept as components that sum exactly.

        Prompts are text, token ids (a list, an array, a tensor, what a tokenizer returns: its padding is left out) or
        the messages of a conversation, which go through the model's chat template. ``bos`` overrides whether a
        beginning-of-sequence token comes before text; ``last_logits=True`` keeps output logits at each prompt's last
        position only (a number: at as many);
        ``keep`` names the tensors to record (default: all that a trace needs; `Recording.FIELDS` lists them).
        ``patterns`` says whether attention patterns are kept (``"keep"``) or computed again from queries and keys when
        they are read (``"recompute"``); ``"auto"`` keeps them as long as they take at most 2 GB.

        >>> import headtrace
        >>> model = headtrace.load("builtin")
        >>> model.record("When Mary and John went to", keep=["patterns"]).patterns.shape
        torch.Size([3, 1, 4, 7, 7])
        """
        ids = [self.reader.ids(prompt, bos) for prompt in as_prompts(prompts)]
        batch, lengths = self._padded(ids)
        kept = None if not last_logits else int(last_logits)
        keep = patterns_kept(self, keep, patterns, len(ids), batch.shape[1])
        require_memory(self, batch.shape[1], len(ids), kept, keep)
        with self.assume_weights_unchanged():
            return record(self, batch, lengths, last_logits=kept or 0, keep=keep)

    def run(
        self, token_ids: Int[Tensor, "batch token"], *observers: Observer, **options: Any
    ) -> Float[Tensor, "batch kept vocab"]:
        """One forward pass watched by observers (`headtrace.models.forward.forward`)."""
        return forward(self, token_ids, *observers, **options)

    def end_logits(self, prompts: Prompt | Sequence[Prompt]) -> Float[Tensor, "prompt vocab"]:
        """Output logits at the end of each prompt, all run together."""
        batch, lengths = self._padded([self.to_ids(prompt) for prompt in as_prompts(prompts)])
        ends = torch.tensor(lengths, device=self.device)[:, None] - 1
        return forward(self, batch, lengths=lengths, keep=ends)[:, 0]

    def decompose(self, recording: Recording, firing: Firing | str, *, prompt: int = 0) -> Decomposition:
        """The attention score of one firing as a sum over the head's channels."""
        from headtrace.channels import decompose

        return decompose(recording, firing, prompt=prompt)

    def to_ids(self, prompt: Prompt | Chat, *, bos: bool | None = None) -> list[int]:
        """Token ids of one prompt, checked against the vocabulary and the context length."""
        return self.reader.ids(prompt, bos)

    def token_id(self, answer: str | int, what: str = "answer", prompt: Prompt | Chat | None = None) -> int:
        """The id of an answer that must be a single token, e.g. ``" Mary"``, as it follows a prompt."""
        return self.reader.token(prompt, answer, what)

    def continuation(self, prompt: Prompt | Chat | None, answer: str | int) -> tuple[int, ...]:
        """The tokens of an answer, one or more, as it follows a prompt."""
        return self.reader.continuation(prompt, answer)

    def token_labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Readable text of each token."""
        return self.reader.labels(ids)

    def output_labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Readable text of each output; its number where outputs have a vocabulary of their own."""
        return self.reader.output_labels(ids)

    @property
    def start_tokens(self) -> tuple[str, ...] | None:
        """What the tokenizer puts in front of every text (Gemma: ``<bos>``); None without a tokenizer.

        >>> import headtrace
        >>> headtrace.load("builtin").start_tokens
        ('<|endoftext|>',)
        """
        if self.tokenizer is None:
            return None
        return self.reader.start_tokens("a", encode(self.tokenizer, ["a"])[0].ids)

    @property
    def reader(self) -> PromptReader:
        """How text becomes token ids for this model (`headtrace.prompts`)."""
        return PromptReader(self.tokenizer, self.name, self.d_vocab, self.max_positions, self.d_output)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "batch token"], tuple[int, ...]]:
        """Right-padded token ids and the lengths. Padding comes after the prompt, so no real token sees it."""
        lengths = tuple(len(ids) for ids in prompts)
        # Padding repeats the prompt's own last token: a valid id in every vocabulary.
        rows = [[*ids, *[ids[-1]] * (max(lengths) - len(ids))] for ids in prompts]
        return torch.tensor(rows, device=self.device), lengths
