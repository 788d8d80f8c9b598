# SPDX-License-Identifier: Apache-2.0
"""bench/replay on a mount: made traces are played, saved ones are converted, and wrong ones are refused."""
import json
import os
import re
import subprocess
import sys

from conftest import BIN, MIB, ROOT, SECONDS_MAX

REPLAY = BIN.parent / 'bench/replay'
CONVERT = ROOT / 'bench/trace_convert.py'


def replay(*args, text=None, code=0):
    done = subprocess.run([REPLAY, *map(str, args)], input=text, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def made(folder, *words):
    path = folder / f'{words[0]}.txt'
    path.write_text(replay('generate', *words))
    return path


def play(trace, folder, *words):
    replay('make', trace, folder)
    return json.loads(replay('play', trace, folder, *words))


def simulated(trace, *words):
    lines = replay('simulate', trace, 'json=1', *words).splitlines()
    return {r['policy']: r for r in map(json.loads, lines)}


def convert(path, said=''):
    done = subprocess.run([sys.executable, CONVERT, path], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0 and said in done.stderr and bool(said) == bool(done.stderr), done.stderr
    return done.stdout


def save(path, *entries, end='\n'):
    """A saved trace of (operation, tensor, offset, bytes, seconds), whose numbers begin at 7. None: one is missing."""
    lines = []
    for seq, entry in enumerate(entries, 7):
        if entry:
            op, number, offset, size, at = entry
            lines.append(json.dumps({'seq': seq, 'op': op, 'id': number, 'path': f't{number}', 'offset': offset,
                                     'bytes': size, 'time_ns': int(at * 1e9)}))
    path.write_text('\n'.join(lines) + end)
    return path


def entries_of(text):
    return [line for line in text.splitlines()[1:] if line.split()[0] not in ('tensor', 'parameter')]


def examples(kind):
    return re.findall(rf'^```{kind}\n(.*?)^```', (ROOT / 'bench/replay/README.md').read_text(), re.M | re.S)


def test_the_commands_of_the_documents(store):
    """With a smaller model; a trace is saved while it plays."""
    save, generate, play_, simulate = examples('sh')
    first, convert_ = save.splitlines()
    assert 'shape=1.3B' in generate and 'compute=20' in generate and '--follow' in first
    script = [generate.replace('1.3B', '125M scale=1%').replace('compute=20', 'compute=0.2'), play_.splitlines()[0],
              first.split('#')[0] + '& saver=$!', play_.splitlines()[1],
              'until grep -q \'"op": *"boundary"\\|"op": *"step\' saved.jsonl; do sleep 0.1; done; kill $saver; wait $saver || true',
              convert_.replace('trace.txt', 'saved.txt'), simulate, 'test -s saved.txt']
    text = '\n'.join(script).replace('build/bench/replay', str(REPLAY)).replace('bench/trace_convert.py', str(CONVERT))
    (store.point / 'run').mkdir()
    text = text.replace('FOLDER', str(store.point / 'run')).replace('MOUNTPOINT', str(store.point))
    done = subprocess.run(['bash', '-eu', '-c', text], cwd=store.folder, env={**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}'},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0 and '"steps"' in done.stdout, done.stdout + done.stderr


def test_the_example_of_the_documents(tmp_path):
    example, = examples('trace')
    assert 'gradient' in example
    (tmp_path / 'trace').write_text(example)
    assert len(simulated(tmp_path / 'trace')) > 1


def test_a_made_trace_trains_a_model_and_computes_as_long_as_it_says(store):
    trace = made(store.folder, 'gpt', 'shape=125M', 'scale=1%', 'steps=4', 'compute=0.2', 'activations=20K', 'durable=2')
    got = play(trace, store.point)
    assert got['steps'] == 2
    assert 0.19 < got['compute_s'] < 0.21
    assert abs(got['step_s'] - got['compute_s'] - got['stall_s']) < 1e-4
    assert got['hits'] > 0 and got['device_written_bytes'] > 0
    assert os.getxattr(store.point / 'model', 'user.hitrain.step') == b'4'
    text = trace.read_text().splitlines()
    params = {words[1]: int(words[2]) for words in map(str.split, text) if words[0] == 'parameter'}
    of_step = text[len(text) // 2:text.index('commit', len(text) // 2)]
    assert got['written_bytes'] >= sum(params[l.split()[1]] for l in of_step if l.startswith('gradient'))


def test_swapped_files_that_do_not_fit_come_from_the_device(store):
    folder = store.point / 'swap'
    folder.mkdir()
    trace = made(store.folder, 'llama-swap', 'shape=125M', 'scale=3%', 'steps=4')
    got, expected = play(trace, folder, 'noise=25%'), simulated(trace, 'dram=32M')
    assert got['compute_s'] == 0
    assert got['read_bytes'] > 32 * MIB and got['written_bytes'] > 32 * MIB
    assert got['device_read_bytes'] >= expected['belady']['read_bytes'] / 2
    assert expected['ideal']['of_ideal'] == 1 and expected['belady']['of_belady_hits'] == 1
    assert expected['lru']['hits'] <= expected['belady']['hits'] <= expected['ideal']['hits']


def test_a_saved_trace_becomes_one_that_can_be_simulated(store):
    trace = made(store.folder, 'gpt', 'shape=125M', 'scale=1%', 'steps=3', 'compute=1')
    play(trace, store.point)
    saved = subprocess.run([BIN / 'hitrainctl', 'trace', 'save', store.point], capture_output=True, text=True,
                           timeout=SECONDS_MAX, check=True).stdout
    path = store.folder / 'saved'
    path.write_text(saved)
    text = convert(path)
    lines = [line.split() for line in text.splitlines()]
    was = [line.split() for line in trace.read_text().splitlines()]
    assert sum(words[0] == 'parameter' for words in lines) == sum(words[0] == 'parameter' for words in was)
    order = [words for words in lines if words[0] in ('gradient', 'step', 'commit')]
    number = {words[1]: f'model/t{n}' for n, words in enumerate(w for w in was if w[0] in ('parameter', 'tensor'))}
    expected = [[words[0], *(number[name] for name in words[1:])] for words in was if words[0] in ('gradient', 'step')]
    assert order == expected
    computed = sum(int(words[1]) for words in lines if words[0] == 'compute')
    assert computed > 1e6
    result = json.loads(replay('simulate', '-', 'json=1', 'policy=lru', text=text))
    assert result['accesses'] > 0


def test_names_of_a_saved_trace_are_words(mnt, tmp_path):
    for name in 'a b', '#c', '%', b'\xff\n'.decode(errors='surrogateescape'):
        (mnt / name).write_bytes(bytes(100))
    (mnt / 'a b').rename(mnt / 'gone')
    (mnt / 'a b').write_bytes(bytes(100))
    (mnt / 'gone').unlink()
    with open(tmp_path / 'saved', 'w', errors='surrogateescape') as out:
        subprocess.run([BIN / 'hitrainctl', 'trace', 'save', mnt], stdout=out, timeout=SECONDS_MAX, check=True)
    names = [line.split()[1] for line in convert(tmp_path / 'saved').splitlines() if line.startswith('tensor')]
    assert len(names) == len(set(names)) == 5
    assert {'a%20b', '#c', '%25', '%ff%0a'} < set(names)
    assert replay('simulate', '-', text=convert(tmp_path / 'saved'))


def test_requests_become_accesses_of_the_ranges_that_they_fill(tmp_path):
    requests = [(0, 10), (90, 10), (20, 5), (10, 10), (80, 10), (85, 5)]
    text = convert(save(tmp_path / 'saved', *(('read', 1, *r, 0) for r in requests), ('write', 1, 0, 50, 0),
                         ('write', 1, 50, 50, 0), ('write', 1, 50, 50, 0)))
    assert entries_of(text) == ['read t1 0 25', 'read t1 80 20', 'read t1 85 5', 'write t1', 'write t1 50 50']
    text = convert(save(tmp_path / 'saved', *(('read', 1, 2 * i * 7919 % 20000, 1, 0) for i in range(10000))))
    read = [tuple(map(int, line.split()[2:])) for line in entries_of(text)]
    assert sorted(read) == [(at, 1) for at in range(0, 20000, 2)]


def test_a_sparse_gradient_is_one_of_its_step(tmp_path):
    text = convert(save(tmp_path / 'saved', ('read', 1, 0, 8, 0), ('gradient', 1, 0, 0, 0), ('gradient', 1, 0, 0, 0),
                         ('step', 0, 0, 0, 0), ('gradient', 1, 0, 0, 0), ('step', 0, 0, 0, 0)))
    assert entries_of(text) == ['read t1', 'gradient t1', 'step', 'gradient t1', 'step']
    assert 'parameter t1 8 16' in text


def test_entries_that_are_missing_are_said_and_their_step_is_left(tmp_path):
    step, tensor = ('step', 0, 0, 0, 3), ('read', 1, 0, 8, 3)
    text = convert(save(tmp_path / 'saved', tensor, None, None, ('write', 1, 0, 8, 5), step, tensor),
                   said='2 entries are missing before line 2')
    assert entries_of(text) == ['read t1', 'step', 'read t1']
    text = convert(save(tmp_path / 'saved', tensor, None, ('write', 1, 0, 8, 5)), said='1 entries are missing')
    assert entries_of(text) == ['read t1', 'write t1']
    path = save(tmp_path / 'saved', tensor)
    path.write_text(2 * path.read_text())
    assert entries_of(convert(path, said='line 2 does not follow')) == ['read t1', 'read t1']


def test_a_long_pause_and_an_unfinished_line_are_no_obstacle(tmp_path):
    path = save(tmp_path / 'saved', ('read', 1, 0, 8, 0), ('read', 1, 0, 8, 1e9), end='\n{"seq": 9, "op"')
    text = convert(path)
    assert entries_of(text) == ['read t1', 'compute 86400000000', 'read t1']
    assert replay('simulate', '-', text=text)


def test_figures_of_a_trace_without_waits_are_numbers():
    for text in '', 'tensor a 1\nprefetch a\n':
        rows = replay('simulate', '-', 'json=1', 'dram=1G', text=f'hitrain trace 1\n{text}').splitlines()
        assert all(0 <= json.loads(row, parse_constant=float)['of_ideal'] <= 1 for row in rows) and len(rows) == 4


def test_hints_without_a_store_have_a_message(tmp_path):
    trace = tmp_path / 'trace'
    for hint, said in ('prefetch a', True), ('evict a', True), ('read a', False):
        trace.write_text(f'hitrain trace 1\ntensor a 10\n{hint}\n')
        replay('make', trace, tmp_path)
        done = subprocess.run([REPLAY, 'play', trace, tmp_path], capture_output=True, text=True, timeout=SECONDS_MAX)
        assert done.returncode == 0 and ('hints have no effect' in done.stderr) == said


def test_tensors_of_any_size_and_steps_of_some_parameters_are_played(store):
    trace = store.folder / 'trace'
    trace.write_text('hitrain trace 1\nparameter p 5000 30000\nparameter q 4096 8192\ntensor a 1\ntensor b 1048577\n'
                     'gradient p\nread p 4999 1\nwrite b 1048576 1\nread b 4095 2\nstep\ngradient q\nread a\nevict a\n'
                     'prefetch a\nprefetch q\nstep\ncommit\nread q\n')
    got = play(trace, store.point, 'warm=0')
    assert got['steps'] == 2 and got['read_bytes'] * 2 == 1 + 2 + 1 + 4096
    assert os.getxattr(store.point / 'model', 'user.hitrain.step') == b'2'
    assert [os.getxattr(store.point / f'model/t{n}', 'user.hitrain.dtype') for n in (0, 1)] == [b'bf16', b'f32']


def test_wrong_traces_are_refused_with_line_and_reason(tmp_path):
    trace = tmp_path / 'trace'
    trace.write_text('hitrain trace 1\ntensor a 10\nread a 5 6\n')
    for command in ('simulate', trace), ('make', trace, tmp_path), ('play', trace, tmp_path):
        assert 'line 3: not a number of bytes from there' in replay(*command, code=1)
    many = ''.join(['hitrain trace 1\n', *(f'parameter {i} 17592186044416 17592186044416\n' for i in range(32769))])
    assert 'line 32770: more than 2^60 bytes' in replay('simulate', '-', text=many, code=1)
    centuries = 'hitrain trace 1\n' + 'compute 86400000000\n' * 220000
    assert 'a hundred years' in replay('simulate', '-', text=centuries, code=1)
    trace.write_text('hitrain trace 1\n')
    for word in 'read=0', 'dram=0', 'dram=-1', 'noise=200%', 'warm=x', 'speed=1':
        assert word in replay('simulate', trace, word, code=2)
    assert 'usage' in replay('generate', 'bert', code=2)
    assert 'compute=1e15' in replay('generate', 'gpt', 'compute=1e15', code=2)
    saved = tmp_path / 'saved'
    for line in 'x', '{"op": "read"}', '{"op": "fly", "id": 1, "time_ns": 1}', '[]', '[' * 100000:
        saved.write_text(f'{line}\n')
        done = subprocess.run([sys.executable, CONVERT, saved], capture_output=True, text=True, timeout=SECONDS_MAX)
        assert done.returncode == 1 and 'line 1: ' in done.stderr and 'Traceback' not in done.stderr
