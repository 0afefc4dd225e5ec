"""Transformers: a tiny Llama with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_logits_are_those_of_the_cpu(model: Any) -> None:
    words = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.to("cpu")(words).logits
        found = model.to("cuda")(words.to("cuda")).logits
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)


def test_generated_words_are_the_likeliest(model: Any) -> None:
    model.to("cuda")
    prompt = torch.tensor([[5, 17, 99, 3]], device="cuda")
    words = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert words.shape == (1, 12)
    # With the cache, word by word, as without it, in one go.
    with torch.no_grad():
        logits = model(words).logits
    assert torch.equal(logits[:, 3:-1].argmax(-1), words[:, 4:])


def test_training_step_lowers_the_loss(model: Any) -> None:
    model.to("cuda").train()
    words = torch.arange(1, 33, device="cuda").repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(words, labels=words).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < 0.8 * losses[0]
