# SPDX-License-Identifier: Apache-2.0
"""What an engine promises, tried: the protocol needs create-if-absent and lists that are current. All objects lie below
probe/, and go at the end; a collector removes those of a probe that was ended.
"""
import collections
import os
import threading
import time

from errors import Missing
from objects import Failure

RACES, RACERS = 3, 8
TRIPS = 5

Report = collections.namedtuple('Report', 'largest trip_ns faults')     # faults: sentences; of all that is not kept


class Refused(Failure):
    """The engine does not keep what several writers need."""


def is_created_once(engine, key):
    """Two puts of one key: the first one made it, the second one did not, and its bytes are those of the first."""
    first = engine.put_new(key, b'first')
    second = engine.put_new(key, b'second')
    return first and not second and bytes(engine.get(key)) == b'first'


def need_create(engine):
    """Refused if the engine lets a second put win. Three requests, for writers; probe() tries more."""
    key = f'probe/{os.urandom(8).hex()}/create'
    try:
        if not is_created_once(engine, key):
            raise Refused(refusal(engine))
    finally:
        engine.remove(key)


def refusal(engine):
    return (f'{engine.url} does not keep create-if-absent, so two archivers could both believe that they wrote a step. One archiver alone '
            'may use it: --single-writer. Restore and verify work')


def race(engine, key):
    """How many of several racers made the key, and whether it has the bytes of one who did."""
    won, errors, start = [], [], threading.Barrier(RACERS)

    def run(i):
        start.wait()
        try:
            if engine.put_new(key, b'racer %d' % i):
                won.append(i)
        except Failure as e:
            errors.append(e)
    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(RACERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return len(won), bytes(engine.get(key)) in [b'racer %d' % i for i in won]


def probe(engine):
    """Report. Failure if the engine cannot be used at all."""
    prefix = f'probe/{os.urandom(8).hex()}/'
    keys, faults = [prefix + 'create', *(f'{prefix}race{i}' for i in range(RACES))], []
    largest = engine.hello()
    try:
        if not is_created_once(engine, keys[0]):
            faults.append('a key was made twice')
        for key in keys[1:]:
            winners, own = race(engine, key)
            if winners != 1 or not own:
                faults.append(f'{winners} of {RACERS} racers made one key')
        listed = [key for key, _, _ in engine.list(prefix)]
        if listed != sorted(keys):
            faults.append('a list lacks what was just put')
        if bytes(engine.get(keys[0], 1, 3)) != b'irs' or bytes(engine.get(keys[0], 3, 100)) != b'st':
            faults.append('a part of an object is not what was asked for')
        trips = [time_of(lambda: engine.get(keys[0])) for _ in range(TRIPS)]
        faults += removal_faults(engine, prefix, keys[0])
    finally:
        for key in keys:
            engine.remove(key)
    return Report(largest, sorted(trips)[TRIPS // 2], faults)


def removal_faults(engine, prefix, key):
    engine.remove(key)
    engine.remove(key)
    if key in [k for k, _, _ in engine.list(prefix)]:
        yield 'a list has what was just removed'
    try:
        engine.get(key)
    except Missing:
        return
    yield 'what was removed can still be read'


def time_of(call):
    begin = time.monotonic_ns()
    call()
    return time.monotonic_ns() - begin
