# SPDX-License-Identifier: Apache-2.0
"""hitrainctl archive ROOT STEP URL/JOB|-: one kept step to a vault, or through a pipe."""
import importlib
import json
import os
import time

from archive import digest_of, to_pipe, to_vault
from kept import Kept
from lease import Lease
from objects import Failure
from pipe import Output
from probe import need_create
from say import note
from store import printable, size_text
from writer import Restart, Writer
import engine
import frames
import identity
import jobs
import words

RESTARTS_MAX = 3
SILENT_S_MAX = 120
PAUSE_S = 1


def run(given):
    paths, o = words.parse(given, 2, 3, 'a model root, a kept step, and the URL of a job or -', follow=None, log=None,
                           every=words.count, rank=words.rank, rate=words.size, digest=words.digest, json=None,
                           single_writer=None, compress=None, once=None, since=words.number, **{'from': words.text})
    root, step, url = (*paths[:2], paths[-1]) if len(paths) == 3 else (paths[0], None, paths[1])
    if o['compress'] and url == '-':
        raise words.Usage('--compress is for a vault: compress a pipe with a program of its own')
    if o['compress']:
        frames.need()
    if o['single_writer'] and o['rank'] and o['rank'][1] > 1:
        raise words.Usage('--single-writer is for one archiver alone, and --rank for several')
    if step is None and o['follow']:
        return importlib.import_module('follow').run_archive(root, url, o)
    if step is None or o['follow'] or o['log'] or o['every'] or o['once'] or o['since']:
        raise words.Usage('expected a model root, a kept step, and the URL of a job or -')
    if url != '-' and (o['from'] or o['digest']):
        raise words.Usage('--from and --digest are for a pipe: a vault knows what it has')
    if o['digest'] and not o['from']:
        raise words.Usage('--digest is that of the step of --from')
    if url == '-':
        return pipe(root, Kept(root, step), o)
    return vault(root, Kept(root, step), url, o)


def vault(root, kept, url, o):
    place, job, at = engine.split_job(url)
    if at is not None:
        raise words.Usage('expected URL/JOB without a step: a step has the number that the model gave it')
    with engine.open(place) as e:
        summary = put(root, kept, e, jobs.open_vault(e), job, o['rank'] or (0, 1), o['rate'], bool(o['single_writer']), bool(o['compress']))
    report(root, kept, url, summary, o['json'])


def put(root, kept, e, vault, job, rank=(0, 1), rate=None, single_writer=False, compress=False):
    """The Summary of a kept step that the job lists. Failure."""
    if not single_writer:
        need_create(e)
    store, host, pause = identity.store(root), identity.host(), Pause()
    lease = Lease(e, vault, store, identity.boot(), host, identity.LEASES, pause)
    writer = Writer(e, vault, job, *rank, host, store, pause, single_writer, gives=False)
    summary, listed = repeated(lambda: to_vault(root, kept, e, vault, writer, lease, rate, compress))
    if not listed:
        raise Failure(f'{root}: step {kept.step} is not in {job}: a newer step is there, or a rank has none')
    lease.close()       # after a failure a thread may still put
    return summary


def repeated(archive):
    for _ in range(RESTARTS_MAX):
        try:
            return archive()
        except Restart as e:
            why = e
            note(f'{e}; it begins again')
    raise why


class Pause:
    """pause(why) of a program that archives one step: waits for other ranks, and not long for a silent vault."""

    def __init__(self):
        self.since, self.told = None, ''

    def __call__(self, why):
        if isinstance(why, Exception):
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since > SILENT_S_MAX:
                raise why
        else:
            self.since = None
        if str(why) != self.told:
            note(str(why))
            self.told = str(why)
        time.sleep(PAUSE_S)


def report(root, kept, url, s, as_json):
    if as_json:
        print(json.dumps({'path': root, 'step': kept.step, 'name': kept.name, 'digest': s.digest.hex(), 'bytes': s.bytes,
                          'new_bytes': s.new}))
    else:
        print(printable(f'{root}: archived step {kept.step} to {engine.shown(url)}: {size_text(s.bytes)} of content, '
                        f'{size_text(s.new)} new, digest {s.digest.hex()}'))


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
