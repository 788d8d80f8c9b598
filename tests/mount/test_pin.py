# SPDX-License-Identifier: Apache-2.0
"""pin=dram and tier=dram keep content in memory; tier=capacity and everything else makes room."""
import errno
import mmap
import os

from calls import sync
from conftest import MIB, wait_for
from test_passes import figure
from test_roots import refused, word

DRAM = 32
PINNED = DRAM // 4


def make(path, mib, **words):
    path.touch()
    word(path, 'dtype', 'u8')
    for name, value in words.items():
        word(path, name, value)
    path.write_bytes(os.urandom(mib * MIB))


def read(path):
    """MiB that the device reads for a pass that goes around the page cache."""
    before = int(word(path, 'device_read_bytes'))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as buffer:
        at = 0
        while (n := os.preadv(fd, [buffer], at)) > 0:
            at += n
    os.close(fd)
    assert at == path.stat().st_size
    return (int(word(path, 'device_read_bytes')) - before) // MIB


def mount_with_model(make_store):
    point = make_store('256M').mount(f'dram={DRAM}M', 'staging=24M')
    (point / 'model').mkdir()
    word(point / 'model', 'optimizer', 'sgd lr=1')
    make(point / 'model/w', 4)
    return point


def scan(point):
    for _ in range(2):
        read(point / 'scanned')


def test_pinned_content_survives_a_scan(make_store):
    store = make_store('512M')
    point = store.mount(f'dram={DRAM}M', 'staging=24M')
    make(point / 'pinned', PINNED)
    make(point / 'other', PINNED)
    make(point / 'scanned', 4 * DRAM)
    sync(point)                                         # clean content makes room
    word(point / 'pinned', 'pin', 'dram')
    assert figure(point, 'pinned_bytes') == PINNED * MIB
    scan(point)
    assert read(point / 'pinned') == 0 and int(word(point / 'pinned', 'resident_bytes')) == PINNED * MIB

    store.unmount()                                     # from the first open on it holds again
    point = store.mount(f'dram={DRAM}M', 'staging=24M')
    assert figure(point, 'pinned_bytes') == 0 and read(point / 'pinned') == read(point / 'other') == PINNED
    scan(point)
    assert read(point / 'pinned') == 0 and read(point / 'other') >= PINNED  # more if one goes before its turn
    os.removexattr(point / 'pinned', 'user.hitrain.pin')
    assert figure(point, 'pinned_bytes') == 0
    scan(point)
    assert read(point / 'pinned') >= PINNED


def test_what_does_not_fit_is_refused(make_store):
    point = make_store('256M').mount(f'dram={DRAM}M', 'staging=24M')
    make(point / 'large', DRAM // 2 + 1)
    refused(errno.ENOSPC, word, point / 'large', 'pin', 'dram')
    assert word(point / 'large', 'error').startswith(f'pin: the file needs {MIB} bytes more')
    refused(errno.ENODATA, word, point / 'large', 'pin')
    make(point / 'small', 4, pin='dram')
    assert figure(point, 'pinned_bytes') == 4 * MIB
    (point / 'small').unlink()
    wait_for(lambda: figure(point, 'pinned_bytes') == 0, 'its memory is free')
    (point / 'd').mkdir()
    refused(errno.EINVAL, word, point / 'd', 'pin', 'dram')
    assert 'only files' in word(point / 'd', 'error')


def test_the_tier_of_a_directory_is_that_of_new_files(make_store):
    point = make_store('512M').mount(f'dram={DRAM}M', 'staging=24M')
    for name in 'dram', 'capacity':
        (point / name).mkdir()
        word(point / name, 'tier', name)
        make(point / name / 'f', PINNED)
    make(point / 'scanned', 4 * DRAM)
    sync(point)                                         # clean content makes room
    read(point / 'capacity/f')
    read(point / 'dram/f')
    scan(point)
    assert read(point / 'dram/f') == 0 and read(point / 'capacity/f') == PINNED
    word(point / 'dram/f', 'tier', '')
    assert figure(point, 'pinned_bytes') == 0


def test_an_abort_takes_a_pin_back(make_store):
    point = mount_with_model(make_store)
    sync(point / 'model')
    word(point / 'model/w', 'pin', 'dram')
    read(point / 'model/w')
    assert figure(point, 'pinned_bytes') == 4 * MIB
    (point / 'model/.hitrain/ctl').write_text('abort')
    refused(errno.ENODATA, word, point / 'model/w', 'pin')
    assert figure(point, 'pinned_bytes') == 0


def test_a_rollback_takes_a_pin_back_or_brings_it(make_store):
    point = mount_with_model(make_store)
    model_control = point / 'model/.hitrain/ctl'
    model_control.write_text('snapshot unpinned')
    word(point / 'model/w', 'pin', 'dram')
    read(point / 'model/w')
    assert figure(point, 'pinned_bytes') == 4 * MIB
    model_control.write_text('snapshot pinned')
    model_control.write_text('rollback unpinned')
    refused(errno.ENODATA, word, point / 'model/w', 'pin')
    assert figure(point, 'pinned_bytes') == 0
    model_control.write_text('rollback pinned')
    read(point / 'model/w')
    assert figure(point, 'pinned_bytes') == 4 * MIB
