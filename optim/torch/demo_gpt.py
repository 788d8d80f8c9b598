# SPDX-License-Identifier: Apache-2.0
"""The model and the text of the demo: a small decoder-only transformer over bytes.

Everything here is decided by the seed and the number of the step, so that a run can be taken up at any step: there is
no state beside the parameters and the optimizer's.
"""
import math
import pathlib

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
CONTEXT = 128
BATCH = 8
WIDTH = 192
HEADS = 6
LAYERS = 5

TEXTS = pathlib.Path('/usr/share/common-licenses')
HELD_OUT = 0.1  # of the text, never trained on
EVALUATION_BATCHES = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2)
                   for t in self.attend(self.norm1(x)).split(WIDTH, dim=2))
        weights = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask
        y = weights.softmax(dim=-1) @ v
        x = x + self.attended(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer('mask', torch.full((CONTEXT, CONTEXT), -math.inf).triu(1), persistent=False)
        random = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(('attended.weight', 'narrow.weight')) else 0.02
                p.data.normal_(0.0, scale, generator=random)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())


def param_groups(model: nn.Module, weight_decay: float) -> list:
    """Two groups of (name, parameter): matrices decay, norms do not."""
    named = list(model.named_parameters())
    return [{'params': [(n, p) for n, p in named if p.dim() >= 2], 'weight_decay': weight_decay},
            {'params': [(n, p) for n, p in named if p.dim() < 2], 'weight_decay': 0.0}]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The rate of the step that follows `step` finished ones: a linear rise, then half a cosine down to a tenth."""
    rise = max(1, steps // 10)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise)))


class Text:
    """The licences that every Debian system holds, as bytes."""

    def __init__(self, seed: int) -> None:
        files = sorted(f for f in TEXTS.iterdir() if f.is_file() and not f.is_symlink())
        if not files:
            raise FileNotFoundError(f'no text to train on in {TEXTS}')
        data = b'\n'.join(f.read_bytes() for f in files)
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        border = int(len(tokens) * (1 - HELD_OUT))
        self.train, self.held_out = tokens[:border], tokens[border:]
        self.seed = seed

    def _batch(self, tokens: torch.Tensor, number: int) -> tuple:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=random).tolist()
        rows = torch.stack([tokens[s:s + CONTEXT + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, step: int) -> tuple:
        """The training data of the step after `step` finished ones."""
        return self._batch(self.train, step)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Mean loss on a fixed choice of the text that was held out."""
        losses = [model(*self._batch(self.held_out, i)).item() for i in range(EVALUATION_BATCHES)]
        return sum(losses) / len(losses)
