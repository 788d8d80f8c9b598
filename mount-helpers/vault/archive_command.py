# SPDX-License-Identifier: Apache-2.0
"""hitrainctl archive ROOT STEP URL/JOB|-: one kept step to a vault, or through a pipe."""
import os

from archive import digest_of, to_pipe
from kept import Kept
from pipe import Output
from say import note
from store import size_text
import words


def run(given):
    paths, o = words.parse(given, 2, 3, 'a model root, a kept step, and the URL of a job or -', follow=None, log=None,
                           every=words.count, rank=words.rank, rate=words.size, digest=words.digest, json=None,
                           single_writer=None, **{'from': words.text})
    root, step, url = (*paths[:2], paths[-1]) if len(paths) == 3 else (paths[0], None, paths[1])
    if step is None or o['follow'] or o['log'] or o['every']:
        raise words.Usage('expected a model root, a kept step, and the URL of a job or -')
    if url != '-' and (o['from'] or o['digest']):
        raise words.Usage('--from and --digest are for a pipe: a vault knows what it has')
    if o['digest'] and not o['from']:
        raise words.Usage('--digest is that of the step of --from')
    if url == '-':
        return pipe(root, Kept(root, step), o)
    raise words.Usage(f'{url}: no vault')


def pipe(root, kept, o):
    if os.isatty(1):
        raise words.Usage('the step is for a file or a pipe, and standard output is a terminal')
    base = digest = None
    if o['from']:
        base = Kept(root, o['from'])
        digest = o['digest'] or base.digest() or digest_of(base, 'of the base read').digest
    end = to_pipe(kept, Output(1, kept.step, o['rate']), base, digest)
    if base:
        note(f'{root}: sent step {kept.name} as changes since step {base.name}, digest {digest.hex()}: {end.entries} '
             f'entries, {size_text(end.bytes)} of content')
    else:
        note(f'{root}: sent step {kept.name}: {end.entries} entries, {size_text(end.bytes)} of content, digest '
             f'{end.digest.hex()}')
