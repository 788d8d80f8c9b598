#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A step of hitrain.Muon with everything resident, beside torch.optim.Muon on the same processors.

Run it with `make bench-muon`, as root. The matrices are those of transformer blocks: query, key and value, output, and two of the MLP. Gradients
are the same on both sides, which step in turn. The time of a step is that of step() alone; none is durable. Newton-Schulz is most of
it on both sides, with the same operations. The mount passes files through. A third row has the Gram form. PyTorch is that of `make check-ecosystem`. Medians; figures
in build/bench/muon.jsonl. A missed target is named.
"""
import argparse
import json
import statistics
import sys
import time

from common import BUILD, PROGRAMS, TOP, begin, machine, torch_with_muon

sys.path.insert(0, str(TOP / 'optim/torch'))

TARGET = 1.05
STEPS = 3  # in each run, after one that warms up
SHAPES = {'q': (1, 1), 'k': (1, 1), 'v': (1, 1), 'out': (1, 1), 'up': (4, 1), 'down': (1, 4)}


def matrices(torch, width, layers):
    random = torch.Generator().manual_seed(0)
    return {f'{layer}.{n}': torch.nn.Parameter(torch.randn(m * width, k * width, generator=random)) for layer in range(layers) for n, (m, k) in SHAPES.items()}


def timed(params, optimizer, grads):
    """Medians of seconds of step()."""
    taken = []
    for step in range(STEPS + 1):
        for p, g in zip(params.values(), grads):
            p.grad = g.roll(step)
        began = time.monotonic()
        optimizer.step()
        taken.append(time.monotonic() - began)
    return statistics.median(taken[1:])


def measure(torch, args, store):
    import hitrain
    sides = {'torch.optim.Muon': matrices(torch, args.width, args.layers)}
    optimizers = {'torch.optim.Muon': torch.optim.Muon(sides['torch.optim.Muon'].values(), lr=1e-3)}
    for form in ('plain', 'gram'):
        params = sides[form] = matrices(torch, args.width, args.layers)
        optimizers[form] = hitrain.Muon(params.items(), store.mountpoint / form, lr=1e-3, durable_every=1000000, ns_form=form)
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in sides['plain'].values()]
    rows = []
    try:
        for run in range(args.runs):
            for name in optimizers:
                rows.append({'run': run, 'side': name, 'seconds': timed(sides[name], optimizers[name], grads)})
                print(f'  run {run + 1}, {name}: {rows[-1]["seconds"]:.3f} s a step', flush=True)
        apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(sides['plain'].values(), sides['torch.optim.Muon'].values()))
    finally:
        for optimizer in list(optimizers.values())[1:]:
            optimizer.close()
    return rows, apart


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--width', type=int, default=768)
    parser.add_argument('--layers', type=int, default=1)
    args = parser.parse_args()
    torch = torch_with_muon()
    from demo_store import Store
    size = sum(m * k for m, k in SHAPES.values()) * args.width ** 2 * args.layers
    store = Store(PROGRAMS, begin('muon'), f'{(size * 80 >> 20) + 1024}M', f'{(size * 60 >> 20) + 512}M,passthrough={(size * 40 >> 20) + 64}M')
    try:
        store.format()
        store.mount()
        rows, apart = measure(torch, args, store)
        store.unmount()
    finally:
        store.close()
    print(f'{machine()}, PyTorch {torch.__version__}, {size} parameters')
    median = {name: statistics.median(r['seconds'] for r in rows if r['side'] == name) for name in ('torch.optim.Muon', 'plain', 'gram')}
    for name, seconds in median.items():
        print(f'  {name:20}{seconds:8.3f} s a step, {seconds / median["torch.optim.Muon"]:.3f} of torch.optim.Muon')
    print(f'  parameters differ by {apart:.1e} at most, of their norm')
    with open(BUILD / 'bench/muon.jsonl', 'w', encoding='ascii') as out:
        out.writelines(json.dumps(row) + '\n' for row in rows)
    if median['plain'] > TARGET * median['torch.optim.Muon']:
        sys.exit(f'missed: a step may take {TARGET} of torch.optim.Muon')


if __name__ == '__main__':
    main()
