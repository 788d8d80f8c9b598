# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/ that prepare what a bench measures, and that no other test runs."""
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from conftest import BIN, MIB, SECONDS_MAX, ROOT, run, wait_for

sys.path.insert(0, str(ROOT / 'bench'))
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


# --------------------------------------------------------------- steady_device

@pytest.fixture
def steady(tmp_path):
    """A file of 8 MiB, and a function that sets its speed."""
    folder = tmp_path / 'steady'
    folder.mkdir()
    with subprocess.Popen([BIN.parent / 'bench/steady_device', folder, str(8 * MIB)], stdin=subprocess.PIPE, text=True) as daemon:
        def set_speed(bytes_per_s):
            daemon.stdin.write(f'{bytes_per_s}\n')
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
    while timed(os.pread, fd, MIB, 0) < 0.1:            # until it has read the line
        pass
    began = time.monotonic()
    threads = [threading.Thread(target=os.pread, args=(fd, MIB, 0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert os.pread(fd, MIB, 3 * MIB) == content
    for thread in threads:
        thread.join()
    assert time.monotonic() - began > 0.37              # one after the other
    with pytest.raises(OSError):
        os.pwrite(fd, content, 8 * MIB)
    os.close(fd)


# ------------------------------------------------------------------- reachable

def least(text, memory, rate=100):
    return round(reachable.least_seconds(text.splitlines(), memory, rate), 6)


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
