#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT four times: in memory, through a hitrain store, through a store that crashes on the way, and from
a step that the store kept, after training went wrong. A second store follows one of these runs, and receives that step.

Run it with `make demo`; everything it makes is below build/demo/. It exits with 0 when all of its checks passed.
"""
import argparse
import contextlib
import csv
import errno
import filecmp
import os
import pathlib
import signal
import sys
import time
import traceback
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

# Before PyTorch is loaded: its threads sleep while they wait, so that the store's threads (and anything else on this
# machine) get the processors. Spinning ones make training ten times slower where others want to run.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
try:
    import torch
except ImportError:
    sys.exit('demo: PyTorch is missing for this Python; `make deps` installs it for /usr/bin/python3')

import demo_gpt
from demo_store import Store, StoreError
from hitrain import AdamW

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(TOP / 'bench'))
from plot import Bar, Curve, Mark, Point, losses_and_bars, smooth, text_plot  # noqa: E402

PROGRAMS = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')
OUT = TOP / 'build/demo'

SEED = 1
STEPS = 200
KILL_AT = 120        # finished steps when the daemon is killed
DURABLE_EVERY = 50   # of (c): parameters and state are written in each 50th step, and gradients in the others
BF16_STEPS = 40
READABLE = 24        # logged steps of (c) that stay readable, for a second store that follows
FOLLOWED = 20        # it follows after so many steps
KEPT_AT = 175        # finished steps of (b) when its store keeps the step
WRONG_STEPS, WRONG_RATE = 5, 500.0  # of (d): steps with so many times the learning rate
PEAK_RATE = 1e-3
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
STORE_SIZE = '2G'
TOKENS = demo_gpt.BATCH * demo_gpt.CONTEXT

LOSS_RELATIVE_MAX = 1e-4
BYTES_RELATIVE_MAX = 0.01
SWAPPED_BYTES = 32.0  # gradient, parameter and two moments in f32, each written and read
GFLOPS_MIN = 5.0      # of one matrix product; the slow BLAS reaches about 1


class Run(NamedTuple):
    """The results of one run of the training loop."""
    losses: List[float]     # of each step
    seconds: float
    share: float            # of the time, spent in the optimizer
    moved: Dict[str, int]   # growth of the mount's counters


class Checks:
    def __init__(self) -> None:
        self.passed = self.failed = 0

    def __call__(self, good: bool, text: str) -> None:
        print(f'  {"PASS" if good else "FAIL"}  {text}', flush=True)
        self.passed += good
        self.failed += not good


def crossed(moved: Dict[str, int]) -> int:
    """All bytes that were read and written through the mount."""
    return sum(v for k, v in moved.items() if k.startswith('mount_') and k.endswith(('_read_bytes', '_written_bytes')))


def grown(now: Dict[str, int], before: Dict[str, int]) -> Dict[str, int]:
    return {k: v - before.get(k, 0) for k, v in now.items()}


# ---------------------------------------------------------------- training

def train(label: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: demo_gpt.Text, first: int,
          last: int, counters: Callable[[], Dict[str, int]], faster: float = 1.0) -> Run:
    """Steps first + 1 to last. Data and learning rate follow from the number of the step, nothing else."""
    losses: List[float] = []
    before, begin, in_store, line_at = counters(), time.monotonic(), 0.0, time.monotonic()
    for done in range(first, last):
        for group in optimizer.param_groups:
            group['lr'] = faster * demo_gpt.learning_rate(done, STEPS, PEAK_RATE)
        loss = model(*text.batch(done))
        loss.backward()
        entered = time.monotonic()
        optimizer.step()
        in_store += time.monotonic() - entered
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (done + 1) % 10 == 0:
            now = time.monotonic()
            rate = TOKENS * (10 if len(losses) >= 10 else len(losses)) / (now - line_at)
            share, moved = in_store / (now - begin), crossed(grown(counters(), before))
            where = f'mount {moved / 1e6:8.1f} MB   in the store {share:4.0%}' if moved else f'in AdamW {share:4.0%}'
            print(f'  {label}  step {done + 1:3d}/{last}   loss {losses[-1]:.4f}   {rate:6.0f} tokens/s   {where}',
                  flush=True)
            line_at = now
    seconds = time.monotonic() - begin
    return Run(losses, seconds, in_store / seconds, grown(counters(), before))


def joined(a: Run, b: Run) -> Run:
    """Two parts of one run."""
    seconds = a.seconds + b.seconds
    moved = {k: v + a.moved.get(k, 0) for k, v in b.moved.items()}
    return Run(a.losses + b.losses, seconds, (a.share * a.seconds + b.share * b.seconds) / seconds, moved)


def in_memory(text: demo_gpt.Text) -> Tuple[Run, float]:
    print(f'\n(a) torch.optim.AdamW, all in memory: {STEPS} steps', flush=True)
    model = demo_gpt.GPT(SEED)
    groups = [{**g, 'params': [p for _, p in g['params']]} for g in demo_gpt.param_groups(model, WEIGHT_DECAY)]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=BETAS)
    run = train('(a)', model, optimizer, text, 0, STEPS, dict)
    return run, text.loss(model)


def through_store(store: Store, name: str, seed: int, kind: type = AdamW, **options: object) -> tuple:
    model = demo_gpt.GPT(seed)
    groups = demo_gpt.param_groups(model, WEIGHT_DECAY)
    return model, kind(groups, store.mountpoint / name, lr=PEAK_RATE, betas=BETAS, **options)


class Crash:
    """Makes an optimizer whose daemon is killed in the middle of a step: half of its gradients are closed."""

    def __init__(self, store: Store) -> None:
        self.store, self.text = store, ''

    def __call__(self, groups: list, root: os.PathLike, **options: object) -> AdamW:
        crash, total = self, sum(len(g['params']) for g in groups)

        class Crashing(AdamW):
            sent = 0

            def send_gradient(self, parameter: torch.Tensor) -> None:
                super().send_gradient(parameter)
                self.sent += 1
                if self.sent == KILL_AT * total + total // 2:
                    crash.text = f'{total // 2} of {total} gradients of step {KILL_AT + 1} were closed'
                    crash.store.kill()

        return Crashing(groups, root, **options)


def interrupted(store: Store, second: Store, text: demo_gpt.Text, checks: Checks) -> Tuple[Run, float, torch.nn.Module]:
    print(f'\n(c) the store again, with redo=on and durable_every={DURABLE_EVERY}, its daemon killed during step {KILL_AT + 1}',
          flush=True)
    crash = Crash(store)
    logged = {'durable_every': DURABLE_EVERY, 'redo': True, 'redo_keep': READABLE}
    root, follower = store.mountpoint / 'model-c', second.mountpoint / 'model-c'
    model, optimizer = through_store(store, 'model-c', SEED, kind=crash, **logged)
    losses: List[float] = []
    try:
        with optimizer:
            losses += train('(c)', model, optimizer, text, 0, 1, store.counters).losses
            optimizer.snapshot('base')
            store.send(root, 'base', follower)
            for first in range(1, KILL_AT, FOLLOWED):
                last = min(first + FOLLOWED, KILL_AT)
                losses += train('(c)', model, optimizer, text, first, last, store.counters).losses
                store.follow(root, follower, 'base' if first == 1 else None)
            train('(c)', model, optimizer, text, KILL_AT, STEPS, store.counters)
        raise RuntimeError('the trainer did not notice that the daemon was killed')
    except OSError as e:
        if e.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO) or not crash.text:
            raise
        print(f'      SIGKILL: {crash.text}\n      the trainer sees: {e.strerror}', flush=True)
    begin = time.monotonic()
    store.mount()
    step = int(os.getxattr(store.mountpoint / 'model-c', 'user.hitrain.step'))
    print(f'      mounted again after {time.monotonic() - begin:.1f} s; the store holds step {step}', flush=True)
    checks(step == KILL_AT, f'after the crash the store holds the last finished step: {step}')
    # Another seed: only the store's values make the new model right.
    model, optimizer = through_store(store, 'model-c', SEED + 1, resume=True, **logged)
    print(f'      the store has computed the steps after the last full one again after {time.monotonic() - begin:.1f} s',
          flush=True)
    with optimizer:
        run = train('(c)', model, optimizer, text, step, min(step + FOLLOWED, STEPS), store.counters)
        store.follow(root, follower)
        for first in range(step + FOLLOWED, STEPS, FOLLOWED):
            run = joined(run, train('(c)', model, optimizer, text, first, min(first + FOLLOWED, STEPS), store.counters))
            store.follow(root, follower)
    print(f'      a copy in a second store has followed to step {STEPS}', flush=True)
    return run._replace(losses=losses[:step] + run.losses), text.loss(model), model


def go_on(label: str, store: Store, name: str, text: demo_gpt.Text) -> Run:
    """From the kept step to the end. The seed is another one: only the store's values make the new model right."""
    model, optimizer = through_store(store, name, SEED + 1, resume=True)
    with optimizer:
        return train(label, model, optimizer, text, KEPT_AT, STEPS, store.counters)


def gone_wrong(store: Store, text: demo_gpt.Text, checks: Checks, good: float) -> List[float]:
    """good: the loss of (b) after the kept step. Returns the losses of the steps that are taken back."""
    print(f'\n(d) a clone of step {KEPT_AT} of (b), with {WRONG_RATE:.0f} times the learning rate for {WRONG_STEPS} steps',
          flush=True)
    root = store.mountpoint / 'model-d'
    store.control('clone', store.mountpoint / 'model-b', str(KEPT_AT), root)
    model, optimizer = through_store(store, 'model-d', SEED + 1, resume=True)
    with optimizer:
        optimizer.snapshot('good')
        wrong = train('(d)', model, optimizer, text, KEPT_AT, KEPT_AT + WRONG_STEPS, store.counters, WRONG_RATE)
    print(f'      the loss is {wrong.losses[-1]:.4f}; hitrainctl rollback goes back to step {KEPT_AT}', flush=True)
    begin = time.monotonic()
    store.control('rollback', root, 'good')
    seconds, step = time.monotonic() - begin, int(os.getxattr(root, 'user.hitrain.step'))
    print(f'      the model is back at step {step} after {seconds:.2f} s', flush=True)
    checks(wrong.losses[-1] > 1.2 * good and step == KEPT_AT,
           f'(d) went wrong, from loss {good:.2f} to {wrong.losses[-1]:.2f}, and is back at step {step}')
    go_on('(d)', store, 'model-d', text)
    return wrong.losses


def sent(store: Store, second: Store, text: demo_gpt.Text) -> None:
    print(f'\n(e) a second store receives step {KEPT_AT} of (b), and trains on', flush=True)
    store.send(store.mountpoint / 'model-b', str(KEPT_AT), second.mountpoint / 'model-e')
    go_on('(e)', second, 'model-e', text)


# ------------------------------------------------------------------ figures

def per_parameter(run: Run, steps: int, parameters: int) -> float:
    return crossed(run.moved) / (steps * parameters)


def check_bytes(checks: Checks, what: str, run: Run, steps: int, parameters: int, wanted: float) -> float:
    measured = per_parameter(run, steps, parameters)
    parts = {k[len('mount_'):-len('_bytes')].replace('_', ' '): v for k, v in run.moved.items()
             if k.startswith('mount_') and k.endswith(('_read_bytes', '_written_bytes')) and v}
    detail = ', '.join(f'{k} {v / (steps * parameters):.3f}' for k, v in parts.items())
    checks(abs(measured - wanted) <= wanted * BYTES_RELATIVE_MAX,
           f'{what}: {measured:.3f} bytes per parameter and step crossed the mount ({detail})')
    return measured


def same_files(*roots: pathlib.Path) -> List[str]:
    """Names of the parameters whose files or moments differ between two roots."""
    names = sorted(os.listdir(roots[0]))
    pairs = [(n, n) for n in names]
    pairs += [(n, f'.hitrain/state/{n}/{moment}') for n in names for moment in ('exp_avg', 'exp_avg_sq')]
    filecmp.clear_cache()
    return sorted({n for n, path in pairs if not filecmp.cmp(roots[0] / path, roots[1] / path, shallow=False)})


def blas_gflops() -> float:
    a = torch.ones(512, 512)
    best = float('inf')
    for _ in range(4):
        begin = time.monotonic()
        torch.mm(a, a)
        best = min(best, time.monotonic() - begin)
    return 2 * 512 ** 3 / best / 1e9


def plot(runs: Dict[str, List[float]], measured: Dict[str, float]) -> str:
    """Writes the SVG and returns the text plot."""
    def points(key: str, first: int = 0) -> List[Point]:
        steps = [(i + 1.0, y) for i, y in enumerate(runs[key])]
        return smooth(steps, 5)[first:]

    wrong = [(i + 1.0, y) for i, y in enumerate(runs['d'])][KEPT_AT:]
    curves = [Curve('(a) torch.optim.AdamW in memory', '#f2b134', points('a'), 7, letter='a'),
              Curve('(b) AdamW in the store', '#1f5fa8', points('b'), 2.6, letter='b'),
              Curve('(c) daemon killed, mounted again, resumed', '#b00020', points('c', KILL_AT), 4.5, '2 9', 'c'),
              Curve('(d) trained with a wrong rate, rolled back', '#7a3fa0', points('b')[KEPT_AT - 1:KEPT_AT] + wrong, 2.6, letter='d'),
              Curve('bf16 files and gradients', '#2d8a4e', points('bf16'), 1.8, '6 3', 'h')]
    bars = [Bar('state swapping', SWAPPED_BYTES, '#b9b9b9', 'by its definition'),
            Bar('hitrain, f32', measured['f32'], '#1f5fa8', 'measured'),
            Bar('hitrain, bf16', measured['bf16'], '#2d8a4e', 'measured')]
    titles = 'One model, trained four times (mean of 5 steps)', 'Bytes per parameter and step'
    mark = Mark(KILL_AT, f'daemon killed in step {KILL_AT + 1},\nresumed from step {KILL_AT}')
    (OUT / 'loss.svg').write_text(losses_and_bars(curves, mark, bars, titles))
    return text_plot(curves[:3])


def save_losses(runs: Dict[str, List[float]]) -> None:
    with open(OUT / 'loss.csv', 'w', newline='') as f:
        out = csv.writer(f)
        out.writerow(['step', *runs])
        for i in range(STEPS):
            out.writerow([i + 1] + [repr(losses[i]) if i < len(losses) else '' for losses in runs.values()])


# --------------------------------------------------------------------- main

def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--dram', default='128M', metavar='SIZE', help='of the mount: less than the state takes is enough')
    p.add_argument('--async-step', action='store_true',
                   help='the store closes the steps of (b) while the next forward pass runs')
    return p.parse_args()


def demo(store: Store, checks: Checks, dram: str, async_step: bool) -> None:
    text = demo_gpt.Text(SEED)
    parameters = sum(p.numel() for p in demo_gpt.GPT(SEED).parameters())
    print(f'A GPT of {parameters:,} parameters on {len(text.train) + len(text.held_out):,} bytes of '
          f'{demo_gpt.TEXTS}; batches of {demo_gpt.BATCH} x {demo_gpt.CONTEXT} bytes; PyTorch {torch.__version__}, '
          f'{torch.get_num_threads()} threads.')
    speed = blas_gflops()
    if speed < GFLOPS_MIN:
        print(f'WARNING: this PyTorch multiplies matrices at {speed:.1f} GFLOP/s: its BLAS is a slow one, and what '
              f'follows takes many times longer. `make deps` selects OpenBLAS (libopenblas0-openmp).', flush=True)

    a, loss_a = in_memory(text)

    print(f'\n{store.format().strip()}')
    store.mount()
    how = ', asynchronously' if async_step else ''
    print(f'\n(b) AdamW inside the store, each step committed{how}: {STEPS} steps', flush=True)
    model_b, optimizer = through_store(store, 'model-b', SEED, async_step=async_step)
    with optimizer:
        b = train('(b)', model_b, optimizer, text, 0, KEPT_AT, store.counters)
        optimizer.snapshot()
        b = joined(b, train('(b)', model_b, optimizer, text, KEPT_AT, STEPS, store.counters))
        loss_b = text.loss(model_b)
        optimizer.commit()
        held = optimizer.committed_step

    second = Store(PROGRAMS, OUT / 'second', STORE_SIZE, dram)
    with contextlib.closing(second):
        second.format()
        second.mount()
        c, loss_c, model_c = interrupted(store, second, text, checks)
        differing_f = same_files(store.mountpoint / 'model-c', second.mountpoint / 'model-c')
        wrong = gone_wrong(store, text, checks, b.losses[KEPT_AT])
        sent(store, second, text)
        differing_e = same_files(store.mountpoint / 'model-b', second.mountpoint / 'model-e')

    print(f'\n(b, bf16) files and gradients of bf16, compute in f32: the first {BF16_STEPS} steps', flush=True)
    model, optimizer = through_store(store, 'model-bf16', SEED, param_dtype=torch.bfloat16)
    with optimizer:
        bf16 = train('bf16', model, optimizer, text, 0, BF16_STEPS, store.counters)
    differing, differing_d = (same_files(store.mountpoint / 'model-b', store.mountpoint / name)
                              for name in ('model-c', 'model-d'))
    store.unmount()
    fsck = store.check()

    print('\nResults')
    print(f'  final loss on held-out text:  (a) {loss_a:.7f}   (b) {loss_b:.7f}   (c) {loss_c:.7f}')
    print(f'  training: (a) {TOKENS * STEPS / a.seconds:.0f} tokens/s, {a.share:.0%} of it in AdamW;   '
          f'(b) {TOKENS * STEPS / b.seconds:.0f} tokens/s, {b.share:.0%} of it in the store, each step durable')
    difference = max(abs(x - y) / x for x, y in zip(a.losses, b.losses))
    print(f'  largest difference of (b) from (a) in the training loss of any step: {difference:.1e} of it')
    print(f'  bf16 after {BF16_STEPS} steps: loss {bf16.losses[-1]:.4f}; (a) had {a.losses[BF16_STEPS - 1]:.4f}')
    checks(held == STEPS, f'(b) ends with step {held} committed')
    relative = abs(loss_b - loss_a) / loss_a
    checks(relative <= LOSS_RELATIVE_MAX, f'final loss of (b) equals that of (a): they differ by {relative:.1e} of it '
           f'(at most {LOSS_RELATIVE_MAX:.0e})')
    equal = all(torch.equal(p, q) for p, q in zip(model_b.parameters(), model_c.parameters()))
    checks(equal and not differing, f'(c) ends bit-identical to (b): parameters in the trainer, and files and moments '
           f'in the store' + (f'; differing: {", ".join(differing)}' if differing else ''))
    for run, names, what in (('(d)', differing_d, 'to (b) after its rollback'), ('(e)', differing_e, 'to (b) in another store'),
                             ('the copy that follows (c)', differing_f, 'to it in a second store')):
        checks(not names, f'{run} ends bit-identical {what}: files and moments'
               + (f'; differing: {", ".join(names)}' if names else ''))
    measured = {'f32': check_bytes(checks, 'f32', b, STEPS, parameters, 8.0),
                'bf16': check_bytes(checks, 'bf16', bf16, BF16_STEPS, parameters, 4.0)}
    print(f'        state swapping would move {SWAPPED_BYTES:.0f}: gradient, parameter and two moments of 4 bytes, '
          f'written and read')
    checks(fsck.returncode == 0, f'hitrain-fsck after unmounting: exit {fsck.returncode}'
           + ('' if fsck.returncode == 0 else f'\n{fsck.stdout}{fsck.stderr}'))

    losses = {'a': a.losses, 'b': b.losses, 'c': c.losses, 'd': b.losses[:KEPT_AT] + wrong, 'bf16': bf16.losses}
    save_losses(losses)
    print(f'\nTraining loss, mean of 5 steps\n\n{plot(losses, measured)}\n')
    print(f'Plot: {OUT / "loss.svg"}   figures: {OUT / "loss.csv"}   store: {store.image}')


def main() -> int:
    args = parse_args()
    missing = [p for p in ('hitrain', 'mkfs.hitrain', 'hitrain-fsck', 'hitrainctl') if not (PROGRAMS / p).exists()]
    if missing:
        sys.exit(f'demo: {", ".join(missing)} not in {PROGRAMS}; run `make demo`')
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    OUT.mkdir(parents=True, exist_ok=True)
    store, checks, begin = Store(PROGRAMS, OUT, STORE_SIZE, args.dram), Checks(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status: Optional[int] = None
    try:
        demo(store, checks, args.dram, args.async_step)
    except KeyboardInterrupt:
        status = 130
    except Exception as e:
        if not isinstance(e, StoreError):
            traceback.print_exc()
        checks(False, f'the demo ends: {e}')
    finally:
        store.close()
    if status is not None:
        print('\ninterrupted; unmounted')
        return status
    print(f'{time.monotonic() - begin:.0f} s')
    print(f'{checks.passed} passed, {checks.failed} failed', flush=True)
    return 1 if checks.failed else 0


if __name__ == '__main__':
    sys.exit(main())
