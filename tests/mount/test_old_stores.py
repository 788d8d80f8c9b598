# SPDX-License-Identifier: Apache-2.0
"""Stores of every released format open for ever: tests/stores has one of each, with a description of its content.

HITRAIN_REGENERATE=1 adds the store of the present format if there is none. A store that is there never changes.
"""
import ctypes
import hashlib
import json
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, run, wait_for

STORES = ROOT / 'tests/stores'
FORMAT = int(re.search(r'define HT_FORMAT_VERSION\s*\\?\s*(\d+)u', (ROOT / 'include/hitrain/format.h').read_text()).group(1))
ONES = struct.pack('<1024f', *[1.0] * 1024)


def describe(mnt):
    """Names, kinds, attributes and content of all that is on a mount, with the optimizer's state."""
    found = {}
    for folder, names, files in os.walk(mnt):
        for name in sorted(names + files):
            path = os.path.join(folder, name)
            st = os.lstat(path)
            row = found[os.path.relpath(path, mnt)] = {'mode': oct(st.st_mode), 'links': st.st_nlink, 'size': st.st_size}
            if stat.S_ISLNK(st.st_mode):
                row['target'] = os.readlink(path)
                continue
            row['attributes'] = {n: os.getxattr(path, n).decode() for n in sorted(os.listxattr(path))}
            if stat.S_ISREG(st.st_mode):
                with open(path, 'rb') as f:
                    row['sha256'] = hashlib.sha256(f.read()).hexdigest()
    for root in json.loads(run('hitrainctl', 'roots', mnt, '--json').stdout)['roots']:
        state = {}
        for folder, _, files in os.walk(f'{mnt}{root["path"]}/.hitrain/state'):
            for name in sorted(files):
                with open(os.path.join(folder, name), 'rb') as f:
                    state[os.path.relpath(f.name, mnt)] = hashlib.sha256(f.read()).hexdigest()
        found[root['path']] = {'step': root['step'], 'durable_step': root['durable_step'], 'state': state,
                               'optimizer': os.getxattr(f'{mnt}{root["path"]}', 'user.hitrain.optimizer').decode()}
    return found


def train(model, *names):
    for name in names:
        (model / '.hitrain/grad' / name).write_bytes(bytes(ONES[:os.stat(model / name).st_size]))
    run('hitrainctl', 'commit', model)


def fill(mnt, words):
    for (name, dtype, rule), more in zip((('model', 'f32', 'adamw lr=0.5'), ('half', 'bf16', 'sgd lr=0.1 momentum=0.9')), words):
        model = mnt / name
        model.mkdir()
        os.setxattr(model, 'user.hitrain.dtype', dtype.encode())
        os.setxattr(model, 'user.hitrain.optimizer', (rule + more).encode())
        (model / 'w').write_bytes(ONES)
        (model / 'deep').mkdir()
        (model / 'deep/v').write_bytes(ONES[:400])
        os.setxattr(model / 'w', 'user.hitrain.shape', b'%d,2' % (512 if dtype == 'f32' else 1024))
        train(model, 'w', 'deep/v')
        train(model, 'w', 'deep/v')
    (mnt / 'folder').mkdir()
    (mnt / 'folder/text').write_bytes(b'some text\n' * 1000)
    os.setxattr(mnt / 'folder/text', 'user.mine', b'value')
    os.link(mnt / 'folder/text', mnt / 'link')
    os.symlink('folder/text', mnt / 'symbolic')
    os.mkfifo(mnt / 'fifo')
    with open(mnt / 'sparse', 'wb') as f:
        f.truncate(3 << 20)
        f.seek(1 << 20)
        f.write(b'middle')
    (mnt / 'cold').mkdir()
    os.setxattr(mnt / 'cold', 'user.hitrain.dtype', b'bf16')
    os.setxattr(mnt / 'cold', 'user.hitrain.compress', b'auto')
    (mnt / 'cold/tensor').write_bytes(struct.pack('<H', 0x3f80) * (1 << 19))
    shutil.copy(mnt / 'cold/tensor', mnt / 'cold/copy')
    run('hitrainctl', 'commit', mnt)


# By name: words of both models. Others than the first one have what came later without another version.
KINDS = {f'format-{FORMAT}': ('', ''), f'format-{FORMAT}-short-state': (' state_bits=8 state_bits_min=0', ' state_bits=16 state_bits_min=0')}


def make(make_store, name):
    store = make_store('8M')
    mnt = store.mount('compress_after=1')
    fill(mnt, KINDS[name])
    wait_for(lambda: int(os.getxattr(mnt / 'cold/tensor', 'user.hitrain.stored_bytes')) < 1 << 20, 'compressed')
    mnt = store.remount()
    os.mkdir(mnt / 'newest')  # in the log, behind its checkpoint
    run('hitrainctl', 'commit', mnt)
    found = describe(mnt)
    store.unmount()
    (STORES / f'{name}.json').write_text(json.dumps(found, indent=1, sort_keys=True) + '\n')
    (STORES / f'{name}.img.xz').write_bytes(lzma.compress(store.image.read_bytes(), preset=9))


@pytest.mark.parametrize('name', KINDS)
def test_the_present_format_has_a_store(make_store, name):
    if not (STORES / f'{name}.img.xz').exists():
        assert os.environ.get('HITRAIN_REGENERATE'), 'HITRAIN_REGENERATE=1 makes it'
        STORES.mkdir(exist_ok=True)
        make(make_store, name)


@pytest.mark.parametrize('image', sorted(STORES.glob('*.img.xz')), ids=lambda path: path.name)
def test_it_opens_and_works_on(make_store, image):
    expected = json.loads(image.with_name(image.name.replace('.img.xz', '.json')).read_text())
    store = make_store('8M')
    store.image.write_bytes(lzma.decompress(image.read_bytes()))
    store.assert_clean()
    features = json.loads(run('hitrainctl', 'features', store.image, '--json').stdout)
    assert features['can_open'] and features['version'] == int(re.search(r'format-(\d+)', image.name).group(1))
    assert {f['name'] for f in features['features'] if f['used']} >= {'compressed'}
    mnt = store.mount()
    assert describe(mnt) == expected
    for name in 'model', 'half':  # training and writing go on
        train(mnt / name, 'w', 'deep/v')
        assert os.getxattr(mnt / name, 'user.hitrain.step') == b'3'
    (mnt / 'cold/copy').write_bytes(b'new')
    (mnt / 'newest/file').write_bytes(b'new')
    after = describe(mnt)
    mnt = store.remount(check=True)
    assert describe(mnt) == after


def flip(store, offset, value):
    """Writes bytes into all copies of the superblock, with a new checksum."""
    xxh3 = ctypes.CDLL('libxxhash.so.0').XXH3_64bits
    xxh3.restype, xxh3.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_size_t]
    data = bytearray(store.image.read_bytes())
    for at in 0, 16 * 4096, len(data) - 4096:
        data[at + offset:at + offset + len(value)] = value
        data[at + 8:at + 16] = xxh3(bytes(data[at + 16:at + 4096]), 4080).to_bytes(8, 'little')
    store.image.write_bytes(data)


def test_features_of_mounts_files_and_what_is_none(store, tmp_path):
    on_mount = json.loads(run('hitrainctl', 'features', store.point, '--json').stdout)
    assert on_mount == json.loads(run('hitrainctl', 'features', store.image, '--json').stdout)
    assert on_mount['version'] == on_mount['known_version'] == FORMAT and on_mount['can_open']
    assert not any(f['used'] for f in on_mount['features'])
    text = run('hitrainctl', 'features', store.point).stdout
    head, *rows = text[text.index('\nfeature ') + 1:].splitlines()
    assert all(row.find(' no ') + 1 == head.find(' used ') + 1 for row in rows), 'names stand in their column'
    assert f'format {FORMAT}' in text and 'compressed' in text
    (tmp_path / 'empty').touch()
    (tmp_path / 'other').write_bytes(os.urandom(1 << 20))
    done = subprocess.run([BIN / 'hitrainctl', 'features', store.image], user=65534, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 1 and 'run this as root' in done.stderr
    for path, words in ((tmp_path, 'not on a hitrain mount'), (tmp_path / 'none', 'No such file'), ('/dev/null', 'neither'),
                        (tmp_path / 'empty', 'no hitrain store'), (tmp_path / 'other', 'no hitrain store')):
        done = run('hitrainctl', 'features', path, check=False)
        assert done.returncode == 1 and words in done.stderr and not done.stdout


@pytest.mark.parametrize('offset, value, words', [
    (24, 1 << 40, 'bit-40 .*does not know'),
    (40, 1 << 3, 'bit-3 .*ignores'),
    (16, 77, r'format 77 \(this program has'),
], ids=['refuse', 'ignore', 'version'])
def test_a_store_of_the_future(make_store, offset, value, words):
    store = make_store('8M')
    store.ends_clean = offset == 40
    flip(store, offset, value.to_bytes(4 if offset == 16 else 8, 'little'))
    text = run('hitrainctl', 'features', store.image).stdout
    assert re.search(words, text), text
    assert ('cannot open' in text) == (offset != 40)
    if offset != 40:
        for program in (['hitrain', store.image, store.point], ['hitrain-fsck', '-n', store.image]):
            done = run(*program, check=False)
            assert done.returncode and 'hitrainctl features' in done.stderr, done.stderr
    done = run('hitrain-fsck', '-n', store.image, check=False)
    assert done.returncode == (0 if offset == 40 else 8) or (offset != 40 and done.returncode == 4), done.stdout + done.stderr


@pytest.mark.parametrize('offset', [24, 32], ids=['refuse', 'read-only'])
def test_a_feature_of_the_future_has_its_name(make_store, offset):
    """Each program writes the names of its features into the superblock."""
    store = make_store('8M')
    assert b'refuses 2 kept-steps ' in store.image.read_bytes()[760:1784]
    store.ends_clean = False
    effect = 'refuses' if offset == 24 else 'reads'
    flip(store, offset, (1 << 40 | 1 << 41).to_bytes(8, 'little'))
    flip(store, 760, f'{effect} 41 \x1b[31mred 9.9\n{effect} 40 woven-trees 9.8.7\n'.encode().ljust(1024, b'\0'))
    text = run('hitrainctl', 'features', store.image).stdout
    assert re.search(rf'woven-trees +yes +{effect} +this program does not know it: use hitrain 9.8.7\n', text), text
    assert 'bit-41' in text and '\x1b' not in text
    named = {f['name']: f for f in json.loads(run('hitrainctl', 'features', store.image, '--json').stdout)['features']}
    assert named['woven-trees']['since'] == '9.8.7' and not named['woven-trees']['known']
    lacks = 'woven-trees (hitrain 9.8.7), bit-41'
    done = run('hitrain', store.image, store.point, check=False)
    assert done.returncode and lacks in done.stderr, done.stderr
    done = run('hitrain-fsck', '-n', store.image, check=False)
    assert lacks in (done.stderr if offset == 24 else done.stdout), done


def test_text_of_features_may_be_anything(make_store):
    """The whole field without an end, lines without an end, and numbers of any length."""
    store = make_store('8M')
    store.ends_clean = False
    for text in (b'x' * 1024, b'refuses 40 \x07 ' * 80, b'refuses 99999999999999999999 a 1\n' * 30, bytes(range(1, 256)) * 4):
        flip(store, 24, (1 << 40).to_bytes(8, 'little'))
        flip(store, 760, text[:1024].ljust(1024, b'\0'))
        assert 'bit-40' in run('hitrainctl', 'features', store.image).stdout
        done = run('hitrain', store.image, store.point, check=False)
        assert done.returncode and 'lacks bit-40;' in done.stderr, done.stderr
