"""A causal language model that transformers does not know, as a user's package would bring it, and its facts.

What is unusual about it can be chosen: no final norm, an output vocabulary of its own, heads of another size in every
layer, MLPs beside attention, norms of either kind with an offset on their gains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headtrace.models import Architecture
from headtrace.models.architectures.facts import plain_mlp, separate_linears


class MadeUpConfig(PreTrainedConfig):
    model_type = "made_up"

    def __init__(
        self,
        vocab_size: int = 23,
        outputs: int = 23,
        hidden_size: int = 16,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 2,
        head_sizes: tuple[int, ...] = (8, 8, 8),
        max_position_embeddings: int = 16,
        final: str = "norm",
        norm: str = "rms",
        offset: float = 0.0,
        beside: bool = False,
        **others: Any,
    ) -> None:
        self.vocab_size, self.outputs, self.hidden_size = vocab_size, outputs, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.head_sizes, self.max_position_embeddings = tuple(head_sizes), max_position_embeddings
        self.final, self.norm, self.offset, self.beside = final, norm, offset, beside
        super().__init__(**{**others, "tie_word_embeddings": False})


class Norm(nn.Module):
    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.kind, self.offset, self.eps = config.norm, config.offset, 1e-5
        self.weight = nn.Parameter(torch.rand(config.hidden_size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.offset)


class Attention(nn.Module):
    def __init__(self, config: MadeUpConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.size = config.head_sizes[layer_idx]
        width, d_model = self.size * config.num_attention_heads, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, width) for _ in range(3))
        self.o_proj = nn.Linear(width, d_model)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = hidden_states
        shape = (*x.shape[:2], -1, self.size)
        q, k, v = (read(x).view(shape).transpose(1, 2) for read in (self.q_proj, self.k_proj, self.v_proj))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        read, _ = attend(self, q, k, v, attention_mask, scaling=self.size**-0.5)
        return self.o_proj(read.reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(config.hidden_size, 24), nn.GELU()
        self.down = nn.Linear(24, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: MadeUpConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = (
            *(Norm(config), Attention(config, layer_idx)),
            *(Norm(config), MLP(config)),
        )
        self.beside = config.beside

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = hidden_states
        after = x + self.attn(self.norm_1(x), attention_mask)
        return after + self.mlp(self.norm_2(x if self.beside else after))


class MadeUpForCausalLM(PreTrainedModel):
    config_class = MadeUpConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        if config.final != "none":
            self.last = Norm(config) if config.final == "norm" else nn.Identity()
        self.head = nn.Linear(config.hidden_size, config.outputs)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.4)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, std=0.4)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        x = self.tokens(input_ids)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x, attention_mask=mask)
        return CausalLMOutput(logits=self.head(x if self.config.final == "none" else self.last(x)))


def _decided(config: MadeUpConfig) -> dict[str, Any]:
    return {
        "head_sizes": config.head_sizes,
        "final_norm": None if config.final == "none" else "last",
        "norm": config.norm,
        "gain_offset": config.offset,
    }


MADE_UP = Architecture(
    name="MadeUp",
    model_type="made_up",
    layers="blocks",
    final_norm="last",
    attention="attn",
    attention_norm="norm_1",
    mlp="mlp",
    mlp_norm="norm_2",
    mlp_write="mlp",
    projections=separate_linears(),
    mlp_parts=plain_mlp("mlp.up", "mlp.down", "mlp.act"),
    parallel=lambda config: config.beside,
    rotary=False,
    variant=_decided,
)


def register_with_transformers() -> None:
    """What a package does when it is imported, so that its models can be loaded from folders."""
    AutoConfig.register("made_up", MadeUpConfig, exist_ok=True)
    AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM, exist_ok=True)


def made_up(seed: int = 0, **options: Any) -> MadeUpForCausalLM:
    torch.manual_seed(seed)
    return MadeUpForCausalLM._from_config(MadeUpConfig(**options), attn_implementation="sdpa").eval()
