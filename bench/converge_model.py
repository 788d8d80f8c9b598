# SPDX-License-Identifier: Apache-2.0
"""The second model of bench-converge: rotary positions, grouped-query attention, SwiGLU, RMSNorm, and a head tied to the embedding."""
import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, GROUPS, LAYERS = 72, 6, 2, 2
HIDDEN = 176


def rotated(x):
    """Halves of each head turned by angles that grow with the position. x: [batch, heads, length, size]"""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = nn.Linear(WIDTH, GROUPS * size, bias=False), nn.Linear(WIDTH, GROUPS * size, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Grouped(nn.Module):
    def __init__(self, seed, vocabulary):
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        random = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                p.data.normal_(0.0, 0.02 / math.sqrt(2 * LAYERS) if name.endswith(('out.weight', 'down.weight')) else 0.02, generator=random)

    def forward(self, tokens, targets):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), targets.flatten())
