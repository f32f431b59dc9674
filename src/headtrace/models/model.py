"""A Hugging Face causal language model, seen as heads and components."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from headtrace.errors import InputError
from headtrace.models import tokens
from headtrace.models.architectures import find_architecture
from headtrace.models.memory import require_memory
from headtrace.models.record import Recording
from headtrace.models.view import FoldedWeights, fold_weights

if TYPE_CHECKING:
    from headtrace.channels import Decomposition, ModelChannels
    from headtrace.vocabulary import Firing


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
        self.architecture = find_architecture(hf.config)
        if hf.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"The model is in {hf.dtype}; decompositions are exact in float32 and float64 only. "
                "Call model.float() first, or let headtrace.load read it with dtype='float32'."
            )
        self.hf = hf.eval()
        self.tokenizer = tokenizer
        self.name = name or hf.config.name_or_path or type(hf).__name__
        self.revision = revision

        config: Any = hf.config
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.d_model: int = config.hidden_size
        self.d_head: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        embeddings: Any = hf.get_input_embeddings()
        self.d_vocab: int = embeddings.weight.shape[0]
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.final_softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, {self.architecture.name}, {self.n_layers} layers x {self.n_heads} heads, "
            f"d_model={self.d_model}, d_head={self.d_head})"
        )

    @cached_property
    def weights(self) -> FoldedWeights:
        """All heads' projections with norms folded in (`headtrace.models.view`)."""
        return fold_weights(self.hf, self.architecture, self.d_head)

    @cached_property
    def weights_sha256(self) -> str:
        """A hash of the weights themselves: names, shapes and float32 values of all parameters."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.hf.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
            digest.update(parameter.detach().float().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    @cached_property
    def channels(self) -> ModelChannels:
        """The SVD of every head's query-key form."""
        from headtrace.channels import model_channels

        return model_channels(self)

    def record(self, prompts: Any, *, bos: bool | None = None, last_logits: bool = False) -> Recording:
        """One forward pass on a prompt, or on many at once, kept as components that sum exactly.

        Prompts are text or token ids. ``bos`` overrides whether a beginning-of-sequence token comes first;
        ``last_logits=True`` keeps output logits at each prompt's last position only.

            recording = model.record("When Mary and John went to the store, John gave a drink to")
            recording.check()
        """
        ids = [tokens.to_ids(self, prompt, bos) for prompt in tokens.as_prompts(prompts)]
        batch, lengths = tokens.to_batch(ids, self.device)
        require_memory(self, batch.shape[1], len(ids), len(set(lengths)) if last_logits else None)
        return Recording.make(self, batch, lengths, last_logits=last_logits)

    def decompose(self, recording: Recording, firing: Firing | str, *, prompt: int = 0) -> Decomposition:
        """The attention score of one firing as a sum over the head's channels."""
        from headtrace.channels import decompose

        return decompose(recording, firing, prompt=prompt)

    def to_ids(self, prompt: Any, *, bos: bool | None = None) -> list[int]:
        """Token ids of one prompt, checked against the vocabulary and the context length."""
        return tokens.to_ids(self, prompt, bos)

    def token_id(self, answer: str | int, what: str = "answer") -> int:
        """The id of an answer that must be a single token, e.g. ``" Mary"``."""
        return tokens.single_token(self, answer, what)

    def token_labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Readable text of each token."""
        return tokens.token_labels(self, ids)
