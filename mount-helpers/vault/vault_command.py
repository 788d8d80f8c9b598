# SPDX-License-Identifier: Apache-2.0
"""hitrainctl vault VERB URL: makes a vault, tries its engine, shows what is in it, checks that, drops steps and pins, collects
garbage. What one verb alone needs is imported by it: most commands take less time than that.
"""
import json
import time

from errors import EngineError, Missing, NoVault, Unknown
from objects import Failure
from store import printable, size_text
import engine as engines
import heads
import jobs
import stop
import words

HEX_SHOWN = 12
KINDS = {heads.FULL: 'full', heads.LOGGED: 'logged'}


def run(given):
    if not given or given[0] not in VERBS:
        raise words.Usage('expected vault init, probe, list, verify, forget, gc or unpin, and a URL')
    stop.catch()
    return VERBS[given[0]](given[1:])


def say(o, about, text):
    print(json.dumps(about) if o['json'] else printable(text), flush=True)


# ---- init, probe ----

def init(given):
    (url,), o = words.parse(given, 1, 1, 'the URL of a vault', grace=words.seconds, json=None)
    grace = o['grace'] or 24 * 3600
    if grace < heads.GRACE_SECONDS_MIN:
        raise words.Usage('--grace: at least 1h: what an archiver writes must not be old before it has its step')
    with engines.open(url) as engine:
        made = jobs.make_vault(engine, grace)
    say(o, {'vault': url, 'uuid': made.uuid.hex(), 'grace': grace}, f'{url}: a vault, uuid {made.uuid.hex()}')


def do_probe(given):
    (url,), o = words.parse(given, 1, 1, 'the URL of a vault', json=None)
    from probe import probe, refusal
    with engines.open(url) as engine:
        found = probe(engine)
        about = {'vault': url, 'largest': found.largest, 'round_trip_ns': found.trip_ns, 'faults': found.faults}
        if found.faults:
            if o['json']:
                print(json.dumps(about), flush=True)
            raise Failure(f'{"; ".join(found.faults)}: {refusal(engine)}')
    say(o, about, f'{url}: create-if-absent holds (3 x 8 racers), list is current, largest object {size_text(found.largest)}, '
                  f'{found.trip_ns / 1e6:.3g} ms a round trip')


# ---- list ----

def find(url):
    """(engine, Vault, job or None, step or None) of URL, or of URL/JOB[@STEP]. The caller closes the engine."""
    engine = engines.open(url)
    try:
        return engine, jobs.open_vault(engine), None, None
    except Failure as e:
        engine.close()
        if isinstance(e, Unknown) or isinstance(e, EngineError) and not isinstance(e, (NoVault, Missing)):
            raise
        first = e
    try:
        vault_url, job, step = engines.split_job(url)
    except Failure:
        raise first from None
    engine = engines.open(vault_url)
    try:
        return engine, jobs.open_vault(engine), job, step
    except Failure as e:
        engine.close()
        raise Failure(f'{vault_url}: {e}') from None


def do_list(given):
    (url,), o = words.parse(given, 1, 1, 'the URL of a vault, a job or a step', json=None)
    engine, vault, job, step = find(url)
    with engine:
        if step is not None:
            list_ranks(engine, vault, job, step, o)
        elif job:
            list_steps(engine, vault, job, o)
        else:
            list_jobs(engine, vault, o)


def list_jobs(engine, vault, o):
    if not o['json']:
        print(f'{"job":24} {"epoch":>6} {"ranks":>5} {"steps":>6} {"newest":>10}  time')
    for job in jobs.list_jobs(engine):
        stop.check()
        head = jobs.highest(engine, vault, job)
        if not head.n:
            continue        # manifests of a job that never had a head
        newest = head.entries[-1] if head.entries else None
        say(o, {'job': job, 'epoch': head.epoch, 'ranks': head.ranks, 'steps': len(head.entries), 'writer': head.writer,
                'newest': newest and newest.last},
            f'{job:24} {head.epoch:6} {head.ranks:5} {len(head.entries):6} {newest.last if newest else "-":>10}  '
            f'{time_text(newest.time) if newest else ""}')


def list_steps(engine, vault, job, o):
    head = jobs.highest(engine, vault, job)
    if not head.n:
        raise Failure(f'{engine.url}: there is no job {job}')
    if not o['json']:
        print(f'{"step":>12} {"ranks":>5}  {"kind":6} {"bytes":>10} {"new":>10}  {"time":19}  digest')
    for e in head.entries:
        number = str(e.step) if e.kind == heads.FULL else f'{e.step}-{e.last}'
        say(o, {'step': e.step, 'last': e.last, 'epoch': e.epoch, 'ranks': e.ranks, 'kind': KINDS[e.kind], 'bytes': e.bytes, 'new': e.new,
                'time_ns': e.time, 'digest': e.digest.hex()},
            f'{number:>12} {e.ranks:5}  {KINDS[e.kind]:6} {size_text(e.bytes):>10} {size_text(e.new):>10}  {time_text(e.time)}  '
            f'{e.digest.hex()[:HEX_SHOWN]}...')


def list_ranks(engine, vault, job, step, o):
    """What each rank has of a step."""
    found = jobs.read_step(engine, vault, job, step)[1]
    if not o['json']:
        print(f'{"rank":>5}  {"kind":6} {"bytes":>10} {"new":>10}  {"time":19}  {"host":16}  digest')
    for s in found.summaries:
        say(o, {'step': step, 'epoch': found.epoch, 'rank': s.rank, 'ranks': s.ranks, 'kind': KINDS[s.kind], 'bytes': s.bytes,
                'new': s.new, 'time_ns': s.time, 'host': s.host, 'lineage': s.lineage, 'digest': s.digest.hex()},
            f'{s.rank:5}  {KINDS[s.kind]:6} {size_text(s.bytes):>10} {size_text(s.new):>10}  {time_text(s.time)}  {s.host:16}  '
            f'{s.digest.hex()[:HEX_SHOWN]}...')


def time_text(ns):
    try:
        return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ns / 1e9))
    except (OverflowError, ValueError):
        return '?' * 19


# ---- verify ----

def verify(given):
    (url,), o = words.parse(given, 1, 1, 'the URL of a vault, a job or a step', json=None)
    from verifier import Verifier, steps_of
    engine, vault, job, step = find(url)
    with engine:
        verifier, steps = Verifier(engine, vault), 0
        for name in [job] if job else jobs.list_jobs(engine):
            for found in steps_of(engine, vault, name, step, verifier):
                steps += 1
                verifier.step(name, found.step, found.epoch, found.summaries)
        if not steps and not verifier.damage:
            raise Failure(f'{url}: there is no step')
        say(o, {'vault': url, 'steps': steps, 'bytes': verifier.bytes, 'damage': verifier.damage},
            f'{url}: {steps} steps, {size_text(verifier.bytes)} read, ' + (f'{len(verifier.damage)} are damaged' if verifier.damage else 'all well'))
        if verifier.damage:
            raise Failure('; '.join(verifier.damage[:8]) + '. What is damaged can be dropped: hitrainctl vault forget')


# ---- forget, gc ----

def forget(given):
    (url, *steps), o = words.parse(given, 2, 1000, 'the URL of a job, and steps', json=None)
    try:
        numbers = [words.number(step) for step in steps]
    except ValueError:
        raise words.Usage('expected numbers of steps') from None
    vault_url, job, step = engines.split_job(url)
    if step is not None:
        raise words.Usage('expected the URL of a job without @, and then steps')
    with engines.open(vault_url) as engine:
        vault = jobs.open_vault(engine)
        for number in numbers:
            gone = jobs.forget(engine, vault, job, number)
            logged = sum(e.last - e.step + 1 for e in gone if e.kind == heads.LOGGED)
            say(o, {'job': job, 'forgot': number, 'logged': logged},
                f'forgot step {number}' + (f' and {logged} logged steps after it' if logged else ''))


def gc(given):
    (url,), o = words.parse(given, 1, 1, 'the URL of a vault', json=None)
    from collect import Collector
    with engines.open(url) as engine:
        vault = jobs.open_vault(engine)
        done = Collector(engine, vault, said=lambda line: print(printable(f'hitrainctl: {line}'), flush=True)).run()
    say(o, {'vault': url, **done._asdict()},
        f'{done.garbage} segments are garbage; {done.segments} are older than {time_of(vault.grace)} and were removed'
        + (f', with {done.manifests} manifests, {done.steps} steps and {done.heads} heads' if done.manifests + done.steps + done.heads else ''))


# ---- pins ----

def do_unpin(given):
    (url, *path), o = words.parse(given, 1, 2, 'the URL of a vault, and a mount point or --store=UUID', store=words.digest, json=None)
    if (len(path) == 1) == bool(o['store']):
        raise words.Usage('expected a mount point, or --store=UUID of a store that is gone')
    import stores
    with engines.open(url) as engine:
        jobs.open_vault(engine)
        if path:
            gone = stores.unpin(stores.mount_of(path[0]), engine)
        else:
            gone = [key for job in jobs.list_jobs(engine) for key, _, _ in jobs.pins_of(engine, job, o['store'])]
            for key in gone:
                engine.remove(key)
    say(o, {'vault': url, 'unpinned': gone}, f'{url}: {len(gone)} pins went')


def time_of(seconds):
    return f'{seconds // 3600} h' if seconds % 3600 == 0 else f'{seconds // 60} min'


VERBS = {'init': init, 'probe': do_probe, 'list': do_list, 'verify': verify, 'forget': forget, 'gc': gc, 'unpin': do_unpin}
