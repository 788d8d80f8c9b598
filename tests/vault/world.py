# SPDX-License-Identifier: Apache-2.0
"""An engine in memory whose verbs happen in an order that a test chooses, and actors that use it.

Each actor is a thread that runs the product's code. One thread runs at a time, from one verb to the next: `World.go` lets it do
one verb. So a story is the same each time, whatever the machine does. A script decides for each verb whether its
answer is lost, before or after the deed, and which deed lands late.
"""
import collections
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'mount-helpers/vault'))
from errors import Missing, Unknown  # noqa: E402

Object = collections.namedtuple('Object', 'data born')


class Ends(BaseException):
    """The actor's process ends here."""


class Seat:
    """The engine as one actor sees it."""

    def __init__(self, world):
        self.world, self.actor = world, None

    def _do(self, verb, deed, *words):
        world = self.world
        if self.actor:
            self.actor.at = verb, words[0]
            self.actor.wait()
        fault = world.fault(self.actor, verb, words[0])
        if fault == 'lost-before':
            raise Unknown('no answer')
        if fault == 'late':
            world.late.append((deed, words))
            raise Unknown('no answer')
        result = deed(*words)
        if fault == 'lost-after':
            raise Unknown('no answer')
        return result

    def put_new(self, key, parts):
        data = bytes(parts) if isinstance(parts, (bytes, bytearray, memoryview)) else b''.join(parts)
        return self._do('put_new', self.world.put_new, key, data)

    def get(self, key, offset=0, length=None):
        return memoryview(self._do('get', self.world.read, key))[offset:None if length is None else offset + length]

    def list(self, prefix, after=''):
        yield from self._do('list', self.world.list, prefix, after)

    def remove(self, key):
        self._do('remove', self.world.remove, key)

    def pause(self, why):
        """Of a writer that waits for others."""
        if self.actor:
            self.actor.at = 'pause', ''
            self.actor.wait()


class Actor(threading.Thread):
    def __init__(self, world, name, work):
        super().__init__(daemon=True, name=name)
        self.world, self.work, self.ends, self.error = world, work, False, None
        self.may_go, self.stands, self.over = threading.Lock(), threading.Lock(), False     # taken: nobody passes
        self.may_go.acquire()
        self.stands.acquire()
        self.verbs, self.at = 0, None    # at: the verb and key before which it stands

    def run(self):
        self.may_go.acquire()
        try:
            if not self.ends:
                self.work(self.seat)
        except Ends:
            pass
        except BaseException as e:     # the test raises it
            self.error = e
        self.over = True
        self.stands.release()

    def wait(self):
        """Before each verb."""
        self.stands.release()
        self.may_go.acquire()
        if self.ends:
            raise Ends
        self.verbs += 1


class World:
    """changed: called after each deed that changed something. fault(actor, verb, key): a fault or None."""

    def __init__(self):
        self.objects, self.now, self.late, self.actors = {}, 0, [], []
        self.changed = lambda key: None
        self.fault = lambda actor, verb, key: None

    def seat(self):
        return Seat(self)

    def actor(self, name, work):
        a = Actor(self, name, work)
        a.seat = Seat(self)
        a.seat.actor = a
        self.actors.append(a)
        a.start()
        return a

    def go(self, actor):
        """One verb of an actor. False: it is over."""
        if actor.over:
            return False
        actor.may_go.release()
        actor.stands.acquire()
        if actor.error:
            raise actor.error
        return not actor.over

    def go_to(self, actor, verb, prefix=''):
        """An actor goes on until it stands before a verb."""
        while self.go(actor):
            if actor.at[0] == verb and actor.at[1].startswith(prefix):
                return
        raise AssertionError(f'{actor.name} ended without {verb} {prefix}')

    def finish(self, actor):
        while self.go(actor):
            pass

    def end(self, actor):
        """kill -9 of the actor."""
        if not actor.over:
            actor.ends = True
            actor.may_go.release()
            actor.stands.acquire()

    def end_all(self):
        for actor in self.actors:
            self.end(actor)
            actor.join()

    def land(self):
        """Late deeds happen."""
        late, self.late = self.late, []
        for deed, words in late:
            deed(*words)

    def put_new(self, key, data):
        if key in self.objects:
            return False
        self.objects[key] = Object(data, self.now)
        self.changed(key)
        return True

    def read(self, key):
        if key not in self.objects:
            raise Missing(f'no object {key}')
        return self.objects[key].data

    def list(self, prefix, after):
        return [(k, len(self.objects[k].data), self.now - self.objects[k].born)
                for k in sorted(k for k in self.objects if k.startswith(prefix) and k > after)]

    def remove(self, key):
        if self.objects.pop(key, None):
            self.changed(key)
