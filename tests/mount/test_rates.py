# SPDX-License-Identifier: Apache-2.0
"""How fast devices are, how much the store writes, and the budget for that."""
import errno
import json
import os
import struct

from calls import refused, sync
from conftest import MIB, run, wait_for
from models import word
from slow import loop_device, slow_group

READ_RATES, WRITE_RATES = ([f'{way}_{figure}' for figure in ('bytes_per_s', 'latency_ns', 'latency_p99_ns')]
                           for way in ('read', 'write'))
SLOW = 16 * MIB  # far below what any disk under the tests gives


def set_word(path, name, value):
    os.setxattr(path, 'user.hitrain.' + name, value.encode())


def device(mnt):
    return json.loads(run('hitrainctl', 'device', '--json', mnt).stdout)['devices'][0]


def warnings(mnt):
    found = [json.loads(line) for line in run('hitrainctl', 'events', '--json', mnt).stdout.splitlines()]
    return [e for e in found if e['code'] == 'endurance-exceeded']


def synced(path, data):
    with open(path, 'wb') as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def write_all(folder):
    for i in range(4):
        synced(folder / f'{i}', os.urandom(24 * MIB))


def read_all(folder):
    """Far more than memory."""
    for i in range(4):
        with open(folder / f'{i}', 'rb') as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert len(f.read()) == 24 * MIB


def after(mnt, move):
    move(mnt / 't')
    return device(mnt)


def test_the_rate_is_that_of_the_device(make_store):
    store = make_store('512M')
    image = store.image
    with loop_device(image) as store.image, slow_group(store.image, ('read', 'write')) as (group, limit):
        mnt = store.mount()
        assert not any(key in device(mnt) for key in WRITE_RATES), 'known although hardly anything was written yet'
        text = run('hitrainctl', 'device', mnt).stdout.splitlines()
        assert text[4].split()[-3:] == ['-'] * 3
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        limit(SLOW)
        os.mkdir(mnt / 't')
        set_word(mnt / 't', 'dtype', 'u8')
        # One slow request at the end weighs much. Without the limit it would be many times as much.
        wait_for(lambda: 0.15 < after(mnt, write_all)['write_bytes_per_s'] / SLOW < 1.5, 'the rate of writing')
        wait_for(lambda: 0.15 < after(mnt, read_all)['read_bytes_per_s'] / SLOW < 1.5, 'the rate of reading')
        found = device(mnt)
        assert all(key in found for key in READ_RATES + WRITE_RATES)
        for way in 'read', 'write':
            assert 0 < found[f'{way}_latency_ns'] < 10**10
            assert found[f'{way}_latency_p99_ns'] >= 1000
        wait_for(lambda: f'hitrain_device_read_bytes_per_s{{device="0"}} {device(mnt)["read_bytes_per_s"]}\n' in
                 (mnt / '.hitrain/stats').read_text(), 'the same figure among the metrics')
        text = run('hitrainctl', 'device', mnt).stdout.splitlines()
        assert text[4].startswith('0') and text[4].count('MiB/s') == 2
        store.unmount()
    store.image = image


def test_the_budget_stays_and_the_warning_comes_once(make_store):
    store = make_store('256M')
    mnt = store.mount('commit=1')
    assert word(mnt, 'endurance_bytes') == '0'
    refused(errno.ENODATA, word, mnt, 'endurance')
    set_word(mnt, 'endurance', '20M')
    assert word(mnt, 'endurance') == '20M' and word(mnt, 'endurance_bytes') == str(20 * MIB)
    assert 'user.hitrain.endurance' not in os.listxattr(mnt), 'copies would bring it along'
    sync(mnt)
    store.kill()
    store.detach()
    mnt = store.mount('commit=1')
    assert word(mnt, 'endurance') == '20M' and word(mnt, 'endurance_bytes') == str(20 * MIB)
    assert not warnings(mnt)
    for i in range(8):
        synced(mnt / f'f{i}', os.urandom(4 * MIB))
    wait_for(lambda: warnings(mnt), 'the warning')
    for i in range(8):
        synced(mnt / f'g{i}', os.urandom(4 * MIB))
    written = int(word(mnt, 'day_written_bytes'))
    assert written >= 64 * MIB
    assert written == int(word(mnt, 'device_written_bytes')) or written < int(word(mnt, 'device_written_bytes'))
    assert len(warnings(mnt)) == 1 and word(mnt, 'events_endurance_exceeded') == '1'
    event = warnings(mnt)[0]
    assert event['level'] == 'warn' and f'allows {20 * MIB}' in event['text']
    said = [int(w) for w in event['text'].split() if w.isdigit()]
    assert 20 * MIB < said[0] <= written
    os.removexattr(mnt, 'user.hitrain.endurance')
    assert word(mnt, 'endurance_bytes') == '0'
    refused(errno.ENODATA, word, mnt, 'endurance')
    set_word(mnt, 'endurance', '1.5T')
    assert word(mnt, 'endurance_bytes') == str(1536 << 30)
    mnt = store.remount()
    assert word(mnt, 'endurance_bytes') == str(1536 << 30)
    assert len(warnings(mnt)) == 0 and int(word(mnt, 'day_written_bytes')) < MIB, 'a day begins with the mount'
    assert f'hitrain_endurance_bytes {1536 << 30}\n' in (mnt / '.hitrain/stats').read_text()


def test_a_budget_that_makes_no_sense_is_refused(make_store):
    mnt = make_store('64M').mount()
    os.mkdir(mnt / 'd')
    for value, why in (('0', '0 is no budget'), ('0G', '0 is no budget'), ('', 'bytes per day'), ('many', 'bytes per day'),
                       ('-1', 'bytes per day'), ('1.5', 'bytes per day'), ('99999999999999999999', 'bytes per day'),
                       ('1' * 200, 'bytes per day'), ('1\0', 'bytes per day')):
        refused(errno.EINVAL, set_word, mnt, 'endurance', value)
        assert why in word(mnt, 'error'), value
    refused(errno.EINVAL, set_word, mnt / 'd', 'endurance', '1G')
    assert "only the mount's root" in word(mnt / 'd', 'error')
    refused(errno.EOPNOTSUPP, set_word, mnt, 'endurance_bytes', '1G')
    refused(errno.ENODATA, os.removexattr, mnt, 'user.hitrain.endurance')
    assert word(mnt, 'endurance_bytes') == '0'
    for value in '1', '1600000000000', '18446744073709551615', '2T', '100GiB':
        set_word(mnt, 'endurance', value)
        assert word(mnt, 'endurance') == value
        assert word(mnt, 'error') == ''


def test_an_abort_of_the_mounts_root_brings_its_budget_back(make_store):
    mnt = make_store('64M').mount()
    set_word(mnt, 'dtype', 'f32')
    set_word(mnt, 'endurance', '1G')
    set_word(mnt, 'optimizer', 'sgd lr=1')
    sync(mnt)
    set_word(mnt, 'endurance', '2G')
    assert word(mnt, 'endurance_bytes') == str(2 << 30)
    run('hitrainctl', 'abort', mnt)
    assert word(mnt, 'endurance') == '1G'
    assert word(mnt, 'endurance_bytes') == str(1 << 30)


def test_what_a_step_of_a_model_writes_is_counted_for_it(make_store):
    """The model is larger than memory, so its bytes come from the device and go there."""
    mnt = make_store('512M').mount('dram=8M', 'staging=24M')
    elements, zeros = 4 * MIB, bytes(16 * MIB)
    for name in 'a', 'b':
        os.mkdir(mnt / name)
        set_word(mnt / name, 'dtype', 'f32')
        set_word(mnt / name, 'optimizer', 'adamw lr=0.1')
        (mnt / name / 'w').write_bytes(zeros)
        sync(mnt / name)
    gradient = struct.pack('<f', 1) * elements
    for i in range(3):
        (mnt / 'a/.hitrain/grad/w').write_bytes(gradient)
        sync(mnt / 'a')
    step = int(word(mnt / 'a', 'step_written_bytes'))
    state = 3 * 4 * elements  # parameter and two moments
    assert 0.7 * state < step < 1.6 * state, step / state
    assert word(mnt / 'b', 'step_written_bytes') == '0'
    (mnt / 'b/.hitrain/grad/w').write_bytes(gradient)
    sync(mnt / 'b')
    assert int(word(mnt / 'a', 'step_written_bytes')) == step
    (mnt / 'c').write_bytes(zeros)
    sync(mnt)
    assert f'hitrain_step_written_bytes{{root="/a"}} {step}\n' in (mnt / '.hitrain/stats').read_text()
