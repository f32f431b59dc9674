"""Prompts: from what a user gives to token ids, in the same way for models and for tasks.

A text becomes tokens as the model's own tokenizer makes them, special tokens in front included. What a tokenizer puts
behind a text would stand between the prompt and its continuation, so it is left off. An answer is read as it follows
the prompt. Besides text, a prompt may be token ids (a list, an array, what a tokenizer returns) or a conversation.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> reader = PromptReader(model.tokenizer, model.name, model.d_vocab, model.max_positions)
>>> reader.labels(reader.ids("When Mary and John"))
('<|endoftext|>', 'When', 'Mary', 'and', 'John')
>>> reader.labels(reader.continuation("When Mary and", " John"))
('John',)
"""

from headtrace.prompts.encoding import (
    Encoded,
    Span,
    decoded,
    encode,
    following,
    has_unknown,
    is_one_token,
    is_unknown,
    positions_of,
)
from headtrace.prompts.forms import PASS_TOKENS, Chat, as_prompts, batches, cheapest_groups, one_prompt
from headtrace.prompts.reader import PromptReader

__all__ = [
    "PASS_TOKENS",
    "Chat",
    "Encoded",
    "PromptReader",
    "Span",
    "as_prompts",
    "batches",
    "cheapest_groups",
    "decoded",
    "encode",
    "following",
    "has_unknown",
    "is_one_token",
    "is_unknown",
    "one_prompt",
    "positions_of",
]
