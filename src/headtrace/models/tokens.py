"""From what a user gives (text, token ids, or many of either) to token ids, with errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.models.model import Model


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, Tensor):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts (text, or token ids)."""
    if isinstance(prompts, str) or _is_ids(prompts):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts)
    if isinstance(prompts, Sequence) and len(prompts) == 0:
        raise InputError("The prompt is empty. Give text such as 'When Mary and John ...', or token ids.")
    return list(prompts)


def to_ids(model: Model, prompt: Any, bos: bool | None = None) -> list[int]:
    """Token ids of one prompt. Special tokens are added as the tokenizer does by default, unless ``bos`` says."""
    if isinstance(prompt, str):
        ids = _encode(model, prompt, bos)
    elif isinstance(prompt, Tensor):
        ids = [int(i) for i in prompt.tolist()]
    elif isinstance(prompt, Sequence) and all(isinstance(i, int) for i in cast(Sequence[Any], prompt)):
        ids = list(cast(Sequence[int], prompt))
    else:
        raise InputError(f"A prompt is text or a list of token ids; got {type(prompt).__name__}.")
    _validate(model, ids)
    return ids


def _encode(model: Model, text: str, bos: bool | None) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{model.name!r} was loaded without a tokenizer, so text cannot be read. Give token ids, "
            "or pass tokenizer= to headtrace.load."
        )
    if not text:
        raise InputError("The prompt is empty. Give text such as 'When Mary and John ...', or token ids.")
    ids: list[int] = tokenizer(text)["input_ids"]
    bos_id: int | None = tokenizer.bos_token_id
    if bos is not None:
        if bos and bos_id is None:
            raise InputError("bos=True, but this tokenizer has no beginning-of-sequence token.")
        while ids and ids[0] == bos_id:
            ids = ids[1:]
        if bos and bos_id is not None:
            ids = [bos_id, *ids]
    unknown: int | None = tokenizer.unk_token_id
    if unknown is not None and unknown in ids and str(tokenizer.unk_token) not in text:
        words = _unknown_pieces(tokenizer, text, unknown)
        raise InputError(
            f"The model's vocabulary does not hold {words}: the tokenizer turns it into {tokenizer.unk_token!r}. "
            "Use words that the model knows, or give token ids."
        )
    return ids


def _unknown_pieces(tokenizer: Any, text: str, unknown: int) -> str:
    """Name what became the unknown token, where the tokenizer keeps offsets."""
    if not tokenizer.is_fast:
        return "a part of the prompt"
    encoded = tokenizer(text, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    pieces = dict.fromkeys(text[a:b] for i, (a, b) in pairs if i == unknown)
    return ", ".join(repr(p) for p in pieces)


def _validate(model: Model, ids: list[int]) -> None:
    if not ids:
        raise InputError("The prompt is empty. Give text such as 'When Mary and John ...', or token ids.")
    wrong = [i for i in ids if not 0 <= i < model.d_vocab]
    if wrong:
        raise InputError(
            f"Unknown token id {wrong[0]}: {model.name!r} has token ids 0 to {model.d_vocab - 1}. "
            "Was the prompt made with another model's tokenizer?"
        )
    limit = model.max_positions
    if limit is not None and len(ids) > limit:
        raise InputError(
            f"The prompt has {len(ids)} tokens, but {model.name!r} has a context of {limit}. Shorten the prompt."
        )


def to_batch(ids: list[list[int]], device: Any) -> tuple[Int[Tensor, "batch token"], tuple[int, ...]]:
    """Right-padded token ids and the lengths. Padding comes after the prompt, so no real token sees it."""
    lengths = tuple(len(row) for row in ids)
    width = max(lengths)
    # Padding repeats the prompt's own last token: a valid id in every vocabulary.
    padded = [row + [row[-1]] * (width - len(row)) for row in ids]
    return torch.tensor(padded, device=device), lengths


def single_token(model: Model, answer: str | int, what: str = "answer") -> int:
    """The token id of an answer, which must be exactly one token as it would follow the prompt."""
    if isinstance(answer, int):
        if not 0 <= answer < model.d_vocab:
            raise InputError(f"Unknown token id {answer} as {what}: valid ids are 0 to {model.d_vocab - 1}.")
        return answer
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"{model.name!r} was loaded without a tokenizer: give the {what} as a token id.")
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = " + ".join(repr(tokenizer.decode([i])) for i in ids) or "nothing"
        hint = "" if answer.startswith(" ") else f" Did you mean {' ' + answer!r}, with a leading space?"
        raise InputError(
            f"The {what} {answer!r} is {len(ids)} tokens for this model: {pieces}. It must be one token.{hint}"
        )
    if ids[0] == tokenizer.unk_token_id:
        raise InputError(
            f"The {what} {answer!r} is not in the model's vocabulary. Choose a word that it knows."
        )
    return ids[0]


def token_labels(model: Model, ids: Sequence[int]) -> tuple[str, ...]:
    """Readable text of each token; without a tokenizer, the id itself."""
    if model.tokenizer is None:
        return tuple(f"#{i}" for i in ids)
    return tuple(cast(str, model.tokenizer.decode([i])) for i in ids)
