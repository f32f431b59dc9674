"""What one firing moved: the same numbers as content has, from a sweep that stops at its layer."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import InputError
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing.attribute_root import attribute_root
from headtrace.tracing.content import Content, attention_gradient, moved
from headtrace.vocabulary import Firing
from tests.tiny import NAMES, prompts, tiny_model, top_two


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in NAMES), ("llama", torch.bfloat16)]
)
def test_a_contribution_is_the_one_that_content_has(name: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(name, dtype=dtype), prompts()[0]
    answer, wrong = top_two(model, ids)
    recording = model.record(ids, keep=CONTENT_FIELDS)
    root = headtrace.Tracer(model).request(ids, answer=answer, wrong=wrong).resolve(model).root
    content = Content.of(recording, [attribute_root(root, recording, 0).parts])
    allowed = 1e-4 if dtype == torch.bfloat16 else 1e-9
    for layer in range(model.n_layers):
        firing = Firing(layer, layer % 4, 10 - 2 * layer, 10 - 3 * layer)
        found = moved(recording, firing, root, k=5)
        assert found.contribution == pytest.approx(
            content.contribution(0, firing.site), rel=allowed, abs=allowed
        )
        assert (
            found.promotes[0][1] >= found.promotes[-1][1] >= found.suppresses[-1][1] >= found.suppresses[0][1]
        )


def test_what_is_moved_to_the_last_token_is_read_as_the_logits_that_it_adds() -> None:
    """At the last layer nothing lies between: with the norm's scale frozen, logits are what the head adds to them."""
    model, ids = tiny_model("gpt2", dtype=torch.float64), prompts()[0]
    recording = model.record(ids)
    firing = Firing(model.n_layers - 1, 2, 10, 4)
    written = recording.write(firing.site.component)[10]
    norm, head = model.hf.transformer.ln_f, model.hf.lm_head
    centred = written - written.mean()
    scale = (recording.residuals[-1, 0, 10].var(unbiased=False) + norm.eps).sqrt()
    logits = head.weight @ (centred / scale * norm.weight)
    found = moved(recording, firing, k=3)
    assert [value for _, value in found.promotes] == pytest.approx(logits.topk(3).values.tolist())
    assert [value for _, value in found.suppresses] == pytest.approx(
        logits.topk(3, largest=False).values.tolist()
    )
    assert found.norm == pytest.approx(float(written.norm() / recording.residuals[-2, 0, 10].norm()))


def test_what_cannot_be_asked_is_refused() -> None:
    model, ids = tiny_model("gpt2"), prompts()[0]
    recording = model.record(ids, keep=CONTENT_FIELDS)
    root = headtrace.Tracer(model).request(ids, answer=5, wrong=6).resolve(model).root
    with pytest.raises(InputError, match="no layer 9"):
        attention_gradient(recording, root, 9)
    with pytest.raises(InputError, match="k=0"):
        moved(recording, Firing(1, 1, 3, 2), k=0)
    with pytest.raises(InputError, match="mlp_inputs"):
        moved(model.record(ids), Firing(1, 1, 3, 2), root)
