# SPDX-License-Identifier: Apache-2.0
"""torch.compile and hooks: hooks run each time, outside the compiled code."""
from typing import Any, Callable, Dict, Union

import torch
from torch import nn


def not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile (2.1 and newer) calls the hook each time, and leaves it out of the compiled code."""
    compiler: Any = getattr(torch, 'compiler', None)
    return compiler.disable(hook) if hasattr(compiler, 'disable') else hook


def options_of(wanted: Union[bool, Dict[str, Any]]) -> Dict[str, Any]:
    """What torch.compile takes for a block. ValueError: this PyTorch cannot compile."""
    if not hasattr(torch, 'compiler'):
        raise ValueError(f'compile= needs PyTorch 2.1 or newer, and this is {torch.__version__}')
    return {'fullgraph': True, **(wanted if isinstance(wanted, dict) else {})}


class CompiledForward:
    """The forward of a module is compiled, and its hooks are not, until remove()."""

    def __init__(self, module: nn.Module, options: Dict[str, Any]) -> None:
        self._module, self._own = module, module.__dict__.get('forward')
        module.forward = torch.compile(module.forward, **options)

    def remove(self) -> None:
        if self._own is None:
            self._module.__dict__.pop('forward', None)
        else:
            self._module.forward = self._own
