#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Final losses of small models whose moments have 32, 16 and 8 bits, beside torch's AdamW and Muon.

Run it with `make bench-converge`, as root. Two models train on the demo's text: its GPT, made smaller, and one with other attention and another MLP.
All runs of a seed have the same first weights and the same batches. All parameters have few bits, norms, too. A row is within the spread
if its mean loss on text that was held out lies between the lowest and the highest of the 32-bit seeds. Of a row that lies above, further runs have few bits in
one kind of layer alone, and those that lie above are named. PyTorch is that of `make check-ecosystem`. Finished runs in build/bench/converge.jsonl
are not done again, so this may be ended and go on later. Curves are in converge.csv and converge.svg beside it.
"""
import argparse
import concurrent.futures
import contextlib
import csv
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time

from common import BUILD, PROGRAMS, TOP, begin, machine, torch_with_muon
from plot import Column, Curve, losses_and_columns

sys.path.insert(0, str(TOP / 'optim/torch'))

# rule, bits (0: torch's), color
OPTIMIZERS = {'adamw-torch': ('adamw', 0, '#f2b134'), 'adamw-32': ('adamw', 32, '#1f5fa8'), 'adamw-16': ('adamw', 16, '#2d8a4e'),
              'adamw-8': ('adamw', 8, '#b00020'), 'muon-torch': ('muon', 0, '#b9b9b9'), 'muon-32': ('muon', 32, '#222222'),
              'muon-8': ('muon', 8, '#c04fd0')}
TITLES = {'gpt': 'GPT', 'grouped': 'Grouped queries, SwiGLU'}
BETAS = {'gpt': (0.9, 0.95), 'grouped': (0.9, 0.999)}  # few bits have other errors where a second moment lives longer
RATE, MUON_RATE, WEIGHT_DECAY = 3e-3, 0.02, 0.1
SIZES = {'CONTEXT': 48, 'BATCH': 8, 'WIDTH': 72, 'HEADS': 4, 'LAYERS': 2}  # of the demo's GPT; the text's are those of both
POINTS = 100  # of a curve


def make_model(name, seed):
    import demo_gpt
    import converge_model
    for constant, value in SIZES.items():
        setattr(demo_gpt, constant, value)
    return demo_gpt.GPT(seed) if name == 'gpt' else converge_model.Grouped(seed, demo_gpt.VOCABULARY)


def layer_of(parameter):
    """blocks.0.attend.weight is of the layers called attend."""
    return parameter.split('.')[-2]


def with_bits(groups, bits, layer):
    """Groups of which all parameters have so many bits, or those of one kind of layer."""
    for group in groups:
        for chosen in (True, False):
            params = [(n, p) for n, p in group['params'] if (layer in ('', layer_of(n))) == chosen]
            if params:
                yield {**group, 'params': params, 'state_bits': bits if chosen else 32, 'state_bits_min': 0}


def make_optimizers(model, name, optimizer, layer, root):
    import torch
    import demo_gpt
    import hitrain
    rule, bits = OPTIMIZERS[optimizer][:2]
    if rule == 'adamw':
        groups = [{'use_muon': False, **g} for g in demo_gpt.param_groups(model, WEIGHT_DECAY)]
    else:
        groups = hitrain.muon_groups(model, others={'lr': RATE, 'betas': BETAS[name], 'weight_decay': WEIGHT_DECAY})
    if bits:
        groups = list(with_bits(groups, bits, layer))
        if rule == 'muon':
            return [hitrain.Muon(groups, root, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, durable_every=1000000)]
        for group in groups:
            del group['use_muon']
        return [hitrain.AdamW(groups, root, lr=RATE, betas=BETAS[name], durable_every=1000000)]
    tensors = {muon: [{k: [p for _, p in v] if k == 'params' else v for k, v in g.items() if k in ('params', 'weight_decay')}
                      for g in groups if g['use_muon'] == muon] for muon in (True, False)}
    made = [torch.optim.AdamW(tensors[False], lr=RATE, betas=BETAS[name])]
    if tensors[True]:
        made.append(torch.optim.Muon(tensors[True], lr=MUON_RATE, weight_decay=WEIGHT_DECAY))
    return made


def held_out_loss(model, text):
    """Of all the text that was held out."""
    import torch
    import demo_gpt
    width = demo_gpt.CONTEXT
    rows = (len(text.held_out) - 1) // width
    inputs, targets = (text.held_out[i:i + rows * width].view(rows, width) for i in (0, 1))
    with torch.no_grad():
        parts = [(model(a, b).item(), len(a)) for a, b in zip(inputs.split(32), targets.split(32))]
    return sum(loss * n for loss, n in parts) / rows


def train(spec, steps, mountpoint):
    """One run, in a process of its own that may do others before and after."""
    import torch
    import demo_gpt
    torch.set_num_threads(1)
    name, optimizer, seed, layer = spec
    began = time.monotonic()
    model = make_model(name, seed)
    text = demo_gpt.Text(seed)
    root = mountpoint / '-'.join(map(str, spec))
    optimizers = make_optimizers(model, name, optimizer, layer, root)
    groups = [(g, g['lr']) for o in optimizers for g in o.param_groups]
    losses = []
    for done in range(steps):
        for group, peak in groups:
            group['lr'] = demo_gpt.learning_rate(done, steps, peak)
        loss = model(*text.batch(done))
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            give_up(f'{spec}: the loss of step {done + 1} is {losses[-1]}')
    final = held_out_loss(model, text)
    if OPTIMIZERS[optimizer][1]:
        optimizers[0].close()
        shutil.rmtree(root)
    span = max(1, steps // POINTS)
    curve = [(i + span, round(statistics.mean(losses[i:i + span]), 5)) for i in range(0, steps - span + 1, span)]
    return {'final': final, 'curve': curve, 'seconds': round(time.monotonic() - began, 1)}


def verdict(finals, base):
    """Of losses beside those of 32 bits."""
    mean = statistics.mean(finals)
    if mean > max(base):
        return 'ABOVE'
    return 'within' if mean >= min(base) else 'below'


class Bench:
    def __init__(self, args, setting):
        self.args, self.setting = args, setting
        self.path = BUILD / 'bench/converge.jsonl'
        self.rows = {}
        lines = self.path.read_text('ascii').splitlines() if self.path.exists() else []
        for row in map(json.loads, lines):
            if row['setting'] == setting:
                self.rows[tuple(row['spec'])] = row

    def seeds(self):
        return range(1, self.args.runs + 1)

    def finals(self, name, optimizer, layer=''):
        """Of the seeds that have run."""
        return [self.rows[spec]['final'] for spec in ((name, optimizer, seed, layer) for seed in self.seeds()) if spec in self.rows]

    def run(self, pool, specs, mountpoint):
        """Those that have not run yet. Each result is kept at once."""
        left = [s for s in specs if s not in self.rows]
        print(f'{len(specs)} runs of {self.args.steps} steps, {len(left)} of them to do', flush=True)
        began, futures = time.monotonic(), {pool.submit(train, s, self.args.steps, mountpoint): s for s in left}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            spec = futures[future]
            row = self.rows[spec] = {'spec': spec, 'setting': self.setting, **future.result()}
            with open(self.path, 'a', encoding='ascii') as out:
                out.write(json.dumps(row) + '\n')
            minutes = (time.monotonic() - began) / done * (len(left) - done) / 60
            print(f'  {" ".join(map(str, spec))}: loss {row["final"]:.4f} after {row["seconds"]:.0f} s; {len(left) - done} left, some {minutes:.0f} minutes',
                  flush=True)

    def trained(self, name, optimizer):
        """Training losses of the last tenth of the steps, which are on the same batches for all optimizers."""
        curves = [self.rows[s]['curve'] for s in ((name, optimizer, seed, '') for seed in self.seeds()) if s in self.rows]
        return [statistics.mean(y for _, y in curve[-max(1, len(curve) // 10):]) for curve in curves]

    def table(self):
        """Prints it, and returns the rows that are above the spread."""
        above = []
        print(f'\n  {"":27}held-out loss {"":22}beside 32 bits{"":12}training loss  beside\n'
              f'  {"model":8} {"optimizer":12} {"seeds":>5} {"mean":>8} {"lowest":>8} {"highest":>8}{"":29}{"mean":>10} {"32 bits":>8}')
        for name, optimizer in itertools.product(BETAS, OPTIMIZERS):
            beside = f'{OPTIMIZERS[optimizer][0]}-32'
            finals, base, trained = self.finals(name, optimizer), self.finals(name, beside), self.trained(name, optimizer)
            if not finals:
                continue
            said = change = ''
            if len(finals) == len(base) and optimizer != beside:
                change = f'{statistics.mean(trained) - statistics.mean(self.trained(name, beside)):+8.4f}'
                said = f'{statistics.mean(finals) - statistics.mean(base):+8.4f}'
                if len(base) > 1:
                    said += f', {verdict(finals, base)} the spread'
                    if verdict(finals, base) == 'ABOVE' and not optimizer.endswith('-torch'):
                        above.append((name, optimizer))
            print(f'  {name:8} {optimizer:12} {len(finals):5} {statistics.mean(finals):8.4f} {min(finals):8.4f} {max(finals):8.4f}  {said:27}'
                  f'{statistics.mean(trained):10.4f} {change:>8}')
        return above

    def blame(self, pool, above, mountpoint):
        """Few bits in one kind of layer alone, for rows that are above the spread."""
        for name, optimizer in above:
            layers = sorted({layer_of(n) for n, _ in make_model(name, 0).named_parameters()})
            self.run(pool, [(name, optimizer, seed, layer) for seed in self.seeds() for layer in layers], mountpoint)
            base = self.finals(name, OPTIMIZERS[optimizer][0] + '-32')
            means = {layer: statistics.mean(self.finals(name, optimizer, layer)) - statistics.mean(base) for layer in layers}
            print(f'  {name}, {optimizer} in one kind of layer, beside 32 bits in all: ' + ', '.join(f'{k} {v:+.4f}' for k, v in means.items()))
            guilty = [k for k in layers if verdict(self.finals(name, optimizer, k), base) == 'ABOVE']
            print(f'  above the spread by: {", ".join(guilty) or "no kind of layer alone"}')

    def curve(self, name, optimizer):
        """The mean of the seeds."""
        specs = [(name, optimizer, seed, '') for seed in self.seeds()]
        curves = [self.rows[s]['curve'] for s in specs if s in self.rows]
        return [(points[0][0], statistics.mean(y for _, y in points)) for points in zip(*curves)]

    def draw(self):
        panels = []
        for name in [n for n in BETAS if any(self.finals(n, o) for o in OPTIMIZERS)]:
            # torch's are broad, with those of 32 bits upon them
            curves = [Curve(key, color, self.curve(name, key), 1.6 if bits else 5) for key, (_, bits, color) in OPTIMIZERS.items()]
            parts = [[Column(key.replace('-', ' '), color, self.finals(name, key), self.finals(name, f'{rule}-32'))
                      for key, (rule, _, color) in OPTIMIZERS.items() if rule == part and self.finals(name, key)] for part in ('adamw', 'muon')]
            panels.append((TITLES[name], curves, [columns for columns in parts if columns]))
        return losses_and_columns(panels, ('training loss', 'Held-out loss; shaded: seeds of 32 bits'), 'nats per byte')

    def write_csv(self, out):
        table = csv.writer(out)
        names = [spec for spec in sorted(self.rows) if not spec[3]]
        table.writerow(['step', *('-'.join(map(str, s[:3])) for s in names)])
        for points in zip(*(self.rows[s]['curve'] for s in names)):
            table.writerow([points[0][0], *(y for _, y in points)])


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--runs', type=int, default=3, help='seeds')
    p.add_argument('--steps', type=int, default=1500)
    p.add_argument('--only', default='', help='runs whose name has this, as gpt or muon')
    p.add_argument('--jobs', type=int, default=min(2, os.cpu_count()), help='runs side by side, of one thread each')
    return p.parse_args()


def main():
    args = parse_args()
    torch = torch_with_muon()
    from demo_store import Store
    setting = {'steps': args.steps, 'torch': torch.__version__, 'rates': [RATE, MUON_RATE], **SIZES}
    bench = Bench(args, setting)
    store = Store(PROGRAMS, begin('converge'), '1G', '256M')
    try:
        store.format()
        store.mount()
        with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context('spawn')) as pool, contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown, cancel_futures=True)
            specs = [(name, optimizer, seed, '') for seed in bench.seeds() for name in BETAS for optimizer in OPTIMIZERS]
            bench.run(pool, [s for s in specs if args.only in f'{s[0]}-{s[1]}'], store.mountpoint)
            print(f'{machine()}, PyTorch {torch.__version__}, {args.steps} steps')
            above = bench.table()
            bench.blame(pool, above, store.mountpoint)
        store.unmount()
    finally:
        store.close()
    with open(BUILD / 'bench/converge.csv', 'w', newline='', encoding='ascii') as out:
        bench.write_csv(out)
    (BUILD / 'bench/converge.svg').write_text(bench.draw(), 'ascii')
    if above:
        sys.exit('missed: above the spread of 32 bits: ' + ', '.join(' '.join(row) for row in above))


if __name__ == '__main__':
    main()
