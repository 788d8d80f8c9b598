# SPDX-License-Identifier: Apache-2.0
"""Clients of random calls that follow from a seed: the number of answered calls determines the content.

As a program: random_calls.py files|model FOLDER SEED. A byte on stdout for each call that was answered; ends with an
error.
"""
import copy
import os
import random
import struct
import sys

DURABLE_EVERY = 3
ELEMENTS = 3000


class Files:
    """Six files that are written, cut, copied, renamed, removed and get an attribute. The state: name to content and attribute."""

    def __init__(self, seed):
        self.random, self.state = random.Random(seed), {}

    @staticmethod
    def prepare(folder):
        os.mkdir(folder)

    def next(self):
        """The next call; updates the state."""
        r, state = self.random, self.state
        name = f'f{r.randrange(6)}'
        if name not in state or r.random() < 0.4:
            data = bytes([r.randrange(1, 256)]) * r.randrange(1, 200_000)
            at = r.randrange(len(state[name][0]) + 5000) if name in state else 0
            old, mark = state.get(name, (b'', b''))
            old = old.ljust(at, b'\0')
            state[name] = old[:at] + data + old[at + len(data):], mark
            return 'write', name, at, data
        kind, other = r.choice(('cut', 'copy', 'rename', 'remove', 'mark')), f'f{r.randrange(6)}'
        content, mark = state[name]
        if kind == 'cut':
            size = r.randrange(len(content) + 70_000)
            state[name] = content[:size].ljust(size, b'\0'), mark
            return kind, name, size
        if kind == 'mark':
            state[name] = content, b'%d' % r.randrange(1000)
            return kind, name, state[name][1]
        if kind == 'remove':
            del state[name]
            return kind, name
        if kind == 'copy' and other not in state and content:
            state[other] = content, b''
            return kind, name, other
        state[other] = state[name]
        if other != name:
            del state[name]
        return 'rename', name, other

    @staticmethod
    def perform(folder, kind, name, *args):
        path = os.path.join(folder, name)
        if kind == 'write':
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            assert os.pwrite(fd, args[1], args[0]) == len(args[1])
            os.close(fd)
        elif kind == 'cut':
            os.truncate(path, args[0])
        elif kind == 'mark':
            os.setxattr(path, 'user.mark', args[0])
        elif kind == 'remove':
            os.unlink(path)
        elif kind == 'rename':
            os.rename(path, os.path.join(folder, args[0]))
        else:
            source, target = os.open(path, os.O_RDONLY), os.open(os.path.join(folder, args[0]), os.O_WRONLY | os.O_CREAT)
            size = os.fstat(source).st_size
            while size:
                size -= os.copy_file_range(source, target, size)
            os.close(target)
            os.close(source)

    @staticmethod
    def look(folder):
        found = {}
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), 'rb') as f:
                content = f.read()
            has = 'user.mark' in os.listxattr(os.path.join(folder, name))
            found[name] = content, os.getxattr(os.path.join(folder, name), 'user.mark') if has else b''
        return found

    def after(self, orderly):
        return self.state

    def partly(self, call):
        """Whether an unanswered call may have been done in part."""
        return call[0] in ('write', 'copy')


class Model:
    """Gradients, steps, commits, aborts, and a note beside them. The state: step, note and whether a step is open; durable ones, too."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now, self.durable, self.open, self.since = (0, 0), (0, 0), False, 0

    @staticmethod
    def prepare(folder):
        os.mkdir(folder)
        os.setxattr(folder, 'user.hitrain.dtype', b'f32')
        os.setxattr(folder, 'user.hitrain.optimizer', f'sgd lr=0.5 durable_every={DURABLE_EVERY}'.encode())
        with open(os.path.join(folder, 'p'), 'wb') as f:
            f.write(struct.pack('f', 1.0) * ELEMENTS)
        Model.perform(folder, 'note', 0)
        Model.perform(folder, 'commit')

    def next(self):
        r = self.random
        kind = r.choice(('note', 'commit', 'abort') + (('step',) * 5 if self.open else ('gradient',) * 5))
        step, note = self.now
        if kind == 'note':
            self.now = step, r.randrange(1, 1 << 30)
            return kind, self.now[1]
        if kind == 'gradient':
            self.open = True
        elif kind == 'abort':
            self.now, self.open, self.since = self.durable, False, 0
        else:
            self.now = step + self.open, note
            self.since += self.open
            self.open = False
            if kind == 'commit' or self.since >= DURABLE_EVERY:
                self.durable, self.since = self.now, 0
        return (kind,)

    @staticmethod
    def perform(folder, kind, *args):
        if kind == 'note':
            fd = os.open(os.path.join(folder, 'note'), os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, b'%10d' % args[0])
            os.close(fd)
        elif kind == 'gradient':
            fd = os.open(os.path.join(folder, '.hitrain/grad/p'), os.O_WRONLY)
            os.write(fd, struct.pack('f', 1.0) * ELEMENTS)
            os.close(fd)
        else:
            fd = os.open(os.path.join(folder, '.hitrain/ctl'), os.O_RDWR)
            os.write(fd, kind.encode() + b'\n')
            assert os.read(fd, 4096) == b'ok\n', kind
            os.close(fd)

    @staticmethod
    def look(folder):
        step, durable = (int(os.getxattr(folder, f'user.hitrain.{word}')) for word in ('step', 'durable_step'))
        with open(os.path.join(folder, 'p'), 'rb') as f:
            assert f.read() == struct.pack('f', 1.0 - 0.5 * step) * ELEMENTS, 'the parameter is that of the step'
        assert step == durable
        with open(os.path.join(folder, 'note'), 'rb') as f:
            return step, int(f.read())

    def after(self, orderly):
        return self.now if orderly and not self.open else self.durable

    def partly(self, call):
        return False


KINDS = {'files': Files, 'model': Model}


def expected(kind, seed, answered, orderly):
    """The content that is allowed when so many calls were answered; the next call; and whether that one may have been
    done in part."""
    client = KINDS[kind](seed)
    for _ in range(answered):
        client.next()
    allowed = [copy.deepcopy(client.after(orderly))]
    call = client.next()
    allowed.append(client.after(orderly))
    return allowed, call, client.partly(call)


def main(kind, folder, seed):
    client = KINDS[kind](int(seed))
    while True:
        client.perform(folder, *client.next())
        os.write(1, b'.')


if __name__ == '__main__':
    main(*sys.argv[1:])
