# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/ that prepare what a bench measures, and that no other test runs."""
import json
import os
import subprocess
import sys
import threading
import time
import types
from xml.etree import ElementTree

import pytest
from conftest import BIN, MIB, SECONDS_MAX, ROOT, run, wait_for

sys.path.insert(0, str(ROOT / 'bench'))
import common  # noqa: E402
import converge  # noqa: E402
import fit  # noqa: E402
import reachable  # noqa: E402

MAKER = BIN.parent / 'bench/recovery_maker'
BLOCK = 4096


def chunks_by_object(store):
    chunks = {}
    for extent in json.loads(run('hitrain-fsck', '-n', '--json', '--extents', store.image).stdout)['extents']:
        chunks[extent['object']] = chunks.get(extent['object'], 0) + 1
    return chunks


def test_recovery_maker_adds_chunks_to_a_store_with_names(make_store):
    files, each = 3, 300
    store = make_store('1G')
    mnt = store.mount()
    for i in range(files):
        with open(mnt / f'{i}', 'wb') as f:
            f.write(b'x' * BLOCK)
            f.truncate((each + 1) * MIB)
    store.unmount()
    objects = sorted(chunks_by_object(store))
    assert len(objects) == files
    done = subprocess.run([MAKER, store.image, str(BLOCK), str(each), *map(str, objects)], capture_output=True, text=True,
                          timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    assert chunks_by_object(store) == {number: each + 1 for number in objects}
    store.mount()
    for i in range(files):
        with open(mnt / f'{i}', 'rb') as f:
            assert f.read(BLOCK) == b'x' * BLOCK
            assert os.pread(f.fileno(), 2 * BLOCK, each * MIB) == bytes(2 * BLOCK)


def test_recovery_maker_adds_cold_chunks_that_no_segment_has(make_store, tmp_path):
    each, mnt = 300, (store := make_store('1G')).mount()
    run('hitrainctl', 'vault', 'init', tmp_path / 'vault')
    (mnt / 'model').mkdir()
    (mnt / 'model/w').touch()
    os.setxattr(mnt / 'model/w', 'user.hitrain.dtype', b'f32')
    (mnt / 'model/w').write_bytes(b'x' * MIB)
    os.setxattr(mnt / 'model', 'user.hitrain.optimizer', b'sgd lr=1')
    run('hitrainctl', 'snapshot', mnt / 'model', 'first')
    run('hitrainctl', 'archive', mnt / 'model', 'first', tmp_path / 'vault/job')
    run('hitrainctl', 'restore', '--cold', tmp_path / 'vault/job', mnt / 'cold')
    os.truncate(mnt / 'cold/w', (each + 1) * MIB)
    number = os.stat(mnt / 'cold/w').st_ino
    store.unmount()
    subprocess.run([MAKER, '--cold', store.image, str(MIB), str(each), str(number)], check=True, timeout=SECONDS_MAX)
    assert chunks_by_object(store)[number] == each + 1
    run('hitrain-fsck', '-n', '--no-data', store.image)
    store.mount()
    assert int(os.getxattr(mnt / 'cold', 'user.hitrain.cold_bytes')) == (each + 1) * MIB
    with open(mnt / 'cold/w', 'rb') as f:
        assert f.read(MIB) == b'x' * MIB
        with pytest.raises(OSError):
            os.pread(f.fileno(), 4096, MIB)


# --------------------------------------------------------------- steady_device

@pytest.fixture
def steady(tmp_path):
    """A file of 8 MiB, and a function that sets its speed."""
    folder = tmp_path / 'steady'
    folder.mkdir()
    with subprocess.Popen([BIN.parent / 'bench/steady_device', folder, str(8 * MIB)], stdin=subprocess.PIPE, text=True) as daemon:
        def set_speed(bytes_per_s, latency_us=0):
            daemon.stdin.write(f'{bytes_per_s} {latency_us}\n')
            daemon.stdin.flush()

        wait_for(lambda: os.path.ismount(folder), "a mount of steady_device")
        yield folder / 'device', set_speed
        subprocess.run(['umount', folder], check=True, timeout=SECONDS_MAX)
        assert daemon.wait(SECONDS_MAX) == 0


def timed(what, *args):
    began = time.monotonic()
    what(*args)
    return time.monotonic() - began


def test_a_steady_device_keeps_content_and_is_no_faster_than_it_says(steady):
    device, set_speed = steady
    content = os.urandom(MIB)
    fd = os.open(device, os.O_RDWR)
    assert os.fstat(fd).st_size == 8 * MIB
    assert os.pwrite(fd, content, 3 * MIB) == MIB
    set_speed(8 * MIB)

    def three_at_once():
        threads = [threading.Thread(target=os.pread, args=(fd, MIB, 0)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert os.pread(fd, MIB, 3 * MIB) == content
        for thread in threads:
            thread.join()

    wait_for(lambda: all(timed(three_at_once) > 0.37 for _ in range(3)), 'one after the other, once it has read the line')
    set_speed(1 << 40, 50000)
    wait_for(lambda: all(timed(os.pread, fd, 512, 0) > 0.05 for _ in range(3)), 'each answer comes a latency later')
    assert timed(os.fsync, fd) > 0.05
    with pytest.raises(OSError):
        os.pwrite(fd, content, 8 * MIB)
    os.close(fd)


# ------------------------------------------------------------------- reachable

def least(text, memory, rate=100, copy_rate=0):
    return round(reachable.least_seconds(text.splitlines(), memory, rate, copy_rate), 6)


def test_a_scan_takes_as_long_as_what_has_no_room():
    scan = ''.join(f'tensor t{i} 100\n' for i in range(10)) + \
        ''.join(f'read t{i}\ncompute 100000\n' for i in range(10)) + 'step\n'
    assert least(scan, 1000) == 1                       # it computes for a second
    assert least(scan, 400) == 6.1                      # nothing is left to read while it computes for the last time
    assert least(scan, 0) == 11
    assert least(scan + scan.replace('tensor', '#'), 400) == 6.1


def test_each_part_of_a_step_has_its_own_bytes():
    part = 'tensor a 300\ntensor b 300\nread a\ncompute 1000000\nwrite b\nread b\ncompute 5000000\nstep\n'
    assert least(part, 300) == 6                        # of a and b one is in memory at any time
    assert least(part, 100) == 2 + 1 + 2 + 2 + 5        # a in, b out, b in
    assert least(part, 0) == 3 + 1 + 3 + 3 + 5


def test_copies_are_time_in_which_the_device_works():
    part = 'tensor a 300\ntensor b 300\nread a\ncompute 1000000\nread b\ncompute 5000000\nstep\n'
    assert least(part, 1000, copy_rate=100) == 3 + 1 + 3 + 5
    assert least(part, 1000, copy_rate=50) == 6 + 1 + 6 + 5
    assert least(part, 300) == 3 + 5                    # of a and b one has to come in before the long computing
    assert least(part, 300, copy_rate=300) == 3 + 5     # the device is slower than computing and copies
    assert least(part, 300, copy_rate=100) == 3 + 1 + 3 + 5
    update = 'parameter p 100 500\ncompute 1000000\ngradient p\nstep\n'
    assert least(update, 600, copy_rate=100) == 2       # no caller copies the state


def test_an_update_may_end_with_the_step():
    text = 'parameter p 100 500\ncompute 1000000\ngradient p\ncompute 2000000\nstep\n'
    assert least(text, 600) == 3
    assert least(text, 100) == 1 + 5                    # the device works from the gradient on


def test_clipping_costs_the_gradients_that_memory_cannot_hold_twice():
    def bound(memory_bytes):
        return round(reachable.clipped_over_plain(memory_bytes, 12, 4), 6)

    assert bound(16) == bound(8) == bound(4) == 1       # all gradients wait in memory
    assert bound(1) == 1.5                              # 3 are written first, then 15 are read while 12 are written
    assert bound(0) == round(20 / 12, 6)


def test_programs_of_another_build_are_found(tmp_path):
    programs = tmp_path / 'build/bin'
    programs.mkdir(parents=True)
    with pytest.raises(SystemExit, match='has no programs'):
        common.programs_of(tmp_path)
    (programs / 'mkfs.hitrain').touch()
    for path in tmp_path, tmp_path / 'build', programs:
        assert common.programs_of(path) == programs


# ------------------------------------------------------------------------- fit

def test_an_arrangement_that_fails_is_named_with_its_reason(capsys):
    """And leaves the figures of the others, without a number that nothing was measured for."""
    args = types.SimpleNamespace(dtype='f32', parameters=100 * MIB, activations=16 * MIB, keep=32 * MIB, dram=32 * MIB)
    good = {'seconds': [2.0, 2.0], 'read': 64 * MIB, 'written': 32 * MIB, 'trainer_busy': 3.0, 'daemon_busy': 1.0, 'peak': MIB, 'group_peak': MIB}
    saved = {'saved_bytes': 500 * MIB, 'held_bytes_max': 50 * MIB}
    runs = {'memory': [good], 'activations': [{**good, 'activations': saved}], 'memory of 4': [{'failed': 'status 1: no four'}],
            'read back': [{'failed': 'status 1: no file'}], 'offload': [{'failed': 'killed: too little'}, {**good, 'figures': {'loaded_bytes': 1}}],
            'vertical': [{**good, 'figures': {'loaded_bytes': 1}}], 'fast': [{'failed': 'status 3: no room'}]}
    bench = types.SimpleNamespace(limit=600 * MIB, base=300 * MIB, fast=400 * MIB, fast_rate=390 * MIB)
    fit.report(args, runs, {'failed': 'no reference'}, bench, 300 * MIB)
    said = capsys.readouterr().out
    assert 'nan' not in said
    assert 'the speed with everything on a fast device is not known. There is no figure of fast: status 3: no room' in said
    assert 'the bound of 4 micro-batches is not known. There is no figure of memory of 4: status 1: no four' in said
    assert 'read back is not known' in said and '1 of 2 runs skipped or failed: killed: too little' in said
    row, = (line for line in said.splitlines() if line.startswith('offload') and 'failed' not in line.split('bits')[0])
    assert row.split()[1:3] == ['2.00', '1.00'] and 'the reference failed: no reference' in row


# -------------------------------------------------------------------- converge

def test_few_bits_are_judged_by_the_spread_of_the_32_bit_seeds(tmp_path, monkeypatch, capsys):
    """And runs of another setting do not count, nor a row of which a seed is missing."""
    monkeypatch.setattr(converge, 'BUILD', tmp_path)
    (tmp_path / 'bench').mkdir()
    finals = {'adamw-torch': [2.5, 2.5], 'adamw-32': [2.0, 2.2], 'adamw-16': [2.0, 2.3], 'adamw-8': [2.0, 2.5], 'muon-32': [1.0, 1.0], 'muon-8': [3.0]}
    rows = [{'spec': ('gpt', optimizer, seed, ''), 'setting': setting, 'final': loss + setting, 'curve': [(10, 4.0), (20, loss)]}
            for setting in (0, 7) for optimizer, losses in finals.items() for seed, loss in enumerate(losses, 1)]
    (tmp_path / 'bench/converge.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    bench = converge.Bench(types.SimpleNamespace(runs=2, steps=20), 0)
    assert bench.table() == [('gpt', 'adamw-8')]
    said = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith('  gpt')}
    assert [key for key, line in said.items() if 'within the spread' in line] == ['adamw-16'] and '+0.1500, ABOVE the spread' in said['adamw-8']
    assert len(said) == len(finals) and 'spread' not in said['adamw-32'] + said['muon-8']
    assert bench.curve('gpt', 'adamw-8') == [(10, 4.0), (20, 2.25)]
    drawn = ElementTree.fromstring(bench.draw())
    assert len(drawn.findall('{*}circle')) == len(rows) // 2


def test_a_made_up_vault_is_listed_collected_and_planned(tmp_path):
    segments = 64000
    def about(verb):
        done = subprocess.run([sys.executable, ROOT / 'bench/vault_sim.py', verb, tmp_path / 'sim', str(segments)], check=True, timeout=SECONDS_MAX,
                              stdout=subprocess.PIPE)
        return json.loads(done.stdout or 'null')
    about('make')
    assert about('list')['segments'] == segments and about('gc')['garbage'] and about('plan')['blocks']
