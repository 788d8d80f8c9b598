#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`gpu.py TARGET COMMAND...` runs the command if PyTorch sees a GPU. Else it says that the target was skipped, and why."""
import os
import sys


def missing():
    """Why this Python cannot compute on a GPU; '' if it can."""
    try:
        import torch
    except ImportError as e:
        return f'{sys.executable} has no PyTorch ({e})'
    if not torch.cuda.is_available():
        return f'PyTorch {torch.__version__} of {sys.executable} sees no GPU'
    if not hasattr(torch, 'compiler'):
        return f'device= needs PyTorch 2.1 or newer, and {sys.executable} has {torch.__version__}'
    return ''


def main():
    target, *command = sys.argv[1:]
    why = missing()
    if why:
        print(f'{target}: skipped, nothing was run: {why}. GPU_PYTHON= names another Python')
        return
    os.execvp(command[0], command)


if __name__ == '__main__':
    main()
