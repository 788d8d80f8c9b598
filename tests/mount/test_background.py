# SPDX-License-Identifier: Apache-2.0
"""Engines in the background as an operator sees them: figures, pause, resume, and a common budget."""
import json
import time

import numpy as np

from calls import sync
from conftest import run, wait_for

MIB = 1 << 20


def background(verb, point, *args, check=True):
    done = run('hitrainctl', 'background', verb, point, '--json', *args, check=check)
    return {e['engine']: e for e in json.loads(done.stdout)['engines']} if done.returncode == 0 else done


def scrub_state(point):
    return json.loads(run('hitrainctl', 'scrub', 'status', point, '--json').stdout)['state']


def filled(store, size, *options):
    point = store.mount(*options)
    (point / 'file').write_bytes(np.random.default_rng(1).bytes(size))
    sync(point / 'file')
    return point


def test_a_paused_engine_waits_and_goes_on(make_store):
    store = make_store()
    point = filled(store, 8 * MIB, 'scrub_rate=8G')
    first = background('status', point)['scrub']
    assert first['state'] == 'idle' and first['steps'] == 0 and first['left_bytes'] == 0
    assert background('pause', point)['scrub']['state'] == 'paused'
    run('hitrainctl', 'scrub', 'start', point)
    time.sleep(0.2)
    assert scrub_state(point) == 'running'
    now = background('status', point, '--engine=scrub')
    assert list(now) == ['scrub'] and now['scrub']['steps'] == 0 and now['scrub']['left_bytes'] > 8 * MIB
    background('resume', point, '--engine=scrub')
    wait_for(lambda: scrub_state(point) == 'complete', 'scrub')
    wait_for(lambda: background('status', point)['scrub']['state'] == 'idle', 'the engine')
    end = background('status', point)['scrub']
    assert end['bytes'] > 8 * MIB and end['cpu_ns'] > 0 and end['found'] == 0 and end['left_bytes'] == 0
    metrics = (point / '.hitrain' / 'stats').read_text()
    assert f'hitrain_background_moved_bytes_total{{engine="scrub"}} {end["bytes"]}\n' in metrics
    assert 'hitrain_background_scrub_found_total 0\n' in metrics
    assert 'hitrain_background_state{engine="scrub",hitrain_background_state="idle"} 1\n' in metrics


def test_a_paused_scrub_is_stopped_and_unmounted(make_store):
    store = make_store()
    point = filled(store, 8 * MIB)
    background('pause', point, '--engine=scrub')
    for end in 'stop', 'unmount':
        run('hitrainctl', 'scrub', 'start', point)
        assert scrub_state(point) == 'running'
        if end == 'stop':
            run('hitrainctl', 'scrub', 'stop', point)
            assert scrub_state(point) == 'stopped'
            assert background('status', point)['scrub']['state'] == 'paused'
    store.unmount(check=True)
    assert background('status', store.mount())['scrub']['state'] == 'idle'


def test_the_budget_holds_for_a_scrub_with_a_higher_rate(make_store):
    store = make_store()
    point = filled(store, 8 * MIB, 'scrub_rate=8G', 'background_rate=4M', 'background_cpu=50')
    began = time.monotonic()
    run('hitrainctl', 'scrub', 'start', point)
    wait_for(lambda: scrub_state(point) == 'complete', 'scrub')
    assert time.monotonic() - began > 1  # 8 MiB at 4 MiB/s, less what one step may be ahead


def test_what_is_refused(make_store):
    point = make_store().mount()
    for verb in 'pause', 'resume', 'status':
        done = background(verb, point, '--engine=dreams', check=False)
        assert done.returncode == 1 and 'no engine is called' in done.stderr
    assert run('hitrainctl', 'background', 'go', point, check=False).returncode == 2
    assert run('hitrainctl', 'background', 'status', point, '--engine=', check=False).returncode == 2
    assert run('hitrainctl', 'scrub', 'status', point, '--engine=scrub', check=False).returncode == 2
    assert 'scrub' in run('hitrainctl', 'background', 'status', point).stdout
    lines = [json.loads(line) for line in (point / '.hitrain/background').read_text().splitlines()]
    assert [e['engine'] for e in lines] == list(background('status', point))


def test_engines_run_unless_the_mount_says_otherwise(make_store):
    store = make_store()
    by_default = {name: e['state'] for name, e in background('status', store.mount()).items()}
    assert by_default.pop('discard') == 'off'  # mkfs has reserved the file
    assert 'off' not in by_default.values()
    store.unmount()
    point = filled(store, 8 * MIB, 'background=off')
    off = {name: e['state'] for name, e in background('status', point).items()}
    assert off.pop('scrub') == 'idle' and set(off.values()) == {'off'}
    run('hitrainctl', 'scrub', 'start', point)
    wait_for(lambda: scrub_state(point) == 'complete', 'scrub')
    background('resume', point)
    assert {e['state'] for e in background('status', point).values()} == {'idle', 'off'}
