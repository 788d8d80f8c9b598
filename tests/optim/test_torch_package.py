# SPDX-License-Identifier: Apache-2.0
"""The client as a package: it installs, and its version is the programs'."""
import os
import re
import subprocess
import zipfile

import pytest

from trainer import LR, TOP, shared_root as root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain.integrations import decay_groups

PACKAGE = TOP / 'optim/torch/hitrain'
PYTHON = '/usr/bin/python3'
SECONDS_MAX = 300
# Makes one step with the package that is installed in argv[1], and with nothing of the source tree.
TRAINER = """
import sys, hitrain, torch
assert hitrain.__file__.startswith(sys.argv[1]), hitrain.__file__
p = torch.nn.Parameter(torch.zeros(4))
with hitrain.SGD([('p', p)], sys.argv[2], lr=1.0) as optimizer:
    p.grad = torch.ones(4)
    optimizer.step()
print(p.tolist(), hitrain.__version__)
"""


def run(*command, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'PYTHONPATH')}
    done = subprocess.run([str(c) for c in command], cwd=TOP, env={**env, **environment}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f'{" ".join(map(str, command))}\n{done.stdout}'
    return done.stdout


def modules():
    return {f'hitrain/{path.name}' for path in PACKAGE.glob('*.py')} | {'hitrain/py.typed'}


def train_with(folder, root):
    return run(PYTHON, '-c', TRAINER, folder, root, PYTHONPATH=str(folder))


def test_the_package_brings_its_modules():
    run(PYTHON, '-c', 'import hitrain; hitrain.checkpoint.export_safetensors; hitrain.distributed.Shard; hitrain.integrations.decay_groups',
        PYTHONPATH=str(PACKAGE.parent))


def test_the_version_is_that_of_the_programs():
    text = (TOP / 'include/hitrain/version.h').read_text()
    assert hitrain.__version__ == re.search(r'HT_VERSION "([^"]+)"', text).group(1)


def test_make_installs_and_uninstalls_it(root, tmp_path):
    """The programs are not installed here: that could build them with other settings than those of this run."""
    where = f'{tmp_path}/usr/lib/python'
    run('make', '--no-print-directory', 'install-client', f'DESTDIR={tmp_path}', 'PYTHONDIR=/usr/lib/python')
    installed = {os.path.relpath(os.path.join(f, n), where) for f, _, names in os.walk(where) for n in names}
    assert installed == modules()
    assert train_with(where, root).startswith(f'[-1.0, -1.0, -1.0, -1.0] {hitrain.__version__}')
    run('make', '--no-print-directory', 'uninstall', f'DESTDIR={tmp_path}', 'PYTHONDIR=/usr/lib/python')
    assert os.listdir(where) == []


def test_it_goes_where_the_systems_python_finds_it(tmp_path):
    said = run('make', '-n', '--no-print-directory', 'install-client', f'DESTDIR={tmp_path}')
    where = set(re.findall(rf"{tmp_path}(/[^']*)/hitrain'", said))
    assert len(where) == 1 and where < set(run(PYTHON, '-c', 'import sys; print("\\n".join(sys.path))').split('\n'))


def test_another_prefix_has_it_below(tmp_path):
    said = run('make', '-n', '--no-print-directory', 'install-client', f'PREFIX={tmp_path}')
    where, = re.findall(r"install -d '(.*)/hitrain'", said)
    assert re.fullmatch(rf'{tmp_path}/lib/python3\.[0-9]+/site-packages', where)


def test_programs_are_installed_without_python(tmp_path):
    options = [f'DESTDIR={tmp_path}', f'O={tmp_path}/build', 'PYTHON=/nonexistent/python3']
    said = run('make', '-n', '--no-print-directory', 'install', *options)
    assert 'there is no /nonexistent/python3, so the PyTorch client is not installed' in said
    assert f"'{tmp_path}/usr/local/bin'" in said and f"'{tmp_path}/usr/local/share/man/man8'" in said
    with pytest.raises(AssertionError, match='no folder for packages of /nonexistent/python3'):
        run('make', '-n', '--no-print-directory', 'install-client', *options)


def test_clean_removes_what_pip_leaves(tmp_path):
    """pip would install modules from there that the package has no more. All is removed in a copy of the folder."""
    left = [tmp_path / 'optim/torch/build/lib/hitrain', tmp_path / 'optim/torch/hitrain.egg-info']
    for goal in ('clean', 'distclean'):
        for folder in left:
            folder.mkdir(parents=True)
        run('make', '--no-print-directory', '-C', tmp_path, '-f', TOP / 'Makefile', goal)
        assert os.listdir(tmp_path / 'optim/torch') == []


def venv_with(wheel, place):
    """Its Python. It has the system's PyTorch, as the wheel's dependency."""
    run(PYTHON, '-m', 'venv', '--system-site-packages', '--without-pip', place)
    run(place / 'bin/python', '-m', 'pip', 'install', '--quiet', '--no-index', wheel)
    return place / 'bin/python'


def test_a_wheel_has_all_of_it(root, tmp_path):
    out = tmp_path / 'build'
    run('make', '--no-print-directory', 'wheel', f'O={out}')
    wheel, = out.glob('wheel/*-any.whl')
    with zipfile.ZipFile(wheel) as z:
        assert {n for n in z.namelist() if '.dist-info/' not in n} == modules()
    own = venv_with(wheel, tmp_path / 'venv')
    assert run(own, '-c', TRAINER, tmp_path / 'venv', root).startswith(f'[-1.0, -1.0, -1.0, -1.0] {hitrain.__version__}')

    wheel, = out.glob('wheel/*-manylinux_*.whl')
    own = venv_with(wheel, tmp_path / 'with programs')
    script = tmp_path / 'train.py'
    script.write_text("import os; open(os.environ['HITRAIN_STORE'] + '/a file', 'w').write('x')")
    run('env', '-u', 'HITRAIN_BIN', f'XDG_RUNTIME_DIR={tmp_path}', 'PATH=/usr/bin:/bin', own, '-m', 'hitrain', 'run', script,
        '--store', tmp_path / 's.img', '--size=64M', '--dram=24M', '--options=staging=24M')
    assert 'clean' in run(own.parent / 'hitrain-fsck', '-n', tmp_path / 's.img')
    assert 'needs python3' not in run(own.parent / 'hitrainctl', 'report', '--help')
    used = run('ldd', next((tmp_path / 'with programs').rglob('hitrain/bin/hitrain')))
    assert used.count('/hitrain/bin/../lib/') == 3 and 'not found' not in used


def test_groups_as_trainers_make_them(root):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[3].weight.requires_grad_(False)
    groups = decay_groups(model, 0.1)
    assert [(g['weight_decay'], [n for n, _ in g['params']]) for g in groups] == [
        (0.1, ['0.weight', '1.weight']), (0.0, ['1.bias', '2.weight', '2.bias', '3.bias'])]
    with hitrain.AdamW(groups, root, lr=LR) as optimizer:
        assert [g['weight_decay'] for g in optimizer.param_groups] == [0.1, 0.0]
        assert sorted(os.listdir(root)) == sorted(n for g in groups for n, _ in g['params'])
    assert [g['weight_decay'] for g in decay_groups(torch.nn.Linear(3, 3, bias=False), 0.5)] == [0.5]
