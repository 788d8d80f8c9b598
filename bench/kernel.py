#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The update kernels beside an in-place stream, and AdamW beside PyTorch's fused AdamW where PyTorch is 2.4 or newer.

Run it with `make bench-kernel`. Both sides take turns, medians are compared; figures also go to kernel.jsonl beside
those of the other benches. PyTorch's threads are as many as the kernel's.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

from common import BUILD, SECONDS_MAX

PROGRAM = BUILD / 'bench/bench_kernel'
ELEMENTS = 32 << 20  # arrays of 128 MiB, as large as the program's
BYTES = 7 * 4  # four arrays in, three out
PASSES = 3


def fused_adamw(torch, threads):
    """GB/s of one pass, by the bytes that AdamW must move."""
    torch.set_num_threads(threads)
    p = torch.nn.Parameter(torch.rand(ELEMENTS))
    p.grad = torch.rand(ELEMENTS)
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True)
    optimizer.step()  # makes the state

    def measure():
        began = time.monotonic()
        for _ in range(PASSES):
            optimizer.step()
        return PASSES * ELEMENTS * BYTES / (time.monotonic() - began) / 1e9
    return measure


def find_torch():
    try:
        import torch
    except ImportError:
        return None, 'PyTorch is not there: nothing to compare with'
    version = tuple(int(x) for x in torch.__version__.split('+')[0].split('.')[:2])
    if version < (2, 4):
        return None, f'PyTorch {torch.__version__} has no fused AdamW for CPUs (2.4 has)'
    return torch, None


def run_program(runs):
    out = subprocess.run([PROGRAM, '--json', str(runs)], stdout=subprocess.PIPE, text=True, check=True,
                         timeout=20 * SECONDS_MAX).stdout
    return [json.loads(line) for line in out.splitlines()]


def tell(rows):
    print(f'\n  {"":34}{"threads":>8}{"stream":>9}{"kernel":>9}{"scalar":>9}{"of stream":>11}')
    for r in rows:
        print(f'  {r["rule"]:34}{r["threads"]:8}{r["stream_gb_s"]:9.2f}{r["kernel_gb_s"]:9.2f}{r["scalar_gb_s"]:9.2f}'
              f'{r["ratio"]:11.2f}')


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=5)
    args = p.parse_args()
    torch, why_not = find_torch()
    records, fused = [], {}
    for n in range(args.runs):
        print(f'\r  run {n + 1} of {args.runs} ', end='', file=sys.stderr, flush=True)
        rows = run_program(3)
        records += [{'run': n, **r} for r in rows]
        ortho = [r for r in rows if 'newton_schulz' in r]
        rows = [r for r in rows if 'rule' in r]
        for threads in sorted({r['threads'] for r in rows}) if torch else []:
            fused.setdefault(threads, []).append(fused_adamw(torch, threads)())
    keys = list(dict.fromkeys((r['rule'], r['threads']) for r in records if 'rule' in r))
    medians = []
    for rule, threads in keys:
        mine = [r for r in records if (r.get('rule'), r.get('threads')) == (rule, threads)]
        medians.append({'rule': rule, 'threads': threads, **{
            k: statistics.median(r[k] for r in mine) for k in ('stream_gb_s', 'kernel_gb_s', 'scalar_gb_s', 'ratio')}})
    print(f'\nbench-kernel: GB/s, f32, {mine[0]["kernel"]}, arrays of 128 MiB or four last caches, medians of {args.runs} runs')
    tell(medians)
    for threads, values in fused.items():
        ours = next(m['kernel_gb_s'] for m in medians if m['rule'].startswith('adamw') and m['threads'] == threads)
        theirs = statistics.median(values)
        medians.append({'rule': 'PyTorch fused AdamW', 'threads': threads, 'gb_s': theirs, 'hitrain_over_it': ours / theirs})
        print(f'  PyTorch {torch.__version__} fused AdamW, {threads} threads: {theirs:.2f} GB/s, hitrain over it {ours / theirs:.2f}')
    if why_not:
        print(f'  {why_not}')
    bits, missed = [r for r in records if 'state_of' in r], []
    for key in dict.fromkeys((r['state_of'], r['state_bits'], r['codecs'], r['target']) for r in bits):
        mine = [r for r in bits if (r['state_of'], r['state_bits'], r['codecs'], r['target']) == key]
        rate, of_f32 = (statistics.median(r[k] for r in mine) for k in ('g_s', 'of_f32'))
        missed += [key] * (of_f32 < key[3] and key[0].startswith('adamw'))
        print(f'  {key[0]:34} state in {key[1]:2} bits, {key[2]:6}: {rate:.3f} elements/ns, {of_f32:.2f} of f32 '
              f'(target {key[3]}{", MISSED" if key in missed else ""})')
    for r in ortho:
        print(f'  Newton-Schulz of {r["newton_schulz"]}: {r["gflop_s"]} GFLOP/s on one core, {r["parameters_s"] / 1e6:.2f} million parameters/s')
    (BUILD / 'bench/kernel.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records + medians))
    if missed:
        sys.exit(f'{len(missed)} targets of AdamW missed')


if __name__ == '__main__':
    main()
