# SPDX-License-Identifier: Apache-2.0
"""hitrainctl steps ROOT --vault=URL/JOB: below the kept steps, or with them as JSON, those that the vault has and the store has not."""
import json

from kept import lines_of
from objects import Failure
from store import printable, size_text
from vault_command import HEX_SHOWN, KINDS, time_text
import engine
import heads
import jobs
import words


def is_kept(entry, kept):
    """Of several ranks each store has the digest of its own rank, and not that of the step."""
    return any(k['step'] == entry.step and (entry.ranks > 1 or k.get('digest', entry.digest.hex()) == entry.digest.hex()) for k in kept)


def run(given):
    (root, url), o = words.parse(given, 2, 2, 'a model root and the URL of a job', json=None)
    place, job, step = engine.split_job(url)
    if step is not None:
        raise words.Usage('--vault: expected URL/JOB without a step')
    kept, shown = lines_of(root), engine.shown(url)
    with engine.open(place) as e:
        head = jobs.highest(e, jobs.open_vault(e), job)
    if not head.n:
        raise Failure(f'{engine.shown(place)}: there is no job {job}')
    rest = [x for x in head.entries if x.kind != heads.FULL or not is_kept(x, kept)]
    if o['json']:
        print(json.dumps({'path': root, 'steps': kept, 'vault': shown, 'in_vault': [
            {'step': x.step, 'last': x.last, 'kind': KINDS[x.kind], 'ranks': x.ranks, 'bytes': x.bytes, 'time_ns': x.time, 'digest': x.digest.hex()}
            for x in rest]}))
        return
    print(printable(f'only in {shown}; hitrainctl restore {shown}@STEP DIR brings one back:'))
    for x in rest:
        number = str(x.step) if x.kind == heads.FULL else f'{x.step}-{x.last}'
        print(f'{number:>12}  {time_text(x.time)}  {KINDS[x.kind]:6}  {size_text(x.bytes):>10}  {x.digest.hex()[:HEX_SHOWN]}...')
