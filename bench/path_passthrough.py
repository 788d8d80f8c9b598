# SPDX-License-Identifier: Apache-2.0
"""The part of bench/path.py for passthrough files, whose pages clients map directly: memory is the ceiling, as for tmpfs."""
import json
import os
import sys

from common import BUILD, TOP, give_up, run
from path_sides import GIB, MIB, strace_counts

MODEL = 'model'
DRAM, SHARE = '2G', '1536M'
PREFETCHED = '1 MiB', '8 MiB', '64 MiB', '1 GiB'
READ = '64 KiB', '1 MiB', '8 MiB', '1 GiB'
STEP_SET, STEPS = '64 MiB', 4
TRAINER = TOP / 'bench/path_trainer.py'
TURNS = 3   # in each run: they are short
WAYS = {'read': {'hold': 1}, 'map': {'hold': 1, 'map': 1}, 'open and read': {}, 'open and map': {'map': 1}}


def folder(s):
    return f'{MODEL}/{s.folder}'


def make(side, sets):
    """The sets once more, as parameters of a model."""
    (side.point / MODEL).mkdir()
    os.setxattr(side.point / MODEL, 'user.hitrain.optimizer', b'sgd lr=0.5')
    for s in sets:
        (side.point / folder(s)).mkdir()
        side.client('make', folder(s), **s.words())
    side.commit(MODEL)


def possible(side):
    side.remount(DRAM, SHARE)
    return 'passthrough is off' not in side.messages()


def stats(side):
    words = os.getxattr(side.point, 'user.hitrain.stats').decode().split()
    return {k: int(v) for k, v in (w.split('=') for w in words) if v.isdigit()}


def crossed(side):
    """Bytes of tensors that went through the daemon."""
    now = stats(side)
    return sum(now[f'mount_{kind}_{way}_bytes'] for kind in ('param', 'grad') for way in ('read', 'written'))


def reading(bench, sets, run_number):
    bench.hitrain.remount(DRAM, SHARE, touched=True)
    for s in (s for s in sets if s.name in READ):
        for way, options in WAYS.items():
            words = {**s.words(), 'direct': 0, 'laps': s.laps(GIB // 2), **options}

            def measure(side):
                place = folder(s) if side is bench.hitrain else s.folder
                if turn == 0:
                    side.measure('read', place, **{**words, 'laps': 1})
                before = crossed(bench.hitrain)
                result = side.measure('read', place, **words)
                if crossed(bench.hitrain) != before:
                    give_up(f'reading {place} went through the daemon: it was not passed through')
                return result
            for turn in range(TURNS):
                bench.take_turns(run_number * TURNS + turn, 'passthrough', f'{way} {s.name}', [bench.tmpfs, bench.hitrain], measure)


def prefetching(bench, sets, run_number):
    for s in (s for s in sets if s.name in PREFETCHED):
        def measure(side):
            bench.devices.slow(False)
            if side is bench.raw:
                bench.devices.slow(True)
                return side.measure('read', '', **s.words())
            side.remount(DRAM, SHARE, touched=True)
            bench.devices.slow(True)
            before = bench.devices.counters(side.name)
            result = side.measure('prefetch', folder(s), **s.words())
            brought = bench.devices.counters(side.name)[0] - before[0]
            side.measure('read', folder(s), direct=0, **s.words())
            later = bench.devices.counters(side.name)[0] - before[0] - brought
            if brought < s.bytes * s.files or later > MIB:
                give_up(f'prefetching {folder(s)} brought {brought} of {s.bytes * s.files} bytes, and reading it {later} more')
            return result
        bench.take_turns(run_number, 'prefetch', s.name, [bench.raw, bench.hitrain], measure)
    bench.devices.slow(False)


def trainer(side, s, steps):
    return sys.executable, TRAINER, side.point / MODEL, side.point / folder(s), 't0', steps


def train(side, s, steps):
    return json.loads(side.devices.run(*trainer(side, s, steps)))


def calls_of_trainer(side, s, steps):
    counts = BUILD / 'bench' / f'strace-{os.getpid()}'
    run('strace', '-qq', '-f', '-c', '-o', counts, *trainer(side, s, steps))
    return strace_counts(counts)


def stepping(bench, sets):
    """Calls in a step: those of a longer run that a shorter one does not make."""
    s, side = next(s for s in sets if s.name == STEP_SET), bench.hitrain
    side.remount(DRAM, SHARE, touched=True)
    train(side, s, 1)
    before = crossed(side)
    result = train(side, s, STEPS)
    few, many = calls_of_trainer(side, s, 1), calls_of_trainer(side, s, 1 + STEPS)
    calls = {name: (many[name] - few.get(name, 0)) / STEPS for name in many if many[name] != few.get(name, 0)}
    bench.add(0, 'step', s.name, 'hitrain', {**result, 'steps': STEPS, 'calls': calls, 'crossed': crossed(side) - before})


def calls(bench, counted):
    side = bench.hitrain
    side.remount(DRAM, SHARE, touched=True)
    bench.count_calls('prefetch, passthrough', side, 'prefetch', folder(counted))
    bench.count_calls('read, passthrough', side, 'read', folder(counted), direct=0)
    bench.count_calls('map, passthrough', side, 'read', folder(counted), direct=0, map=1)
