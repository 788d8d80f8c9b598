# SPDX-License-Identifier: Apache-2.0
"""mkfs.hitrain never overwrites content that may still be needed: it names the content, and changes nothing."""
import os
import shutil
import struct
import subprocess

import pytest

from conftest import BIN, SECONDS_MAX, wait_for

MIB = 1 << 20
SIZE = 32 * MIB


def mkfs(*args):
    return subprocess.run([BIN / 'mkfs.hitrain', '--no-wait', *args], capture_output=True, text=True, timeout=SECONDS_MAX)


def new_file(path, size=SIZE):
    with open(path, 'wb') as f:
        f.truncate(size)
    return path


def make_with(*argv):
    def make(path):
        if shutil.which(argv[0]) is None:
            pytest.skip(f'{argv[0]} is not installed')
        subprocess.run([*argv, path], check=True, capture_output=True)
    return make


def put(offset, data):
    def make(path):
        with open(path, 'r+b') as f:
            f.seek(offset)
            f.write(data)
    return make


def partition_table(path):
    entry = bytes([0, 0, 2, 0, 0x83, 0, 0, 0]) + struct.pack('<II', 2048, 20000)
    put(446, entry.ljust(64, b'\0') + b'\x55\xaa')(path)


LUKS = b'LUKS\xba\xbe' + struct.pack('>H', 1) + b'aes'.ljust(32, b'\0') + b'xts-plain64'.ljust(32, b'\0') + \
    b'sha256'.ljust(32, b'\0') + struct.pack('>II', 4096, 64) + bytes(56) + b'0' * 36 + bytes(4)

HOLDS = {
    'ext4': (make_with('mkfs.ext4', '-q', '-L', 'precious'), ['ext4', 'precious']),
    'xfs': (make_with('mkfs.xfs', '-q'), ['xfs']),
    'swap': (make_with('mkswap'), ['swap']),
    'partitions': (partition_table, ['dos', 'partition table']),
    'luks': (put(0, LUKS), ['crypto_LUKS', 'encrypted volume']),
    'store': (lambda path: mkfs('--force', path).check_returncode(), ['hitrain store']),
    'bytes': (put(300000, b'x'), ['data of a kind that is not known']),
}


@pytest.mark.parametrize('kind', HOLDS)
def test_what_is_recognised_is_named_and_kept(tmp_path, kind):
    make, words = HOLDS[kind]
    path = new_file(tmp_path / 'device', 512 * MIB if kind == 'xfs' else SIZE)
    make(path)
    before = path.read_bytes()
    done = mkfs(path)
    assert done.returncode != 0 and '--force' in done.stderr and str(path) in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert path.read_bytes() == before
    done = mkfs('--force', path)
    assert done.returncode == 0 and words[0] in done.stdout, done.stdout + done.stderr


def test_one_member_that_holds_something_keeps_all_from_being_formatted(tmp_path):
    blank, other, made = new_file(tmp_path / 'blank'), new_file(tmp_path / 'other'), tmp_path / 'made'
    partition_table(other)
    done = mkfs(blank, other)
    assert done.returncode != 0 and str(other) in done.stderr
    assert blank.read_bytes() == bytes(SIZE)
    done = mkfs('--size=32M', made, other)
    assert done.returncode != 0 and not made.exists()


def test_a_file_behind_a_loop_device_is_in_use(tmp_path):
    path = new_file(tmp_path / 'backing')
    loop = subprocess.run(['losetup', '-f', '--show', path], check=True, capture_output=True, text=True).stdout.strip()
    try:
        for args in [], ['--force']:
            done = mkfs(*args, path)
            assert done.returncode != 0 and loop in done.stderr, done.stderr
        assert path.read_bytes() == bytes(SIZE)
    finally:
        subprocess.run(['losetup', '-d', loop], check=True)
    wait_for(lambda: mkfs(path).returncode == 0, 'nobody has the loop device open')


def test_swap_is_in_use(tmp_path):
    path = new_file(tmp_path / 'swap')
    path.write_bytes(bytes(SIZE))  # no holes
    os.chmod(path, 0o600)
    subprocess.run(['mkswap', path], check=True, capture_output=True)
    if subprocess.run(['swapon', path], capture_output=True).returncode != 0:
        pytest.skip('swapon is not possible here')
    try:
        done = mkfs('--force', path)
    finally:
        subprocess.run(['swapoff', path], check=True)
    assert done.returncode != 0 and 'swap' in done.stderr, done.stderr


def test_what_device_mapper_uses_is_in_use(tmp_path):
    if shutil.which('dmsetup') is None:
        pytest.skip('dmsetup is not installed')
    path, name = new_file(tmp_path / 'backing'), f'hitrain-test-{os.getpid()}'
    loop = subprocess.run(['losetup', '-f', '--show', path], check=True, capture_output=True, text=True).stdout.strip()
    try:
        made = subprocess.run(['dmsetup', 'create', name, '--table', f'0 {SIZE // 512} linear {loop} 0'],
                              capture_output=True)
        if made.returncode != 0:
            pytest.skip('device mapper is not possible here')
        try:
            done = mkfs('--force', loop)
            assert done.returncode != 0 and loop in done.stderr, done.stderr
        finally:
            subprocess.run(['dmsetup', 'remove', name], check=True)
    finally:
        subprocess.run(['losetup', '-d', loop], check=True)
