# SPDX-License-Identifier: Apache-2.0
"""Every example of the pages for users runs and prints what the page says.

A fenced block of the kind "console" has commands after "$ " (and "> " for further lines), and below each its output, where
"..." stands for anything. All blocks of a page run in one shell, in an empty folder.
"""
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, remove_folder, run
from models import new_model

PAGES = 'guide.md', 'files.md', 'operations.md', 'tuning.md', 'faq.md'


def examples(page, chapter=''):
    """[(command, expected output)] of a page, or of one chapter."""
    found = []
    text = (ROOT / 'docs' / page).read_text()
    text = text[text.index(chapter):] if chapter else text
    text = text[:text.index('\n## ', 1)] if chapter else text
    for block in re.findall(r'^```console\n(.*?)^```', text, re.M | re.S):
        assert block.startswith('$ '), block
        for text in re.split(r'^\$ ', block, flags=re.M)[1:]:
            lines = text.splitlines()
            n = 1
            while n < len(lines) and lines[n].startswith('> '):
                n += 1
            command = '\n'.join([lines[0], *(line[2:] for line in lines[1:n])])
            found.append((command, lines[n:]))
    return found


def pattern(lines):
    """A line "..." is any number of lines, and "..." in a line any text. Blanks count as one."""
    parts = []
    for line in lines:
        if line == '...':
            parts.append(r'(?:[^\n]*\n)*?')
        else:
            words = [r'[^\n]*?'.join(map(re.escape, word.split('...'))) for word in line.split()]
            parts.append(r' *' + r' *(?: )'.join(words) + r' *\n')
    return re.compile(''.join(parts) + r'\Z')


@pytest.fixture
def folder():
    path = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-page-'))
    yield path
    assert not remove_folder(path), 'the page leaves a mount behind'


@pytest.mark.parametrize('page', PAGES)
def test_examples_print_what_the_page_says(folder, page):
    commands = examples(page)
    assert commands
    # mount(8) looks for its helpers beside itself only, so `mount -t hitrain` is the helper here. PyTorch is Debian's.
    script = ['mount() { shift 2; mount.hitrain "$@"; }', 'python3() { /usr/bin/python3 "$@"; }']
    for i, (command, _) in enumerate(commands):
        script += [f'echo "@@{i}@@"', command]
    environment = {**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}', 'PYTHONPATH': str(ROOT / 'optim/torch'), 'LC_ALL': 'C'}
    with open(folder / '.output', 'w') as output:  # a daemon that stays keeps no pipe of the test
        done = subprocess.run(['bash', '-eu', '-c', '\n'.join(script)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                              stdout=output, stderr=subprocess.STDOUT, timeout=5 * SECONDS_MAX)  # of the whole page
    text = (folder / '.output').read_text(errors='replace')
    printed = re.split(r'@@\d+@@\n', text)[1:]
    assert done.returncode == 0, f'{commands[len(printed) - 1][0]}\n{text[-2000:]}'
    assert len(printed) == len(commands), text
    for (command, lines), got in zip(commands, printed):
        if got and not got.endswith('\n'):
            got += '\n'
        assert pattern(lines).match(got), f'$ {command}\n--- the page says\n' + '\n'.join(lines) + f'\n--- it prints\n{got}'


# Page and kind of block: how many the page has, and the test that runs them.
RUN_BY = {
    ('bench/replay/README.md', 'sh'): (4, 'mount/test_replay.py'),
    ('bench/replay/README.md', 'trace'): (1, 'mount/test_replay.py'),
    ('README.md', 'python'): (1, 'optim/test_torch_readme.py'),
    ('README.md', 'sh'): (1, 'mount/test_readme.py'),
    ('docs/guide.md', 'sh'): (3, 'system/test_package.py'),
    ('docs/guide.md', 'fstab'): (1, 'mount/test_documents.py'),
    ('docs/offload.md', 'python'): (3, 'optim/test_torch_microbatches.py'),
    ('docs/pytorch.md', 'python'): (5, 'optim/test_torch_readme.py'),
    ('docs/operations.md', 'sh'): (2, 'mount/test_documents.py'),
    ('docs/pytorch.md', 'sh'): (2, 'mount/test_documents.py'),
    ('docs/vault.md', 'python'): (1, 'mount/test_vault_examples.py'),
    ('docs/vault.md', 'sh'): (5, 'mount/test_vault_examples.py'),
    ('docs/frameworks/accelerate.md', 'python'): (1, 'ecosystem/test_transformers.py'),
    ('docs/frameworks/checkpoints.md', 'python'): (1, 'ecosystem/test_distributed.py'),
    ('docs/frameworks/ddp.md', 'python'): (1, 'ecosystem/test_distributed.py'),
    ('docs/frameworks/deepspeed.md', 'python'): (2, 'ecosystem/test_deepspeed.py'),
    ('docs/frameworks/deepspeed.md', 'sh'): (1, 'ecosystem/test_deepspeed.py'),
    ('docs/frameworks/fsdp.md', 'python'): (1, 'ecosystem/test_distributed.py'),
    ('docs/frameworks/lightning.md', 'python'): (1, 'ecosystem/test_lightning.py'),
    ('docs/frameworks/megatron.md', 'python'): (1, 'ecosystem/test_megatron.py'),
    ('docs/frameworks/peft.md', 'python'): (1, 'ecosystem/test_transformers.py'),
    ('docs/frameworks/torchtitan.md', 'python'): (1, 'ecosystem/test_torchtitan.py'),
    ('docs/frameworks/trainer.md', 'python'): (1, 'ecosystem/test_transformers.py'),
}
COMMAND = re.compile(r'^\s*(?:\$ |import |from |(?:sudo |apt |pip |make |mkfs|mount |umount|hitrain))', re.M)


def test_every_example_is_run_by_a_test():
    """A block without a kind is a drawing. Who adds an example adds its row and the test."""
    found = {}
    for path in [ROOT / 'README.md', *sorted(ROOT.glob('docs/**/*.md')), ROOT / 'bench/replay/README.md']:
        page = str(path.relative_to(ROOT))
        block, text = re.compile(r'^ *```(\w*)\n(.*?)^ *```$', re.M | re.S), path.read_text()
        for kind, body in block.findall(text):
            if kind == 'console':
                assert path.name in PAGES, f'{page}: no test runs its examples'
            elif kind:
                found[page, kind] = found.get((page, kind), 0) + 1
            else:
                assert not COMMAND.search(body), f'{page}: an example without a kind:\n{body}'
        assert page == 'README.md' or not re.search(r'\n\n    \S', block.sub('', text)), f'{page}: an example without a fence'
    assert found == {row: count for row, (count, _) in RUN_BY.items()}
    for (page, _), (_, test) in RUN_BY.items():
        name = pathlib.Path(page)
        text = (ROOT / 'tests' / test).read_text()
        assert name.name in text or f"page('{name.stem}')" in text, f'{test} does not read {page}'


def test_the_line_of_fstab(folder):
    """As mount(8) gives it to its helper, on a store in a file and with less memory."""
    line, = re.findall(r'^```fstab\n(.*)\n```', (ROOT / 'docs/guide.md').read_text(), re.M)
    device, point, kind, options, *rest = line.split()
    assert device.startswith('/dev/') and point.startswith('/') and kind == 'hitrain' and rest == ['0', '0']
    run('mkfs.hitrain', '--size=16M', folder / 'store.img')
    (folder / 'mnt').mkdir()
    run('mount.hitrain', folder / 'store.img', folder / 'mnt', '-o', re.sub('dram=[^,]*', 'dram=16M', options))
    assert os.path.ismount(folder / 'mnt')
    run('umount.hitrain', folder / 'mnt')


def bits_of(model):
    """Its parameter, state and step."""
    state = model / '.hitrain/state/w'
    return [(model / 'w').read_bytes(), *((state / name).read_bytes() for name in sorted(os.listdir(state))), os.getxattr(model, 'user.hitrain.step')]


def test_commands_of_kept_steps(make_store, tmp_path):
    """Of a model after 100 steps. The other machine is another store of this one."""
    commands = re.search(r'^## Kept steps.*?^```sh\n(.*?)^```', (ROOT / 'docs/pytorch.md').read_text(), re.M | re.S).group(1)
    here, there = make_store('64M').mount(), make_store('64M').mount()
    model = here / 'model'
    model.mkdir()
    for name, value in ('dtype', b'f32'), ('optimizer', b'adamw lr=0.5'), ('step', b'99'):
        os.setxattr(model, f'user.hitrain.{name}', value)
    (model / 'w').write_bytes(bytes(4096))
    (model / '.hitrain/grad/w').write_bytes(b'\0\0\x80\x3f' * 1024)
    run('hitrainctl', 'commit', model)
    trained = bits_of(model)
    assert '| ssh host hitrainctl restore' in commands
    stores = {'/mnt/a/': f'{here}/', '/mnt/b/': f'{there}/'}
    script = re.sub('/mnt/[ab]/', lambda m: stores[m.group()], commands.replace('ssh host ', ''))
    done = subprocess.run(['bash', '-eu', '-o', 'pipefail', '-c', script], env={**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}'},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bits_of(here / 'b') == bits_of(there / 'model') == bits_of(there / 'later') == bits_of(model) == trained
    assert trained[0] != bytes(4096) and len(trained) == 5 and 'w' in done.stdout.split() and not os.listdir(model / '.hitrain/snap')


def run_lines(text, here, there):
    script = text.replace('/mnt/a/', f'{here}/').replace('/mnt/b/', f'{there}/').replace('ssh copy ', '').replace('ssh host ', '')
    done = subprocess.run(['bash', '-eu', '-o', 'pipefail', '-c', script], env={**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}'},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ANOTHER_COPY = """hitrainctl snapshot /mnt/a/model again
hitrainctl archive --from=base /mnt/a/model again - | ssh host hitrainctl restore --base=/mnt/b/copy - /mnt/b/new
ssh host hitrainctl snapshot /mnt/b/new again
ssh host hitrainctl forget /mnt/b/copy base
ssh host rm -r /mnt/b/copy
hitrainctl archive /mnt/a/model - --follow --from=again | ssh host hitrainctl restore - /mnt/b/new --follow
"""


def test_commands_of_a_copy_that_follows(make_store):
    """All blocks, one after the other: the model goes on between them, and ends with another history. Senders end at its present step."""
    page = (ROOT / 'docs/operations.md').read_text()
    copies, use = re.findall(r'^```sh\n(.*?)^```', page, re.M | re.S)
    here, there = make_store('64M').mount(), make_store('64M').mount()
    model = new_model(here / 'model', 'adamw lr=0.5 durable_every=8 redo=on redo_keep=64')
    (model / 'w').write_bytes(bytes(4096))
    run('hitrainctl', 'commit', model)

    def step(number):
        (model / '.hitrain/grad/w').write_bytes(struct.pack('f', number) * 1024)
        run('hitrainctl', 'step', model)

    def walk(text):
        run_lines(re.sub(r'(--follow --from=\S+)', r'\1 --once', text), here, there)
    step(1)
    first = copies.split('hitrainctl archive /mnt/a/model - --follow')[0]
    walk(first)
    step(2)
    step(3)
    walk(copies[len(first):])
    assert bits_of(there / 'copy') == bits_of(model)
    run('hitrainctl', 'rollback', model, 'base')
    step(5)
    first = ANOTHER_COPY.split('hitrainctl archive /mnt/a/model - --follow')[0]
    walk(first)
    step(6)
    walk(ANOTHER_COPY[len(first):])
    walk(use.replace('/mnt/b/copy', '/mnt/b/new'))
    assert bits_of(there / 'new') == bits_of(model) and not (there / 'copy').exists()
    for root in model, there / 'new':
        (root / '.hitrain/grad/w').write_bytes(struct.pack('f', 7) * 1024)
        run('hitrainctl', 'commit', root)
    assert bits_of(there / 'new') == bits_of(model)


def test_copies_by_tools_are_what_the_page_says(make_store):
    """Parameters and attributes of files, and no model. The page names the tools."""
    row, = re.findall(r'^\| (`cp.*?) \|.*the copy is no model, and moments and step are lost\*\* \|$', (ROOT / 'docs/operations.md').read_text(), re.M)
    tools = re.findall('`(.*?)`', row)
    mnt = make_store('64M').mount()
    model = new_model(mnt / 'model', 'adamw lr=0.5')
    (model / 'w').write_bytes(bytes(4096))
    os.setxattr(model / 'w', 'user.hitrain.shape', b'32,32')
    (model / '.hitrain/grad/w').write_bytes(struct.pack('f', 2) * 1024)
    run('hitrainctl', 'commit', model)
    assert [tool.split()[0] for tool in tools] == ['cp', 'rsync', 'tar']
    for tool in tools:
        to = mnt / f'by {tool.split()[0]}'
        to.mkdir()
        if tool.startswith('tar'):
            subprocess.run(['sh', '-c', f'{tool} -C "$1" -c model | {tool} -C "$2" -x', 'sh', mnt, to], check=True)
        elif shutil.which(tool.split()[0]):
            subprocess.run([*tool.split(), model, to], check=True)
        else:
            continue
        copy = to / 'model'
        assert (copy / 'w').read_bytes() == (model / 'w').read_bytes() != bytes(4096)
        assert os.getxattr(copy / 'w', 'user.hitrain.shape') == b'32,32' and os.getxattr(copy / 'w', 'user.hitrain.dtype') == b'f32'
        with pytest.raises(OSError, match='No data available'):
            os.getxattr(copy, 'user.hitrain.step')


def manual_examples(page, word):
    text = (ROOT / 'mount-helpers/man' / page).read_text()
    found = [block.replace('\\-', '-') for block in re.findall(r'^\.EX\n(.*?)^\.EE', text, re.M | re.S) if word in block]
    assert found, f'{page} has no example with {word}'
    return found


def test_examples_of_the_manual_copy_a_model_with_its_state(make_store):
    """Those that send it, to another store and to a copy that follows."""
    for text in manual_examples('hitrainctl.8', 'hitrainctl archive'):
        here, there = make_store('64M').mount(), make_store('64M').mount()
        model = here / 'model'
        model.mkdir()
        for name, value in ('dtype', b'f32'), ('optimizer', b'adamw lr=0.5 redo=on redo_keep=64 durable_every=8'), ('step', b'99'):
            os.setxattr(model, f'user.hitrain.{name}', value)
        (model / 'w').write_bytes(bytes(4096))
        (model / '.hitrain/grad/w').write_bytes(struct.pack('f', 2) * 1024)
        run('hitrainctl', 'commit', model)
        run('hitrainctl', 'snapshot', model)
        run_lines(re.sub(r'(--follow --from=\S+)', r'\1 --once', text), here, there)
        assert bits_of(there / 'model') == bits_of(model) and bits_of(model)[0] != bytes(4096)


def test_commands_of_shards(make_store):
    shards = re.search(r'^### Shards.*?^### ', (ROOT / 'docs/pytorch.md').read_text(), re.M | re.S).group()
    one, = re.findall(r'^```sh\n(.*?)^```', shards, re.M | re.S)
    here = make_store('64M').mount()
    new_model(here / 'model', 'adamw lr=0.5', w=bytes(6 << 20))
    assert '3 ranks' in (said := run_lines(one, here, here)) and said.splitlines()[-1] == 'w'


def test_the_manual_has_every_event():
    manual = (ROOT / 'mount-helpers/man/hitrainctl.8').read_text().replace('\\-', '-')
    rows = re.findall(r'^\.BR ([a-z-]+) " \((error|warn|info)\)"$', manual, re.M)
    source = (ROOT / 'tiering/base/event.h').read_text()
    codes = re.findall(r'E\([A-Z_]+, "([a-z-]+)", (INFO|WARN|ERROR),', source)
    assert len(codes) > 30 and sorted(rows) == sorted((code, level.lower()) for code, level in codes)


def test_a_wrong_page_is_noticed():
    assert pattern(['a ... c', '...', 'd']).match('a  b c\nx\ny\nd\n')
    for text in 'a b\nd\n', 'a b c\nx\n', 'a b c\nd\ne\n', '':
        assert not pattern(['a ... c', '...', 'd']).match(text)
    assert pattern([]).match('') and not pattern([]).match('x\n')
