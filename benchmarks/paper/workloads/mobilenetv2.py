"""MobileNetV2 on random images: torchvision's, or the same architecture written out."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from workload import SEED, finish, parse

try:
    from torchvision.models import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        mobilenet_v2,
    )
except ImportError:
    mobilenet_v2 = None

_CLASSES = 10
# Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (CVPR 2018), table 2:
# expansion, channels, repetitions, first stride.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _Residual(nn.Module):  # type: ignore[misc,unused-ignore]
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def _conv(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after)]


def _bottleneck(before: int, after: int, expansion: int, stride: int) -> nn.Module:
    inner = before * expansion
    layers = [*_conv(before, inner, 1), nn.ReLU6()] if expansion > 1 else []
    layers += [*_conv(inner, inner, 3, stride, inner), nn.ReLU6(), *_conv(inner, after, 1)]
    body = nn.Sequential(*layers)
    return _Residual(body) if stride == 1 and before == after else body


def _plain_mobilenet_v2(classes: int) -> nn.Module:
    layers = [*_conv(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expansion, after, count, first_stride in _STAGES:
        for i in range(count):
            layers.append(_bottleneck(channels, after, expansion, first_stride if i == 0 else 1))
            channels = after
    layers += [*_conv(channels, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, classes))


def _train(model: Any, images: Any, labels: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # What comes later only repeats; early losses differ least from run to run.
    return losses[:3]


def main() -> None:
    arguments = parse(__doc__ or "")
    torch.manual_seed(SEED)
    build = _plain_mobilenet_v2 if mobilenet_v2 is None else lambda n: mobilenet_v2(num_classes=n)
    model = build(_CLASSES).to(arguments.device)
    images = torch.randn(arguments.batch, 3, 224, 224).to(arguments.device)
    labels = torch.randint(_CLASSES, (arguments.batch,)).to(arguments.device)
    if arguments.training:
        # Dropout draws from the device's generator: reproducible, and the same on copies.
        finish(arguments, _train(model.train(), images, labels, arguments.steps))
        return
    model.eval()
    with torch.inference_mode():
        for _ in range(arguments.steps):
            output = model(images)[0]
        # The classes' scores lie close together; so spread, other results show.
        finish(arguments, ((output - output.mean()) / output.std()).tolist())


if __name__ == "__main__":
    main()
