#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch client's own cost, with all state in memory, beside torch.optim.AdamW(foreach=True).

Run it with `make bench-client`. Two models of about 10 million f32 parameters: 300 tensors in the shapes of a dense
transformer, and 20,000 in those of a mixture of experts; both also with pack=. For each: the time of step(), its share that the client spends on
the processor, and requests of the kernel. Then the rate at which one large gradient goes to the store and its parameter comes
back, beside memcpy; four ranks that hold a quarter of each parameter, beside one; and export_safetensors. Medians of runs
that take turns. --against names another copy of the client (a folder with the package hitrain), which then takes turns with
this one. All figures are in build/bench/client.jsonl.
"""
import argparse
import ctypes
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from common import BUILD, PROGRAMS, TOP, give_up, machine

MIB = 1 << 20
HERE = TOP / 'optim/torch'
LARGE_BYTES = 64 * MIB
PASSTHROUGH = '1G,passthrough=512M'  # for root, since Linux 6.9
SECONDS_MAX = 580


def dense(layers=33, width=160, inner=432):
    """9 tensors a layer, as in Llama."""
    shapes = {'embed': (500, width), 'norm': (width,), 'head': (500, width)}
    for i in range(layers):
        shapes.update({f'l{i}.{n}': (width, width) for n in ('q', 'k', 'v', 'o')})
        shapes.update({f'l{i}.gate': (inner, width), f'l{i}.up': (inner, width), f'l{i}.down': (width, inner)})
        shapes.update({f'l{i}.norm1': (width,), f'l{i}.norm2': (width,)})
    return shapes


def experts(layers=26, width=32, inner=16, count=256):
    """Three small tensors an expert."""
    shapes = {'embed': (500, width), 'norm': (width,), 'head': (500, width)}
    for i in range(layers):
        shapes.update({f'l{i}.{n}': (width, width) for n in ('q', 'k', 'v', 'o')})
        shapes.update({f'l{i}.router': (count, width), f'l{i}.norm1': (width,), f'l{i}.norm2': (width,)})
        for e in range(count):
            shapes.update({f'l{i}.e{e}.{n}': (inner, width) for n in ('gate', 'up', 'down')})
    return shapes


MODELS = {'300': dense, '20000': experts}


# ------------------------------------------------------ in a process of its own

class Mounted:
    """A new store in a file, and what its daemon has done."""

    def __init__(self, dram='1G'):
        from demo_store import Store
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='client-', dir=BUILD))
        self.store = Store(PROGRAMS, self.folder, '4G', dram)

    def __enter__(self):
        self.store.format()
        self.store.mount()
        return self

    def __exit__(self, *exc):
        self.store.close()
        shutil.rmtree(self.folder)

    def path(self, name):
        return self.store.mountpoint / name

    def requests(self):
        """Read calls of the daemon: nearly all take a request from the kernel."""
        with open(f'/proc/{self.store.daemon.pid}/io') as f:
            return int(next(line for line in f if line.startswith('syscr')).split()[1])

    def counters(self):
        return self.store.counters()


def timed(call):
    begin, cpu = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - begin, time.process_time() - cpu


def measure_model(name, steps, dram='1G', **options):
    import torch
    import hitrain
    shapes = MODELS[name]()
    own = {n: torch.nn.Parameter(torch.randn(s)) for n, s in shapes.items()}
    theirs = {n: torch.nn.Parameter(p.detach().clone()) for n, p in own.items()}
    other = torch.optim.AdamW(theirs.values(), lr=1e-3, foreach=True)
    mib = sum(p.numel() for p in own.values()) * 4 / MIB
    rows = []
    with Mounted(dram) as store:
        begin = time.monotonic()
        with hitrain.AdamW(own.items(), store.path('model'), lr=1e-3, durable_every=1000, **options) as optimizer:
            made = time.monotonic() - begin
            files = len(optimizer._parameter_files())
            for step in range(steps + 2):
                for p, q in zip(own.values(), theirs.values()):
                    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
                before = store.requests()
                wall, cpu = timed(optimizer.step)
                requests = store.requests() - before
                rows.append((wall, cpu, requests, *timed(other.step)))
    rows = rows[2:]  # the first makes the state, the second maps files
    wall, cpu, requests, torch_wall, torch_cpu = (statistics.median(r[i] for r in rows) for i in range(5))
    return {'parameters': len(own), 'files': files, 'MiB': mib, 'make_s': made, 'step_s': wall, 'client_cpu_s': cpu, 'torch_s': torch_wall, 'torch_cpu_s': torch_cpu,
            'requests': requests, 'requests_per_MiB': requests / (2 * mib)}


def measure_rates(count, dram='1G'):
    """With a norm to clip by, updates wait for the end of the step: the gradient has the machine for itself."""
    import torch
    import hitrain
    n = LARGE_BYTES // 4
    p = torch.nn.Parameter(torch.randn(n))
    into, rates = torch.empty(n), {'memcpy': [], 'gradient': [], 'parameter': []}
    with Mounted(dram) as store, hitrain.AdamW([('w', p)], store.path('model'), lr=1e-3, durable_every=1000, max_grad_norm=1e9) as optimizer:
        p.grad = torch.ones(n)
        for _ in range(2):
            optimizer.step()
        (f,) = optimizer._parameter_files()
        for _ in range(count):
            rates['memcpy'].append(timed(lambda: into.copy_(p.grad))[0])
            optimizer._begin([])

            def send():
                f.write_gradient(lambda: None)
                if not getattr(f, 'is_stored', False) and hasattr(f, 'hand_over'):  # earlier clients do so in write_gradient
                    f.hand_over()
            rates['gradient'].append(timed(send)[0])
            if getattr(f, 'is_stored', False):
                rates.setdefault('apply', []).append(timed(lambda: optimizer._root.apply([f.name]))[0])
                f.written = 0
            f.gradient_sent(early=False)
            optimizer._open = optimizer._root.number('step_open')
            optimizer._end_step()
            optimizer._begin_at(optimizer._step + 1)
            with f._opened() as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            rates['parameter'].append(timed(lambda: optimizer.receive_parameter(p))[0])
            rates.setdefault('search_for_changes', []).append(timed(f.changed)[0])
    return {f'{k}_MiB_s': LARGE_BYTES / MIB / statistics.median(v) for k, v in rates.items()}


def rank_of(rank, world, root, steps, meeting, results):
    sys.path.insert(0, str(HERE))
    import torch
    import hitrain
    torch.set_num_threads(1)
    own, parts = {}, {}
    before = resident()
    for n, s in dense().items():
        rows = -(-s[0] // world)
        first, last = min(rank * rows, s[0]), min((rank + 1) * rows, s[0])
        own[n] = torch.nn.Parameter(torch.ones((last - first, *s[1:])))
        parts[n] = (first * (s[1] if len(s) > 1 else 1), s)
    with hitrain.AdamW(own.items(), root, lr=1e-3, durable_every=1000, shard=hitrain.Shard(rank, world, timeout=100), parts=parts) as optimizer:
        for step in range(steps + 1):
            for p in own.values():
                p.grad = torch.ones_like(p)
            if step == 1:
                meeting.wait(100)
                results.put(('begun', 0))
                meeting.wait(100)
            optimizer.step()
        meeting.wait(100)
        results.put(('held', resident() - before))
        meeting.wait(100)


def resident():
    """Private bytes of this process, without those that malloc has free: where these lie is chance."""
    ctypes.CDLL(None).malloc_trim(0)
    with open('/proc/self/smaps_rollup') as f:
        return sum(int(line.split()[1]) for line in f if line.startswith(('Private_Dirty', 'Private_Clean'))) * 1024


def measure_ranks(steps):
    out = {}
    for world in (1, 4):
        context = multiprocessing.get_context('spawn')
        meeting, results = context.Barrier(world + 1), context.Queue()
        with Mounted() as store:
            workers = [context.Process(target=rank_of, args=(r, world, store.path('model'), steps, meeting, results)) for r in range(world)]
            for w in workers:
                w.start()
            meeting.wait(100)
            for _ in workers:
                results.get(timeout=100)
            before, begin = store.counters(), time.monotonic()
            meeting.wait(100)
            meeting.wait(SECONDS_MAX)
            wall = time.monotonic() - begin
            held = sum(results.get(timeout=100)[1] for _ in workers)
            after = store.counters()
            meeting.wait(100)
            for w in workers:
                w.join(100)
                if w.exitcode:
                    give_up(f'a rank ended with {w.exitcode}')
        moved = sum(after[n] - before[n] for n in ('mount_param_read_bytes', 'mount_grad_written_bytes'))
        out.update({f'ranks{world}_MiB_per_step': moved / MIB / steps, f'ranks{world}_held_MiB': held / MIB, f'ranks{world}_step_s': wall / steps})
    return out


def measure_export():
    """A model of several large tensors goes to a folder beside the store, and comes back as another model; a plain copy of the bytes is
    the bound."""
    import torch
    import hitrain
    from hitrain.checkpoint import export_safetensors, import_safetensors
    with Mounted() as store:
        params = [(f'w{i}', torch.nn.Parameter(torch.randn(LARGE_BYTES // 4))) for i in range(4)]
        hitrain.SGD(params, store.path('model'), lr=1.0).close()
        size, data, copies, exports, imports = 4 * LARGE_BYTES, os.urandom(MIB), [], [], []
        for k in range(3):
            def plain():
                with open(store.folder / 'plain', 'wb') as f:
                    for _ in range(size // MIB):
                        f.write(data)
                    os.fsync(f.fileno())
            copies.append(timed(plain)[0])
            exports.append(timed(lambda: export_safetensors(store.path('model'), store.folder / f'export{k}'))[0])
            imports.append(timed(lambda: import_safetensors(store.folder / f'export{k}', store.path(f'copy{k}')))[0])
            shutil.rmtree(store.folder / f'export{k}')
    return {f'{word}_MiB_s': size / MIB / statistics.median(v) for word, v in
            (('plain_write', copies), ('export', exports), ('import', imports))}


WHATS = {'model300': lambda: measure_model('300', 8), 'model20000': lambda: measure_model('20000', 3),
         'packed300': lambda: measure_model('300', 8, pack=MIB),
         'packed20000': lambda: measure_model('20000', 8, pack=64 << 10), 'rates': lambda: measure_rates(9),
         'mapped300': lambda: measure_model('300', 8, dram=PASSTHROUGH), 'mapped_rates': lambda: measure_rates(9, PASSTHROUGH),
         'ranks': lambda: measure_ranks(4), 'export': measure_export}


# ------------------------------------------------------------------- all runs

def one(what, client):
    command = [sys.executable, __file__, '--what', what]
    env = {**os.environ, 'HITRAIN_CLIENT': str(client), 'OMP_WAIT_POLICY': 'PASSIVE'}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False)
    if done.returncode:
        give_up(f'{what} ended with status {done.returncode}')
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--runs', type=int, default=3)
    parser.add_argument('--against', type=pathlib.Path, help='a folder with another copy of the package hitrain')
    parser.add_argument('--only', default=','.join(WHATS), help='some of ' + ' '.join(WHATS))
    parser.add_argument('--what', choices=WHATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what:
        print(json.dumps(WHATS[args.what]()))
        return
    clients = {'this': HERE, **({'against': args.against.resolve()} if args.against else {})}
    (BUILD / 'bench').mkdir(parents=True, exist_ok=True)
    print(machine())
    with open(BUILD / 'bench/client.jsonl', 'w') as log:
        for what in args.only.split(','):
            runs = {name: [] for name in clients}
            for _ in range(args.runs):
                for name, client in clients.items():
                    runs[name].append(one(what, client))
                    log.write(json.dumps({'what': what, 'client': name, **runs[name][-1]}) + '\n')
            print(f'\n{what:28}' + ''.join(f'{name:>12}' for name in clients))
            for key in runs['this'][0]:
                values = [statistics.median(r.get(key, float('nan')) for r in runs[name]) for name in clients]
                print(f'  {key:26}' + ''.join(f'{v:12.3f}' if v < 100 else f'{v:12,.0f}' for v in values), flush=True)


if os.environ.get('HITRAIN_CLIENT'):
    HERE = pathlib.Path(os.environ['HITRAIN_CLIENT'])
sys.path[:0] = [str(HERE), str(TOP / 'optim/torch')]

if __name__ == '__main__':
    main()
