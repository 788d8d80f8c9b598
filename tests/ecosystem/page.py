# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/frameworks, run as they stand, on a mounted store. Import it before torch."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / 'tests/optim'))
from trainer import shared_store  # noqa: E402, F401  it makes the client importable

import pytest  # noqa: E402

LINES_MAX = 40
SECONDS_MAX = 800

# torch.optim.AdamW in place of the store's: the script prints and saves what it should. Threads of gloo may abort the process
# when Python is gone, so it ends before that.
PLAIN = """
import atexit, os, sys
import hitrain, torch
atexit.register(lambda: (sys.stdout.flush(), os._exit(0)))

class Plain(torch.optim.AdamW):
    def __init__(self, params, root, *, resume=False, full_state_dict=False, shard=None, **options):
        super().__init__(list(params), **options)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        pass

    @property
    def committed_step(self):
        return int(max(s['step'] for s in self.state.values()))

hitrain.AdamW = Plain
"""
# The process ends in the middle, right after a step.
KILLED = """
import hitrain, os, signal

class Killed(hitrain.AdamW):
    calls = 0

    def step(self, closure=None):
        loss = super().step(closure)
        Killed.calls += 1
        if Killed.calls == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

hitrain.AdamW = Killed
"""


class Page:
    """The script of a page, with folders for its runs."""

    def __init__(self, name, mountpoint, folder, number, of):
        text = (TOP / f'docs/frameworks/{name}.md').read_text()
        scripts = re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
        assert len(scripts) == of and all(s.count('\n') <= LINES_MAX and '/mnt/hitrain/' in s for s in scripts)
        self.script, self.mountpoint, self.folder = scripts[number], mountpoint, folder

    @classmethod
    def of_script(cls, script, mountpoint, folder):
        """One that no page has."""
        self = cls.__new__(cls)
        self.script, self.mountpoint, self.folder = script, mountpoint, folder
        return self

    def root(self, run):
        return self.mountpoint / run / re.search(r"'/mnt/hitrain/(\w+)'", self.script).group(1)

    def run(self, run, before='', processes=0, ends=0):
        """Runs the script in a folder of this run, and returns its output. before: code that runs first.
        processes: how many torchrun starts, if any. Threads of PyTorch sometimes abort a process that ends, and code in
        pure Python cannot: then the run is repeated once."""
        status, said = self.attempt(run, before, processes)
        if processes and 'Signal 6 (SIGABRT)' in said:
            for place in (self.folder / run, self.mountpoint / run):
                shutil.rmtree(place)
            status, said = self.attempt(run, before, processes)
        assert status == ends, f'status {status}\n{said[-6000:]}'
        return said

    def attempt(self, run, before, processes):
        folder = self.folder / run
        folder.mkdir(exist_ok=True)
        (self.mountpoint / run).mkdir(exist_ok=True)
        (folder / 'sitecustomize.py').write_text(before)
        (folder / 'script.py').write_text(self.script.replace('/mnt/hitrain/', f'{self.mountpoint}/{run}/'))
        env = {**os.environ, 'PYTHONPATH': f'{folder}:{TOP}/optim/torch', 'OMP_NUM_THREADS': '1', 'OMP_WAIT_POLICY': 'PASSIVE',
               'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false', 'PYTHONFAULTHANDLER': '1'}
        launcher = [] if not processes else ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={processes}']
        done = subprocess.run([sys.executable, *launcher, 'script.py'], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
        return done.returncode, done.stdout


def numbers(word, output):
    return [float(n) for n in re.findall(rf'^{word} (\S+)', output, re.M)]


@pytest.fixture
def page(request, shared_store, tmp_path):  # noqa: F811
    """page(name): the page; its models are in a folder of this test. number: which of several scripts."""
    folder = shared_store.mountpoint / request.node.name
    folder.mkdir()
    return lambda name, number=0, of=1: Page(name, folder, tmp_path, number, of)
