# SPDX-License-Identifier: Apache-2.0
"""The loop of a scheme's program. A scheme is an object with hello, put_new, get, list and remove (scheme_file.py shows them).

Each slot has a thread that takes a request, does it, and answers. Messages are for the user and name no secrets: an
unexpected error becomes a line on stderr and `Failed`.
"""
import mmap
import os
import signal
import socket
import sys
import threading
import time

from engine import perform
from errors import EngineError, Failed
import wire


class Lazy:
    """Opens the scheme at the first request, and again after a failure, so that a failure is an answer."""

    def __init__(self, make):
        self.make, self.lock, self.scheme = make, threading.Lock(), None

    def __call__(self):
        with self.lock:
            if self.scheme is None:
                self.scheme = self.make()
            return self.scheme


def answer(lazy, verb, key, offset, length, slot, left_ms):
    """(result, flags, length, text) of one request; never an exception."""
    try:
        return *perform(lazy(), verb, key, offset, length, slot, time.monotonic() + left_ms / 1000), ''
    except EngineError as e:
        return e.code, 0, 0, str(e)
    except Exception as e:                      # a fault of a scheme or of its library must not end the program
        import traceback
        traceback.print_exc()
        return Failed.code, 0, 0, f'{type(e).__name__} in its program'


def packet_of(number, result, flags, length, text):
    return wire.ANSWER.pack(number, result, flags, length) + text.encode('utf-8', 'replace')[:wire.TEXT_BYTES_MAX]


def serve_slots(lazy, channel, memory, slots, slot_bytes):
    while True:
        try:
            packet = channel.recv(wire.PACKET_BYTES_MAX)
        except ConnectionError:                 # the program that asked has ended, with answers that it did not read
            packet = b''
        if len(packet) < wire.REQUEST.size:
            os._exit(0)                         # the other threads may hang in the engine
        number, verb, key_bytes, slot, left_ms, offset, length = wire.REQUEST.unpack_from(packet)
        key = packet[wire.REQUEST.size:].decode('ascii', 'replace')
        if slot >= slots or len(packet) != wire.REQUEST.size + key_bytes:
            os._exit(1)
        room = memory[slot * slot_bytes:(slot + 1) * slot_bytes]
        try:
            channel.send(packet_of(number, *answer(lazy, verb, key, offset, length, room, left_ms)))
        except ConnectionError:                 # the program that asked has ended
            os._exit(0)


def serve_pipe(lazy, requests, answers, threads=8):
    """The same over a pair of pipes, with the bytes after request and answer: each frame begins with its length in 4 bytes."""
    lock, room = threading.Lock(), threading.Semaphore(threads)

    def work(number, verb, key, offset, length, slot, left_ms):
        result, flags, count, text = answer(lazy, verb, key, offset, length, slot, left_ms)
        data = slot[:count] if verb in (wire.GET, wire.LIST) and result == wire.OK else b''
        head = packet_of(number, result, flags, count, text)
        with lock:
            answers.write(len(head).to_bytes(4, 'little') + len(data).to_bytes(4, 'little') + head)
            answers.write(data)
            answers.flush()
        room.release()

    while True:
        frame = requests.read(8)
        if len(frame) < 8:
            os._exit(0)
        head = requests.read(int.from_bytes(frame[:4], 'little'))
        number, verb, _, _, left_ms, offset, length = wire.REQUEST.unpack_from(head)
        data_bytes = int.from_bytes(frame[4:], 'little')
        if data_bytes > wire.OBJECT_BYTES_MAX or length > wire.OBJECT_BYTES_MAX:
            os._exit(1)
        slot = memoryview(bytearray(requests.read(data_bytes) if verb == wire.PUT_NEW else length))
        key = head[wire.REQUEST.size:].decode('ascii', 'replace')
        room.acquire()
        threading.Thread(target=work, args=(number, verb, key, offset, length, slot, left_ms), daemon=True).start()


def main(make_scheme, words):
    """words: URL SOCKET MEMORY SLOTS SLOT_BYTES, or --pipe URL. make_scheme(URL) gives the scheme."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(words) == 2 and words[0] == '--pipe':
        serve_pipe(Lazy(lambda: make_scheme(words[1])), sys.stdin.buffer, sys.stdout.buffer)
    if len(words) != 5:
        sys.exit('usage: hitrain-vault-SCHEME URL SOCKET MEMORY SLOTS SLOT_BYTES, or --pipe URL; hitrainctl starts it')
    url, (channel, memory, slots, slot_bytes) = words[0], map(int, words[1:])
    channel = socket.socket(fileno=channel)
    memory = memoryview(mmap.mmap(memory, slots * slot_bytes))
    lazy = Lazy(lambda: make_scheme(url))
    for _ in range(slots - 1):
        threading.Thread(target=serve_slots, args=(lazy, channel, memory, slots, slot_bytes), daemon=True).start()
    serve_slots(lazy, channel, memory, slots, slot_bytes)
