# SPDX-License-Identifier: Apache-2.0
"""hitrainctl bench: of a mount, of a device, and of other paths; and its scratch file."""
import json
import os
import signal
import subprocess

from conftest import BIN, MIB, SECONDS_MAX, run, wait_for


def start(*args, **kw):
    return subprocess.Popen([BIN / 'hitrainctl', 'bench', *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **kw)


def end(program):
    out, err = program.communicate(timeout=SECONDS_MAX)
    assert program.returncode == 0, err
    return out, err


def measured(rows, part, test):
    found = [r for r in rows if r['part'] == part and r['test'] == test]
    assert found and all(r['bytes_per_s'] > 0 and r['requests'] > 0 for r in found), rows
    return found


def scratch_of(folder):
    return [n for n in os.listdir(folder) if n.startswith('.hitrain-bench-')]


def test_a_mount_a_scratch_file_and_a_device(store, make_store):
    """Three at once, because each takes seconds; no figure is compared."""
    point, other = store.point, make_store()
    (point / 'small').write_bytes(bytes(MIB))
    (point / 'folder').mkdir()
    (point / 'folder/large').write_bytes(os.urandom(40 * MIB))
    before = {p: p.stat() for p in (point / 'small', point / 'folder/large')}
    other.mount()
    programs = start(point, '--json'), start('--write', other.point, '--json'), start(store.image)
    reads, writes, device = (end(p) for p in programs)

    rows = json.loads(reads[0])['measurements']
    assert '7 measurements' in reads[1] and 'nothing is written' in reads[1]
    assert [r['at_once'] for r in measured(rows, 'memory', 'copy')][0] == 1
    assert {r['path'] for r in rows if r['part'] == 'device'} == {str(store.image)}
    assert [r['at_once'] for r in measured(rows, 'device', 'read 4 KiB')] == [1, 64]
    first, = measured(rows, 'mount', 'read')
    again, = measured(rows, 'mount', 'read again')
    assert first['path'] == str(point / 'folder/large') and MIB <= first['bytes'] <= 40 * MIB
    assert first['ceiling_bytes_per_s'] > 0 and again['ns'] >= 5 * 10**8
    assert {p: (s.st_mtime_ns, s.st_atime_ns) for p, s in before.items()} == \
        {p: (p.stat().st_mtime_ns, p.stat().st_atime_ns) for p in before}

    rows = json.loads(writes[0])['measurements']
    wrote, = measured(rows, 'mount', 'write and sync')
    read, = measured(rows, 'mount', 'read')
    assert wrote['bytes'] >= read['bytes'] >= 4 * MIB and read['from_devices_per_mille'] > 900
    assert not os.listdir(other.point)

    lines = device[0].splitlines()
    assert len(lines) == 6 and sum(str(store.image) in line for line in lines) == 3 and '%' not in device[0].split('\n', 1)[1]


def test_a_signal_removes_the_scratch_file(store):
    for number in signal.SIGINT, signal.SIGTERM:
        for _ in range(20):     # it has ended before the signal if this machine is busy
            program = start('--write', store.point)
            wait_for(lambda: scratch_of(store.point) or program.poll() is not None, 'the scratch file')
            program.send_signal(number)
            program.communicate(timeout=SECONDS_MAX)
            assert not scratch_of(store.point)
            if program.returncode:
                break
        assert program.returncode == 128 + number


def test_refusals(store, tmp_path):
    model = store.point / 'model'
    model.mkdir()
    os.setxattr(model, 'user.hitrain.optimizer', b'adamw')
    (model / 'folder').mkdir()
    (store.point / 'f').write_bytes(b'x')
    for args, words in (((tmp_path,), 'not on a hitrain mount'), ((tmp_path / 'none',), 'No such file'),
                        (('/dev/null',), 'neither'), (('--write', store.image), '--write writes no device'),
                        (('--write', store.point / 'f'), 'is a file'), (('--write', model), 'part of a model'),
                        (('--write', model / 'folder'), 'part of a model')):
        done = run('hitrainctl', 'bench', *args, check=False)
        assert done.returncode in (1, 2) and words in done.stderr and not done.stdout, (args, done.stderr)
    (store.point / 'closed').mkdir(mode=0o755)
    done = subprocess.run([BIN / 'hitrainctl', 'bench', '--write', store.point / 'closed'], user=65534, capture_output=True,
                          text=True, timeout=SECONDS_MAX)
    assert done.returncode == 1 and 'that you may write' in done.stderr
    store.kill()
    done = run('hitrainctl', 'bench', store.point, check=False)
    assert done.returncode == 1 and 'the daemon of this mount is gone' in done.stderr
