# SPDX-License-Identifier: Apache-2.0
"""Passes that repeat are planned: what is needed last leaves memory first. .hitrain/plan shows it."""
import errno
import json
import mmap
import os
import xml.etree.ElementTree

from calls import sync
from conftest import MIB, wait_for
from test_passes import figure
from test_roots import refused
from test_trace import control

DRAM = 128
CHUNKS = 160
PASSES = 11


def read_pass(fd, buffer):
    for n in range(CHUNKS):
        assert os.preadv(fd, [buffer], n * MIB) == MIB
        assert buffer[0] == n and buffer[MIB - 1] == n


def read_plan(point):
    lines = (point / '.hitrain/plan').read_text().splitlines()
    return json.loads(lines[0]), [json.loads(line) for line in lines[1:]]


def median(values):
    return sorted(values)[len(values) // 2]


def measure(point, fd, buffer):
    """MiB that the device reads in each pass."""
    read = []
    for _ in range(PASSES):
        before = figure(point, 'device_read_bytes')
        read_pass(fd, buffer)
        read.append((figure(point, 'device_read_bytes') - before) // MIB)
    return read


def check_control(point, folder):
    """hitrainctl shows, saves and draws the plan."""
    done = control('plan', point)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split()[-1] == 'tensor', done
    assert f'{CHUNKS} MiB' in done.stdout.splitlines()[-1] and 'steps matched' in done.stdout
    drawing = folder / 'plan.svg'
    done = control('plan', point, '--json', f'--svg={drawing}')
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 + CHUNKS, done
    assert all(json.loads(line) for line in done.stdout.splitlines())
    texts = [t.text for t in xml.etree.ElementTree.parse(drawing).getroot().iter() if t.tag.endswith('text')]
    assert len(texts) == 4 and 'MiB' in texts[0] and 'B' in texts[1] and texts[2] == '0' and texts[3].endswith(' s')
    done = control('plan', point, f'--svg={folder}/nothing/plan.svg')
    assert done.returncode == 1 and 'No such file' in done.stderr


def test_a_cyclic_pass_reads_what_has_no_room(make_store, tmp_path):
    point = make_store('512M').mount(f'dram={DRAM}M', 'staging=24M')
    path = point / 'tensor'
    path.touch()
    os.setxattr(path, 'user.hitrain.dtype', b'u8')
    path.write_bytes(b''.join(bytes([n]) * MIB for n in range(CHUNKS)))
    sync(path)
    assert read_plan(point) == ({'active': False, 'made': 0, 'dropped': 0}, [])
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as buffer:
        def planned():
            read_pass(fd, buffer)
            return read_plan(point)[0]['active']

        def settled():
            """On a loaded machine steps may differ so much that the plan is made anew."""
            nonlocal read, head, lines
            read = measure(point, fd, buffer)
            head, lines = read_plan(point)
            return head['active'] and head['matched_steps'] > 1 and head['hits'] > CHUNKS and median(read) <= 44

        read, head, lines = [], {}, []
        wait_for(planned, 'a plan')
        measure(point, fd, buffer)
        wait_for(settled, 'passes that keep what the plan names')
        check_control(point, tmp_path)
    os.close(fd)
    # Without a plan seven eighths of the tier or less stay, and 48 MiB or more are read.
    assert CHUNKS - DRAM <= median(read) <= 44, read
    assert head['active'] and head['matched_steps'] > 0 and head['hits'] > CHUNKS and head['bytes'] == CHUNKS * MIB
    assert head['now_ns'] < head['step_ns'] and head['stay_bytes'] < DRAM * MIB
    assert sorted(line['offset'] for line in lines) == [n * MIB for n in range(CHUNKS)]
    for line in lines:
        assert (line['path'], line['use'], line['bytes']) == ('tensor', 'read', MIB)
        assert line['next_ns'] == line['used_ns'] + head['step_ns']
    assert 0 < sum(line['leaves'] for line in lines) < CHUNKS
    assert figure(point, 'plans_made') == head['made'] and figure(point, 'plan_step_ns') == head['step_ns']


def test_the_plan_is_the_mounts(mnt):
    (mnt / 'dir').mkdir()
    refused(errno.ENOENT, os.stat, mnt / 'dir/.hitrain/plan')
    fd = os.open(mnt / '.hitrain/plan', os.O_WRONLY)
    refused(errno.EBADF, os.write, fd, b'x')
    os.close(fd)


def test_without_a_plan_there_is_nothing_to_draw(mnt, tmp_path):
    done = control('plan', mnt)
    assert done.returncode == 0 and done.stdout.splitlines() == ['plans made: 0, dropped: 0', 'no plan is followed']
    done = control('plan', mnt, f'--svg={tmp_path}/plan.svg')
    assert done.returncode == 1 and 'nothing to draw' in done.stderr and not os.path.exists(tmp_path / 'plan.svg')
    for args in ['plan'], ['plan', mnt, '--svg='], ['plan', mnt, '--follow'], ['trace', 'show', mnt, '--svg=x']:
        done = control(*args)
        assert done.returncode == 2 and done.stderr and not done.stdout
