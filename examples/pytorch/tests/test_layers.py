"""Layers forward and backward: the same weights on the CPU and on the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
nn = torch.nn

DEVICE = "cuda"


def compare(layer: nn.Module, *inputs: torch.Tensor, tolerance: float = 1e-3) -> None:
    """Outputs, and the gradients of inputs and weights, are the CPU's."""
    twin = copy.deepcopy(layer).to(DEVICE)
    here = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    there = [x.to(DEVICE).requires_grad_(x.is_floating_point()) for x in inputs]
    expected, found = layer(*here), twin(*there)
    if isinstance(expected, tuple):
        expected, found = expected[0], found[0]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    direction = torch.randn(expected.shape) / expected.numel() ** 0.5
    expected.backward(direction)
    found.backward(direction.to(DEVICE))
    here += layer.parameters()
    there += twin.parameters()
    for a, b in zip(here, there, strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad.cpu(), a.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 20, 20)),
        (lambda: nn.Conv2d(8, 16, 5, stride=2, groups=4), (4, 8, 21, 21)),
        (lambda: nn.Conv1d(6, 12, 7, dilation=2), (3, 6, 100)),
        (lambda: nn.Conv3d(2, 4, 3), (2, 2, 8, 9, 10)),
        (lambda: nn.ConvTranspose2d(8, 4, 4, stride=2), (2, 8, 9, 9)),
    ],
    ids=["plain", "grouped", "dilated-1d", "3d", "transposed"],
)
def test_convolution(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    compare(layer(), torch.randn(shape))


def test_half_precision_convolution_in_channels_last() -> None:
    layer, x = nn.Conv2d(16, 32, 3), torch.randn(4, 16, 30, 30)
    twin = copy.deepcopy(layer).to(DEVICE, torch.float16, memory_format=torch.channels_last)
    found = twin(x.to(DEVICE, torch.float16, memory_format=torch.channels_last))
    torch.testing.assert_close(found.float().cpu(), layer(x), atol=1e-2, rtol=1e-2)


def test_pooling_and_resizing() -> None:
    layers = nn.Sequential(
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        nn.AvgPool2d(3, stride=1),
        nn.AdaptiveAvgPool2d(4),
    )
    compare(layers, torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_recurrent(kind: str) -> None:
    layer = getattr(nn, kind)(12, 20, num_layers=2, bidirectional=True, batch_first=True)
    compare(layer, torch.randn(5, 9, 12))


def test_normalisation() -> None:
    compare(nn.BatchNorm2d(6), torch.randn(8, 6, 10, 10))
    compare(nn.LayerNorm(48), torch.randn(7, 48))
    compare(nn.GroupNorm(3, 12), torch.randn(4, 12, 8, 8))


def test_transformer_layer() -> None:
    compare(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), torch.randn(3, 11, 32)
    )


@pytest.mark.parametrize("backend", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"])
def test_attention(backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 4, 65, 64) for _ in range(3))
    scores = q @ k.mT / 8 + torch.full((65, 65), -torch.inf).triu(1)
    half = [x.to(DEVICE, torch.float16) for x in (q, k, v)]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        found = F.scaled_dot_product_attention(*half, is_causal=True)
    torch.testing.assert_close(found.float().cpu(), scores.softmax(-1) @ v, atol=1e-2, rtol=1e-2)


def test_embeddings() -> None:
    words = torch.randint(0, 50, (6, 14))
    compare(nn.Embedding(50, 16, padding_idx=0), words)
    compare(nn.EmbeddingBag(50, 16, mode="mean"), words)


def test_dropout_keeps_the_mean() -> None:
    x = torch.ones(100_000, device=DEVICE)
    dropped = F.dropout(x, 0.25)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(F.dropout(x, 0.25, training=False), x)


def test_losses() -> None:
    x = torch.randn(32, 10)
    labels = torch.randint(0, 10, (32,))
    target = torch.rand(32, 10)
    losses: list[Callable[[str], torch.Tensor]] = [
        lambda d: F.cross_entropy(x.to(d), labels.to(d), label_smoothing=0.1),
        lambda d: F.nll_loss(x.to(d).log_softmax(1), labels.to(d)),
        lambda d: F.binary_cross_entropy_with_logits(x.to(d), target.to(d)),
        lambda d: F.smooth_l1_loss(x.to(d), target.to(d)),
        lambda d: F.kl_div(x.to(d).log_softmax(1), target.to(d).softmax(1), reduction="batchmean"),
        lambda d: F.cosine_embedding_loss(x.to(d), target.to(d), labels.to(d).sign() * 2 - 1),
    ]
    for loss in losses:
        torch.testing.assert_close(loss(DEVICE).cpu(), loss("cpu"), atol=1e-4, rtol=1e-4)


def test_ctc_loss() -> None:
    scores = torch.randn(40, 3, 8).log_softmax(2)
    words = torch.randint(1, 8, (3, 9))
    lengths = torch.full((3,), 40), torch.full((3,), 9)
    expected = F.ctc_loss(scores, words, *lengths)
    found = F.ctc_loss(scores.to(DEVICE), words.to(DEVICE), *lengths)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)
