#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`gpu.py TARGET COMMAND...` runs the command if PyTorch sees a GPU. Else it says that the target was skipped, and why. bench-gpu needs no GPU."""
import os
import sys


def missing(target):
    """Why this Python cannot run the target; '' if it can."""
    try:
        import torch
    except ImportError as e:
        return f'{sys.executable} has no PyTorch ({e})'
    if not torch.cuda.is_available() and target != 'bench-gpu':
        return f'PyTorch {torch.__version__} of {sys.executable} sees no GPU'
    if not hasattr(torch, 'compiler'):
        return f'device= needs PyTorch 2.1 or newer, and {sys.executable} has {torch.__version__}'
    return ''


def main():
    target, *command = sys.argv[1:]
    why = missing(target)
    if why:
        print(f'{target}: skipped, nothing was run: {why}. GPU_PYTHON= names another Python')
        return
    os.execvp(command[0], command)


if __name__ == '__main__':
    main()
