# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed optimizer with its state in a store. Megatron itself needs GPUs: megatron_fake.py has its fields and its flow."""
import pathlib
import re

from page import LINES_MAX, TOP, Page, shared_store  # first: it makes the client importable

HERE = pathlib.Path(__file__).parent


def runs(store, folder):
    script = (HERE / 'megatron_ranks.py').read_text()

    def run(part, processes, ends=0):
        before = f'import os\nos.environ.update(PART={part!r}, FOLDER={str(folder)!r}, FAKE={str(HERE)!r})\n'
        said = Page.of_script(script, store.mountpoint, folder).run(folder.name, before, processes=processes, ends=ends)
        assert ends or len(re.findall('all is well', said)) == processes, said
    return run


def test_steps_checkpoints_kills_and_other_ranks(shared_store, tmp_path):
    """The numbers of the optimizer that it takes the place of; a checkpoint again, after a kill within a step, with other ranks."""
    run = runs(shared_store, tmp_path)
    run('train', 2)
    run('die', 2, ends=1)
    run('resume', 4)
    run('resume', 1)


def test_what_is_refused(shared_store, tmp_path):
    runs(shared_store, tmp_path)('refused', 2)


def test_the_lines_of_the_page():
    """They attach; megatron_ranks.py does the same with a place, which Megatron's ranks give otherwise."""
    script, = re.findall(r'^```python\n(.*?)^```', (TOP / 'docs/frameworks/megatron.md').read_text(), re.M | re.S)
    assert script.count('\n') <= LINES_MAX and "hitrain.megatron.attach(optimizer, '/mnt/hitrain/job')" in script
