# SPDX-License-Identifier: Apache-2.0
"""Scheme ssh: `ssh://[USER@]HOST[:PORT]/PATH` is a folder of another machine, where hitrain is installed.

It runs `ssh HOST hitrain-vault-file --pipe file:///PATH` and sends requests with their bytes (serve_pipe). Keys, ports and
names are those of ~/.ssh/config; ssh asks for no password. HITRAIN_SSH names another ssh, with options of its own.
"""
import os
import shlex
import subprocess
import threading
import time
import urllib.parse

from errors import Again, BY_CODE, Failed, NoProgram, Refused
import wire

OPTIONS = ['-o', 'BatchMode=yes', '-o', 'ConnectTimeout=20', '-o', 'ServerAliveInterval=10', '-o', 'ServerAliveCountMax=3']
REMEDIES = (('Permission denied', Refused, 'it refuses this key: name another one in ~/.ssh/config'),
            ('Host key verification failed', Refused, 'its host key is unknown: run `ssh HOST true` once by hand'),
            ('Could not resolve hostname', Failed, 'no host has this name now'),
            ('not found', NoProgram, 'it has no hitrain-vault-file in PATH: install hitrain there'),
            ('REMOTE HOST IDENTIFICATION HAS CHANGED', Refused, 'its host key has changed: see ~/.ssh/known_hosts'))


class Ssh:
    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname or parts.hostname.startswith('-') or not parts.path.startswith('/'):
            raise Failed('expected ssh://HOST/PATH')
        words = shlex.split(os.environ.get('HITRAIN_SSH', 'ssh')) + OPTIONS
        words += ['-p', str(parts.port)] if parts.port else []
        words += ['-l', urllib.parse.unquote(parts.username)] if parts.username else []
        # The other side gives the words to a shell; the path stays quoted as in the URL.
        self.words = [*words, '--', parts.hostname, 'hitrain-vault-file', '--pipe',
                      shlex.quote('file://' + urllib.parse.quote(urllib.parse.unquote(parts.path)))]
        self.lock, self.connection = threading.Lock(), None

    def _call(self, verb, key, deadline, data=b'', offset=0, length=0):
        with self.lock:
            if self.connection is None or self.connection.ended:
                self.connection = Connection(self.words)
            connection = self.connection
        result, flags, count, text, payload = connection.call(verb, key, deadline, data, offset, length)
        if result > wire.EXISTS:
            raise BY_CODE.get(result, Failed)(text)
        return result, flags, count, payload

    def hello(self, deadline):
        return self._call(wire.HELLO, '', deadline)[2]

    def put_new(self, key, data, deadline):
        return self._call(wire.PUT_NEW, key, deadline, data, length=len(data))[0] == wire.OK

    def get(self, key, offset, room, deadline):
        payload = self._call(wire.GET, key, deadline, offset=offset, length=len(room))[3]
        if len(payload) > len(room):
            raise Failed('it sent more than was asked for')
        room[:len(payload)] = payload
        return len(payload)

    def list(self, prefix, after, deadline):
        _, flags, _, payload = self._call(wire.LIST, f'{prefix}\0{after}', deadline, length=wire.OBJECT_BYTES_MAX)
        try:
            return wire.unpack_entries(payload), bool(flags & wire.MORE)
        except ValueError:
            raise Failed('it sent a list that cannot be read') from None

    def remove(self, key, deadline):
        self._call(wire.REMOVE, key, deadline)


class Connection:
    """One ssh. All threads send; one takes answers. What ssh said on stderr explains why it ended."""

    def __init__(self, words):
        try:
            self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as e:
            raise NoProgram(f'{words[0]}: {e.strerror}') from None
        self.lock, self.ended, self.waiting, self.number, self.said = threading.Lock(), False, {}, 0, ''
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        threading.Thread(target=self._take_answers, daemon=True).start()

    def _listen(self):
        for line in self.child.stderr:
            self.said = (self.said + line.decode('utf-8', 'replace'))[-2000:]

    def _take_answers(self):
        out = self.child.stdout
        while True:
            frame = out.read(8)
            head_bytes, data_bytes = int.from_bytes(frame[:4], 'little'), int.from_bytes(frame[4:], 'little')
            if len(frame) < 8 or not wire.ANSWER.size <= head_bytes <= wire.PACKET_BYTES_MAX:
                break
            if data_bytes > wire.OBJECT_BYTES_MAX:
                break
            head, data = out.read(head_bytes), out.read(data_bytes)
            if len(head) + len(data) < head_bytes + data_bytes:
                break
            number, *answer = wire.ANSWER.unpack_from(head)
            with self.lock:
                waiting = self.waiting.pop(number, None)
            if waiting:
                waiting[1] = *answer, head[wire.ANSWER.size:].decode('utf-8', 'replace'), data
                waiting[0].set()
        self.end()

    def end(self):
        self.child.kill()
        with self.lock:
            self.ended = True
            for waiting in self.waiting.values():
                waiting[0].set()
        self.child.wait()

    def call(self, verb, key, deadline, data, offset, length):
        waiting, name = [threading.Event(), None], key.encode()
        left_ms = max(1, min(int((deadline - time.monotonic()) * 1000), 0xffffffff))
        with self.lock:
            self.number = number = (self.number + 1) & 0xffffffff
            self.waiting[number] = waiting
            head = wire.REQUEST.pack(number, verb, len(name), 0, left_ms, offset, length) + name
            try:
                self.child.stdin.write(len(head).to_bytes(4, 'little') + len(data).to_bytes(4, 'little') + head)
                self.child.stdin.write(data)
                self.child.stdin.flush()
            except (OSError, ValueError):
                self.ended = True
            if self.ended:
                waiting[0].set()
        waiting[0].wait(max(0, deadline - time.monotonic()))
        if waiting[1] is None:
            with self.lock:
                self.waiting.pop(number, None)
            self._explain()
        return waiting[1]

    def _explain(self):
        if not self.ended:
            raise Again('no answer')
        self.listener.join(1)
        for mark, error, remedy in REMEDIES:
            if mark in self.said:
                raise error(remedy)
        lines = self.said.strip().splitlines()
        raise Again(lines[-1] if lines else 'ssh ended')


open_scheme = Ssh
