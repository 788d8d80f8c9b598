#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT that does not fit into its memory: with hitrain.offload(), in a memory cgroup where it is killed without.

Three runs of the same steps: without a limit; in the cgroup, where the kernel kills it; and offloaded in the cgroup, with the store's
daemon in there, too. The first and the third end with the same bits. Parameters and gradients are in memory in the first two, and the
optimizer's state is in the store in all three.
"""
import errno
import hashlib
import os
import pathlib
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Dict, Optional

os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')  # the store's threads want the processors, too
import torch
from torch import nn
from torch.nn import functional as F

import demo_gpt
import hitrain
from demo_store import Store

TOP = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')
STEPS, SECONDS_MAX = 3, 1200
demo_gpt.WIDTH, demo_gpt.HEADS, demo_gpt.LAYERS, demo_gpt.BATCH = 640, 10, 12, 1
MIB = 1 << 20
KEEP, ACTIVATIONS = 48 * MIB, 16 * MIB
DRAM, STAGING = '32M', '32M'
EXTRA = 250 * MIB  # of the cgroup, beyond what Python and PyTorch take


class Model(nn.Module):
    """The GPT of the demo, larger, with the first values that its modules give themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(demo_gpt.VOCABULARY, demo_gpt.WIDTH)
        self.position = nn.Embedding(demo_gpt.CONTEXT, demo_gpt.WIDTH)
        self.blocks = nn.ModuleList(demo_gpt.Block() for _ in range(demo_gpt.LAYERS))
        self.norm, self.out = nn.LayerNorm(demo_gpt.WIDTH), nn.Linear(demo_gpt.WIDTH, demo_gpt.VOCABULARY, bias=False)
        self.register_buffer('mask', torch.full((demo_gpt.CONTEXT,) * 2, float('-inf')).triu(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())


# -- a run, in a process of its own --

def run(kind: str, root: str) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    if kind == 'nothing':  # what any trainer takes
        demo_gpt.LAYERS = 1
        Model()(*demo_gpt.Text(1).batch(0)).backward()
        print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    if kind == 'offloaded':
        with hitrain.init_empty():
            model = Model()
        more = {'activations': ACTIVATIONS} if hasattr(torch, 'compiler') else {}  # with PyTorch 2
        optimizer = hitrain.offload(model, root, lr=1e-3, keep=KEEP, **more)
    else:
        model = Model()
        optimizer = hitrain.AdamW(model.named_parameters(), root, lr=1e-3)
    text, begin = demo_gpt.Text(1), time.monotonic()
    for step in range(STEPS):
        loss = model(*text.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f'loss {loss.item()!r}', flush=True)
    print('seconds', (time.monotonic() - begin) / STEPS)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    print('digest', digest.hexdigest())
    if kind == 'offloaded':
        for name, value in optimizer.figures().items():
            print(name, value)
    optimizer.close()


# -- around the runs --

class Group:
    """A memory cgroup. OSError: none can be made here."""

    def __init__(self, name: str, limit: int) -> None:
        self.v1 = os.path.isdir('/sys/fs/cgroup/memory')
        self.folder = pathlib.Path('/sys/fs/cgroup', 'memory' if self.v1 else '', f'hitrain-{name}-{os.getpid()}')
        if not self.v1:
            pathlib.Path('/sys/fs/cgroup/cgroup.subtree_control').write_text('+memory')
        self.folder.mkdir()
        (self.folder / ('memory.limit_in_bytes' if self.v1 else 'memory.max')).write_text(str(limit))
        swap = self.folder / ('memory.memsw.limit_in_bytes' if self.v1 else 'memory.swap.max')
        if swap.exists():
            swap.write_text(str(limit) if self.v1 else '0')

    def peak(self) -> Optional[int]:
        path = self.folder / ('memory.max_usage_in_bytes' if self.v1 else 'memory.peak')
        return int(path.read_text()) if path.exists() else None

    def enter(self) -> None:
        (self.folder / 'cgroup.procs').write_text(str(os.getpid()))

    def close(self) -> None:
        """Processes that have ended stay in it for a moment."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError as e:
                if e.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)


def said_by(kind: str, root: pathlib.Path, group: Optional[Group] = None) -> Dict[str, str]:
    """What a run prints, by its first word; 'status' is how it ended."""
    done = subprocess.run([sys.executable, __file__, kind, str(root)], stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX,
                          preexec_fn=group.enter if group else None)
    said = dict(line.split(' ', 1) for line in done.stdout.splitlines() if ' ' in line)
    said['losses'] = ' '.join(line.split()[1] for line in done.stdout.splitlines() if line.startswith('loss '))
    return {**said, 'status': str(done.returncode)}


def in_group(folder: pathlib.Path, group: Group) -> pathlib.Path:
    """Programs that start a daemon in the group."""
    folder.mkdir()
    for name in ('hitrain', 'mkfs.hitrain', 'hitrain-fsck'):
        real = PROGRAMS.resolve() / name
        enter = f'echo $$ >{shlex.quote(str(group.folder / "cgroup.procs"))} && ' if name == 'hitrain' else ''
        (folder / name).write_text(f'#!/bin/sh\n{enter}exec {shlex.quote(str(real))} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def mib(text: object) -> str:
    return f'{int(str(text)) / MIB:.0f} MiB'


def stored(folder: pathlib.Path, programs: pathlib.Path, kind: str, group: Optional[Group]) -> Dict[str, str]:
    folder.mkdir()
    store = Store(programs, folder, '2G', f'{DRAM},staging={STAGING}')
    try:
        store.format()
        store.mount()
        said = said_by(kind, store.mountpoint / 'model', group)
        store.unmount()
        return {**said, 'fsck': str(store.check().returncode)}
    finally:
        store.close()


def demo(folder: pathlib.Path) -> bool:
    with torch.no_grad(), hitrain.init_empty():
        parameters = sum(p.numel() for p in Model().parameters())
    limit = int(said_by('nothing', folder)['peak']) + EXTRA
    try:
        small, whole = Group('killed', limit), Group('fits', limit)
    except OSError as e:
        print(f'skipped: no memory cgroup can be made here ({e})')
        return True
    try:
        print(f'A GPT of {parameters:,} parameters, {STEPS} steps; PyTorch {torch.__version__}. Parameters, gradients and moments take '
              f'{mib(16 * parameters)}.\nThe cgroup has {mib(limit)}: {mib(EXTRA)} beside Python and PyTorch.', flush=True)
        free = stored(folder / 'free', PROGRAMS, 'plain', None)
        print(f'in memory, without a limit:        losses {free["losses"]}, {float(free["seconds"]):.1f} s a step', flush=True)
        killed = stored(folder / 'killed', PROGRAMS, 'plain', small)
        print(f'in memory, in the cgroup:          ends with status {killed["status"]}', flush=True)
        fits = stored(folder / 'fits', in_group(folder / 'programs', whole), 'offloaded', whole)
        print(f'offloaded, in the cgroup with its daemon: losses {fits["losses"]}, {float(fits.get("seconds", "nan")):.1f} s a step; '
              f'{mib(whole.peak() or 0)} at most', flush=True)
        print(f'  of {mib(4 * parameters)} of parameters at most {mib(fits.get("held_bytes_max", 0))} in memory; {mib(fits.get("loaded_bytes", 0))} '
              f'loaded, and {float(fits.get("waited_seconds", "nan")):.1f} s waited for them')
        results = {
            'without offload the kernel kills it (SIGKILL)': killed['status'] == '-9',
            'offloaded it ends with the same losses and parameters, bit for bit':
                fits['status'] == '0' and (fits['losses'], fits['digest']) == (free['losses'], free['digest']),
            'hitrain-fsck finds nothing': fits['fsck'] == '0'}
        for text, good in results.items():
            print(f'{"ok  " if good else "FAIL"} {text}', flush=True)
        return all(results.values())
    finally:
        small.close()
        whole.close()


def main() -> int:
    if len(sys.argv) == 3:
        run(*sys.argv[1:])
        return 0
    out = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
    with tempfile.TemporaryDirectory(dir=out, prefix='fit-') as folder:
        return 0 if demo(pathlib.Path(folder)) else 1


if __name__ == '__main__':
    sys.exit(main())
