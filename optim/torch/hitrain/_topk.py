# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients with error feedback: send the largest elements, remember the others, and add them to the next
gradient.

Other elements are not lost but late: each waits in a residual until it is large enough to be sent. Without that memory
a compressor biases the descent; with it, the sum of the sent gradients stays close to the sum of the gradients. The
method is that of Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), with the choice of elements by
size as in Lin et al., Deep Gradient Compression (arXiv:1712.01887); Stich et al. (arXiv:1809.07599) show why it
converges.

encode() and its layout are those of include/hitrain/topk.h and need no PyTorch optimizer: any program can write them.
"""
import struct
from typing import Dict, Tuple

import torch

HEADER = struct.Struct('<8sIB3xQQ')  # magic, version, dtype of the values, elements of the parameter, entries
MAGIC, VERSION = b'HTtopk\r\n', 1
DTYPE_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def header(dtype: torch.dtype, elements: int, count: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, DTYPE_NUMBERS[dtype], elements, count)


class ErrorFeedback:
    """Chooses the elements of each gradient to send, and keeps the rest: one f32 residual per parameter, beside it.

    fraction   of the elements of each parameter that are sent; at least one is
    """

    def __init__(self, fraction: float) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f'the fraction of elements must be above 0 and at most 1, not {fraction}')
        self.fraction = fraction
        self._residual: Dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def choose(self, parameter: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype,
               scale: float = 1.0) -> Tuple[torch.Tensor, torch.Tensor]:
        """Indices (int32, increasing) and values (dtype) to send now, both on the CPU. The difference from rounding to
        dtype stays in the residual, too. scale: the gradient comes multiplied by it; residuals do not, so it may
        change."""
        flat = grad.detach().reshape(-1).float()
        count = max(1, int(flat.numel() * self.fraction))
        finite = torch.isfinite(flat)
        if not finite.all():  # the store must see it, and the residual must not: nothing is remembered
            at = (~finite).nonzero().view(-1)[:count]
            return _for_file(at, flat[at].to(dtype))
        residual = self._residual.get(parameter)
        if residual is None:
            residual = self._residual[parameter] = torch.zeros_like(flat)
        residual.add_(flat, alpha=1.0 / scale)
        at = torch.topk(residual.abs(), count, sorted=False).indices.sort().values
        values = (residual[at] * scale).to(dtype)
        residual[at] -= values.float() / scale
        return _for_file(at, values)

    def forget(self) -> None:
        """Drop all residuals, as after going back to an earlier step."""
        self._residual.clear()


def _for_file(at: torch.Tensor, values: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """As files have them. Indices have 32 bits without a sign: those from 2^31 up wrap to negative ones of the same bits."""
    at = torch.where(at >= 1 << 31, at - (1 << 32), at)
    return at.to(torch.int32).cpu().contiguous(), values.cpu().contiguous()
