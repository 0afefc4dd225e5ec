"""Gradients, optimizers and whole training steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
nn = torch.nn

DEVICE = "cuda"


class Stripes(torch.utils.data.Dataset):
    """Noisy pictures of stripes, upright (0) or lying (1), the same ones each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        wave = torch.sin(torch.arange(16) * 1.5 + index).expand(16, 16)
        label = index % 2
        noise = 0.3 * torch.randn(16, 16, generator=generator)
        return (wave.T if label else wave).clone().add_(noise)[None], label


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "foreach": False}),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "foreach": True}),
        ("Adam", {"lr": 0.01, "foreach": True, "amsgrad": True}),
        ("AdamW", {"lr": 0.01, "fused": True}),
        ("RMSprop", {"lr": 0.01}),
        ("Adagrad", {"lr": 0.01}),
    ],
    ids=["sgd", "sgd-foreach", "adam-foreach", "adamw-fused", "rmsprop", "adagrad"],
)
def test_optimizer_takes_the_steps_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    x, y = torch.randn(64, 12), torch.randn(64, 3)
    results = []
    for device in ("cpu", DEVICE):
        twin = copy.deepcopy(model).to(device)
        optimizer = getattr(torch.optim, name)(twin.parameters(), **options)
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(twin(x.to(device)), y.to(device)).backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in twin.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-3, rtol=1e-3)


def test_second_derivative() -> None:
    x = torch.linspace(0.5, 2, 50, dtype=torch.float64, device=DEVICE, requires_grad=True)
    (slope,) = torch.autograd.grad((x**3 * x.log()).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(curvature, (6 * x * x.log() + 5 * x).detach())


def test_gradients_per_sample() -> None:
    weights = torch.randn(6, device=DEVICE)
    x = torch.randn(10, 6, device=DEVICE)

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (w @ row).sin()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    torch.testing.assert_close(found, (x @ weights).cos()[:, None] * x, atol=1e-5, rtol=1e-5)


def test_checkpointed_gradients_with_clipping() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(DEVICE)
    x = torch.randn(20, 16, device=DEVICE)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, atol=1e-4, rtol=1e-4)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert norm == pytest.approx(1, abs=1e-3)


def test_small_cnn_learns_from_a_loader_with_workers() -> None:
    loader = torch.utils.data.DataLoader(Stripes(256), 64, num_workers=2, pin_memory=True)
    model = small_cnn().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        for pictures, labels in loader:
            assert pictures.is_pinned()
            optimizer.zero_grad()
            logits = model(pictures.to(DEVICE, non_blocking=True))
            F.cross_entropy(logits, labels.to(DEVICE, non_blocking=True)).backward()
            optimizer.step()
    unseen = Stripes(400)
    pictures, labels = zip(*(unseen[i] for i in range(256, 400)), strict=True)
    model.eval()
    with torch.no_grad():
        answers = model(torch.stack(pictures).to(DEVICE)).argmax(1)
    assert (answers.cpu() == torch.tensor(labels)).float().mean().item() > 0.95


def test_mixed_precision_training() -> None:
    model = small_cnn().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    pictures = torch.stack([Stripes(64)[i][0] for i in range(64)]).to(DEVICE)
    labels = torch.arange(64, device=DEVICE) % 2
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            logits = model(pictures)
            loss = F.cross_entropy(logits, labels)
        assert logits.dtype is torch.float16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_scaler_skips_a_step_that_overflows() -> None:
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 4
    assert scaler.get_scale() == 512.0
