# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/ that prepare what a bench measures, and that no other test runs."""
import json
import os
import subprocess

from conftest import BIN, MIB, SECONDS_MAX, run

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
