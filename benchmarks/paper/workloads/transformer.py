"""torch.nn.Transformer on random sentences: training, and greedy decoding."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from workload import SEED, Arguments, finish, parse

_WORDS = 8000
_WIDTH = 256
_LENGTH = 32


class _Translator(nn.Module):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.places = nn.Embedding(4 * _LENGTH, _WIDTH)
        self.body = nn.Transformer(_WIDTH, 8, 3, 3, 4 * _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def embed(self, words: torch.Tensor) -> Any:
        return self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], source.device)
        inner = self.body(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(inner)


def _train(model: Any, source: Any, target: Any, arguments: Arguments) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        output = model(source, target[:, :-1])
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses[:3]


def _decode(model: Any, source: Any, arguments: Arguments) -> list[float]:
    words = torch.zeros(arguments.batch, 1, dtype=torch.long, device=arguments.device)
    scores = []
    for _ in range(min(arguments.steps, 4 * _LENGTH - 1)):
        best = model(source, words)[:, -1].log_softmax(1).max(1)
        words = torch.cat([words, best.indices[:, None]], 1)
        scores.append(best.values[0].item())
    return scores


def main() -> None:
    arguments = parse(__doc__ or "")
    torch.manual_seed(SEED)
    model = _Translator().to(arguments.device)
    shape = (arguments.batch, _LENGTH)
    source, target = (torch.randint(_WORDS, shape).to(arguments.device) for _ in range(2))
    if arguments.training:
        finish(arguments, _train(model.train(), source, target, arguments))
    else:
        model.eval()
        with torch.inference_mode():
            finish(arguments, _decode(model, source, arguments))


if __name__ == "__main__":
    main()
