# SPDX-License-Identifier: Apache-2.0
"""The package says that it is typed: mypy reads it with the newest PyTorch, as strictly as pyproject.toml says, and finds nothing."""
import subprocess
import sys

from page import TOP


def test_mypy_finds_nothing(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'mypy', '--cache-dir', str(tmp_path), '-p', 'hitrain'],
                          cwd=TOP / 'optim/torch', stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
    assert done.returncode == 0, done.stdout
