# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/vault.md, as the page has them, on each engine: only places and numbers of ranks are replaced."""
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import uuid

import pytest

from calls import run_threads
from conftest import BIN, ROOT, SECONDS_MAX, wait_for
from engines import place, servers  # noqa: F401 (fixtures)
from models import new_model
from test_documents import bits_of
from test_roots import command, word
from test_shards import reshard
from test_vault_follow import Program, each_way, entries, looks_end  # noqa: F401 (a fixture)
from test_vault_shards import in_store, keep_own, owners_of, run, shards_of

import archiver as archivers

PAGE = (ROOT / 'docs/vault.md').read_text()
KEPT, ARCHIVE, SHARD, ELSEWHERE, COLD = re.findall(r'^```sh\n(.*?)^```', PAGE, re.M | re.S)
TRAINER, = re.findall(r'^```python\n(.*?)^```', PAGE, re.M | re.S)
# In place of a trainer: steps 1000 and 2000, and what an evening is for the archiver, which says in the output what it has archived.
TRAIN = """
import os, struct, subprocess, sys, time
root = sys.argv[1]
for step in 1000, 2000:
    os.setxattr(root, 'user.hitrain.step', b'%d' % (step - 1))
    with open(root + '/.hitrain/grad/w', 'wb') as f:
        f.write(struct.pack('f', step) * 1024)
    subprocess.run(['hitrainctl', 'commit', root], check=True)
    while 'archived step %d:' % step not in open('output').read():
        time.sleep(0.05)
"""
EVAL = 'import sys; print("read", len(open(sys.argv[1] + "/w", "rb").read()), "bytes")'


def at(url, job):
    base, mark, query = url.partition('?')
    return f'{base}{job}{mark}{query}'


def placed(text, url, quote="'", **folders):
    """folders: what stands for /mnt/NAME."""
    text = re.sub(r's3://ckpt/vault((?:/[\w@]+)?)', lambda m: quote + at(url, m[1]) + quote, text)
    for name, folder in folders.items():
        text = text.replace(f'/mnt/{name}/', f'{folder}/')
    return text


def shell(text, folder):
    """What it prints. What it leaves in the background ends with it."""
    functions = 'trap \'kill $(jobs -p) 2>/dev/null || true\' EXIT; python3() { /usr/bin/python3 "$@"; }\n'
    with open(folder / 'output', 'w+') as output:
        done = subprocess.run(['bash', '-eu', '-c', functions + text], cwd=folder, env={**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}'},
                              stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=2 * SECONDS_MAX)
    said = (folder / 'output').read_text()
    assert done.returncode == 0, said
    return said


@each_way
def test_kept_steps_and_the_model_on_another_machine(place, make_store, tmp_path):     # noqa: F811
    a, b = [make_store('64M').mount() for _ in range(2)]
    url = place.url(f'night-{uuid.uuid4().hex[:8]}')
    model = new_model(a / 'model', 'adamw lr=0.5')
    (model / 'w').write_bytes(bytes(4096))
    run('hitrainctl', 'commit', model)
    work = tmp_path / 'work'
    work.mkdir()
    (work / 'train.py').write_text(TRAIN)
    (work / 'eval.py').write_text(EVAL)
    said = shell(placed(KEPT, url, a=a), work)
    assert 'create-if-absent holds' in said and 'forgot step 1000\n' in said and 'were removed' in said
    assert len(re.findall(r'^ +[12]000 +1 +full ', said, re.M)) == 2 and [e[0] for e in entries(url)] == [2000]
    said = shell(placed(ELSEWHERE, url, b=b), work)
    assert bits_of(b / 'lastweek') == bits_of(b / 'model') == bits_of(model) and 'read 4096 bytes' in said
    assert bits_of(model)[0] != bytes(4096)


def test_cold_models(make_store, tmp_path):
    b, vault = make_store('512M').mount(), tmp_path / 'vault'
    model = new_model(b / 'model', 'adamw lr=0.5')
    (model / 'w').write_bytes(os.urandom(2 << 20))
    word(model, 'step', '2000')
    command(model, 'snapshot week')
    run('hitrainctl', 'vault', 'init', vault)
    run('hitrainctl', 'archive', model, 'week', f'{vault}/llama')
    was = bits_of(model)
    word(model, 'step', '3000')
    work = tmp_path / 'work'
    work.mkdir()
    (work / 'eval.py').write_text(EVAL)
    said = shell(placed(COLD, '').replace('/mnt/lustre/vault', str(vault)).replace('/mnt/b', str(b)), work)
    assert f'read {2 << 20} bytes' in said and bits_of(b / 'lastweek') == was
    assert word(b / 'model', 'cold') == 'llama@3000' and bits_of(b / 'model')[:-1] == was[:-1]
    assert 'cold' not in {name.rpartition('.')[2] for name in os.listxattr(b / 'model')} and [e[0] for e in entries(str(vault))] == [2000, 3000]


@pytest.fixture
def host(tmp_path):
    """start(text, name): a line of the page as a program of its own."""
    made = []

    def start(text, name):
        program, *words = shlex.split(text)
        assert program == 'hitrainctl'
        made.append(Program(*words, log=tmp_path / f'{name}.log'))
        return made[-1]

    yield start
    for p in made:
        p.kill()


def archive_of(url, root, rank, ranks):
    assert '--rank=2of4' in ARCHIVE
    return placed(ARCHIVE.replace('--rank=2of4', f'--rank={rank}of{ranks}').replace('/mnt/hitrain/model', str(root)), url)


@each_way
def test_a_job_on_four_hosts_loses_one_and_goes_on_with_three(place, make_store, host):     # noqa: F811
    url = place.url(f'job-{uuid.uuid4().hex[:8]}')
    run('hitrainctl', 'vault', 'init', url)
    points, wholes = [make_store('512M').mount() for _ in range(4)], []
    for r, point in enumerate(points):
        wholes.append(in_store(point / 'whole', 'f32'))
        run('hitrainctl', 'clone', wholes[r], '1', point / 'model')
        keep_own(point / 'model', wholes[r], r, owners_of(wholes[r], '4'))
        word(point / 'model', 'step', '100')
        command(point / 'model', 'snapshot')
    archivers_of = [host(archive_of(url, point / 'model', r, 4), f'old{r}') for r, point in enumerate(points)]
    for program in archivers_of:
        program.wait_for(lambda: [e[0] for e in entries(url, 'job7')] == [100], 'step 100 of all ranks is there', 3 * SECONDS_MAX)
    archivers_of[2].process.send_signal(signal.SIGSTOP)     # the host that is lost
    assert '--shard=2of3 --lost=2' in SHARD
    for new, old in enumerate((0, 1, 3)):
        archivers_of[old].end()
        text = placed(SHARD.replace('2of3', f'{new}of3'), url, hitrain=points[old])
        subprocess.run(['bash', '-euc', f'PATH={BIN}:$PATH; {text}'], check=True, timeout=SECONDS_MAX)
        reshard(wholes[old], 3, '--lost=2')
        assert shards_of(points[old] / 'next', new, 3) == shards_of(wholes[old], new, 3)
    three = []
    for new, old in enumerate((0, 1, 3)):
        word(points[old] / 'next', 'step', '200')
        command(points[old] / 'next', 'snapshot')
        three.append(host(archive_of(url, points[old] / 'next', new, 3), f'new{new}'))
    for program in three:
        program.wait_for(lambda: [e[0] for e in entries(url, 'job7')] == [100, 200], 'three go on', 3 * SECONDS_MAX)
    back = archivers_of[2].process
    back.send_signal(signal.SIGCONT)
    assert back.wait(SECONDS_MAX) == archivers.FENCED and 'vault-fenced' in archivers_of[2].said()


@each_way
def test_a_new_host_takes_the_place_of_a_lost_one(place, make_store, host, monkeypatch):     # noqa: F811
    """The trainer of the page, on four hosts that share a machine here. All go on with the bits that they would have had."""
    torch = pytest.importorskip('torch')
    monkeypatch.syspath_prepend(str(ROOT / 'optim/torch'))
    monkeypatch.setenv('HITRAIN_BIN', str(BIN))
    import hitrain
    url, at_rank = place.url(f'trainer-{uuid.uuid4().hex[:8]}'), make_store('256M').mount()
    run('hitrainctl', 'vault', 'init', url)
    barrier, said, seen = threading.Barrier(4, timeout=SECONDS_MAX), [0] * 4, [{}, {}]

    def trainer(rank, turn, last):
        def least(n):
            said[rank] = n
            barrier.wait()
            result = min(said)
            barrier.wait()
            return result
        model = torch.nn.Linear(5, 3)
        text = placed(TRAINER if turn else TRAINER.replace('resume=True', 'resume=False'), url, quote='', hitrain=at_rank / f'{rank}')
        names = {'hitrain': hitrain, 'rank': rank, 'least': least, 'barrier': barrier.wait, 'model': model}
        exec(text, names)
        with names['optimizer'] as optimizer:
            for step in range(optimizer.committed_step, last):
                seen[turn][rank, step] = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.grad = torch.full_like(p, (step + 1) * (rank + 1) % 7 - 3)
                optimizer.step()

    def job(turn, last):
        run_threads([threading.Thread(target=trainer, args=(rank, turn, last)) for rank in range(4)])

    for rank in range(4):
        (at_rank / f'{rank}').mkdir()
    job(0, 103)
    programs = [host(archive_of(url, at_rank / f'{rank}/model', rank, 4), f'{rank}') for rank in range(4)]
    for program in programs:
        program.wait_for(lambda: entries(url, 'job7'), 'a step of all ranks is there', 3 * SECONDS_MAX)
        program.end()
    command(at_rank / '2/model', 'forget *')
    shutil.rmtree(at_rank / '2')
    job(1, 103)
    assert sorted(seen[1]) == [(rank, step) for rank in range(4) for step in range(100, 103)]
    assert all(torch.equal(p, q) for key in seen[1] for p, q in zip(seen[0][key], seen[1][key]))
    wait_for(lambda: word(at_rank / '2/model', 'step') == '103', 'it has gone on')
