# SPDX-License-Identifier: Apache-2.0
"""Lists of the scheme rados, over a pool that is played: pages of one list see one moment, and a new list sees the present."""
import threading
import types

import world    # noqa: F401  finds the product
import scheme_rados

PREFIX = 'job/a/head/'


class Pool:
    def __init__(self):
        self.keys = []

    def add(self, first, last):
        self.keys += [f'{PREFIX}{n:016x}' for n in range(first, last)]

    def list_objects(self):
        return [types.SimpleNamespace(key=key) for key in self.keys]

    def aio_stat(self, key, done):
        return types.SimpleNamespace(wait_for_complete_and_cb=lambda: done(None, 1, None), get_return_value=lambda: 0)


def seat(pool):
    r = object.__new__(scheme_rados.Rados)
    r.lock, r.snapshot, r.meta, r.data = threading.Lock(), (None, 0, []), pool, pool
    r._now = lambda: 0
    return r


def test_a_list_behind_a_key_sees_what_came_after_the_last_list(monkeypatch):
    """A rank that waits for the next head asks so."""
    monkeypatch.setattr(scheme_rados, 'rados', types.SimpleNamespace(Error=OSError))
    pool = Pool()
    r = seat(pool)
    pool.add(1, 3)
    assert len(r.list(PREFIX, '', 0)[0]) == 2
    pool.add(3, 4)
    for after in pool.keys[0], pool.keys[1]:
        assert r.list(PREFIX, after, 0)[0][-1][0] == pool.keys[2]


def test_pages_of_a_list_see_one_moment(monkeypatch):
    monkeypatch.setattr(scheme_rados, 'rados', types.SimpleNamespace(Error=OSError))
    pool = Pool()
    r = seat(pool)
    pool.add(0, 2 * scheme_rados.PAGE)
    page, more = r.list(PREFIX, '', 0)
    pool.add(2 * scheme_rados.PAGE, 3 * scheme_rados.PAGE)
    assert more and len(page) == scheme_rados.PAGE
    page, more = r.list(PREFIX, page[-1][0], 0)
    assert not more and len(page) == scheme_rados.PAGE
    assert r.list(PREFIX, page[-1][0], 0)[0][0][0] == pool.keys[2 * scheme_rados.PAGE]
