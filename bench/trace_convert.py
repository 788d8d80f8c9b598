#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Converts what `hitrainctl trace save MOUNTPOINT` wrote into the text that bench/replay plays (bench/replay/README.md).

    python3 bench/trace_convert.py SAVED >TRACE

Requests of one tensor that follow each other become one access of each range that they fill without gaps. The time in
which no request waits becomes computing. Updates are left out, because the store makes them from gradients. Memory
follows the number of tensors.
"""
import argparse
import bisect
import json
import sys

NAME_BYTES_MAX = 255
RANGES_MAX = 4096  # of one access
COMPUTE_US_MAX = 86400 * 1000000
OPS = ('read', 'write', 'gradient', 'update', 'open', 'close', 'prefetch', 'evict', 'step', 'commit', 'abort')
BOUNDARIES = 'step', 'commit'
OF_ROOTS = *BOUNDARIES, 'abort'


def number(record, key, default=None):
    value = record.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f'{key} is not a number')
    return value


def say(path, text):
    print(f'trace_convert.py: {path}: {text}', file=sys.stderr)


def read_line(line):
    """(op, id, record)"""
    record = json.loads(line)
    if not isinstance(record, dict) or record.get('op') not in OPS:
        raise ValueError('no operation of a trace')
    return record['op'], number(record, 'id'), {
        'path': record.get('path'), 'time_ns': number(record, 'time_ns'), 'seq': number(record, 'seq', 0),
        'waited_ns': number(record, 'waited_ns', 0), 'offset': number(record, 'offset', 0),
        'bytes': number(record, 'bytes', 0)}


def records(path):
    """(line number, op, id, record) of each line."""
    with open(path, 'rb') as f:
        for line_number, line in enumerate(f, 1):
            try:
                record = read_line(line)
            except (ValueError, RecursionError) as e:
                if line_number > 1 and not line.endswith(b'\n'):  # it was being written
                    return
                sys.exit(f'trace_convert.py: {path}: line {line_number}: {e}')
            yield line_number, *record


class Tensor:
    def __init__(self):
        self.path, self.bytes, self.parameter, self.name = None, 0, False, None


def escaped(path):
    """Without spaces, control characters and what is not ASCII."""
    try:
        raw = path.encode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:  # no path of a file system
        raw = path.encode('utf-8', 'surrogatepass')
    return ''.join(chr(b) if 32 < b < 127 and b != 37 else f'%{b:02x}' for b in raw)


def name_tensors(tensors):
    used = set()
    for number_, tensor in tensors.items():
        name = escaped(tensor.path) if isinstance(tensor.path, str) and tensor.path else f'id-{number_}'
        if len(name) > NAME_BYTES_MAX:
            name = f'id-{number_}'
        if name in used:
            name = f'{name[:NAME_BYTES_MAX - 24]}%20{number_}'
        used.add(name)
        tensor.name = name


def survey(path):
    """Tensors by their numbers, and whether there are steps."""
    tensors, has_steps = {}, False
    for _, op, number_, r in records(path):
        has_steps |= op in BOUNDARIES
        if op in OF_ROOTS:
            continue
        tensor = tensors.setdefault(number_, Tensor())
        tensor.path = r['path'] or tensor.path
        tensor.bytes = max(tensor.bytes, r['offset'] + r['bytes'])
        tensor.parameter |= op in ('gradient', 'update')
    tensors = {n: t for n, t in tensors.items() if t.bytes}
    name_tensors(tensors)
    return tensors, has_steps


class Converter:
    """Entries of the trace, in order."""

    def __init__(self, path, tensors, has_steps, least_us, out):
        self.path, self.tensors, self.has_steps, self.least_us, self.out = path, tensors, has_steps, least_us, out
        self.op = None  # of the access that grows
        self.id = 0
        self.ranges = []  # [low, high] in order, with gaps between them
        self.seq = 0  # of the entry before; 0: there was none
        self.skips = False  # up to the end of a step that is not whole
        self.graded = set()  # parameters whose gradient this step has
        self.busy_until_ns = None
        self.aborts = 0

    def put(self, *words):
        print(*words, file=self.out)

    def flush(self):
        if not self.op:
            return
        tensor = self.tensors[self.id]
        if self.op == 'gradient':
            self.gradient(self.id)
        else:
            for low, high in self.ranges:
                self.put(self.op, tensor.name, *(() if (low, high) == (0, tensor.bytes) else (low, high - low)))
        self.op = None

    def gradient(self, number_):
        if number_ not in self.graded:
            self.graded.add(number_)
            self.put('gradient', self.tensors[number_].name)

    def join(self, low, high):
        """Adds a range, which may touch others. False: it overlaps one."""
        at = bisect.bisect(self.ranges, [low, high])
        before, after = self.ranges[at - 1:at], self.ranges[at:at + 1]
        if before and before[0][1] > low or after and after[0][0] < high:
            return False
        if before and before[0][1] == low:
            at, low = at - 1, before[0][0]
        if after and after[0][0] == high:
            high = after[0][1]
        self.ranges[at:bisect.bisect(self.ranges, [high])] = [[low, high]]
        return True

    def access(self, op, number_, r):
        low, high = r['offset'], r['offset'] + r['bytes']
        if (op, number_) == (self.op, self.id) and len(self.ranges) < RANGES_MAX and self.join(low, high):
            return
        self.flush()
        self.op, self.id, self.ranges = op, number_, [[low, high]]

    def pass_time(self, r):
        if self.busy_until_ns is not None and r['time_ns'] - self.busy_until_ns >= self.least_us * 1000:
            self.flush()
            self.put('compute', min((r['time_ns'] - self.busy_until_ns) // 1000, COMPUTE_US_MAX))
        self.busy_until_ns = max(self.busy_until_ns or 0, r['time_ns'] + r['waited_ns'])

    def check_number(self, line_number, seq):
        """Without all of its entries a step is not used to its end."""
        missing, self.seq = seq - self.seq - 1 if self.seq else 0, seq
        if not missing:
            return
        say(self.path, f'{missing} entries are missing before line {line_number}' if missing > 0 else
            f'line {line_number} does not follow the one before it')
        self.flush()
        self.skips = self.has_steps
        self.busy_until_ns = None

    def take(self, line_number, op, number_, r):
        if r['seq']:
            self.check_number(line_number, r['seq'])
        self.skips &= op not in BOUNDARIES
        if op == 'update' or self.skips:
            return
        self.pass_time(r)
        if op in BOUNDARIES:
            self.flush()
            self.graded.clear()
            self.put(op)
        elif op == 'abort':
            self.aborts += 1
        elif number_ not in self.tensors or op == 'close':
            return
        elif op in ('prefetch', 'evict'):
            self.flush()
            self.put(op, self.tensors[number_].name)
        elif op == 'open':  # its reader maps it
            self.flush()
            self.put('read', self.tensors[number_].name)
        elif r['bytes']:
            self.access(op, number_, r)
        elif op == 'gradient':  # a sparse one
            self.flush()
            self.gradient(number_)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('saved', help='a file: it is read twice')
    p.add_argument('--least-us', type=int, default=1000, help='a shorter pause between requests is no computing')
    p.add_argument('--state', type=int, default=2, metavar='N',
                   help="state of a parameter, in multiples of its bytes: AdamW's is 2 for f32, 5 for bf16")
    args = p.parse_args()
    if args.least_us < 1 or args.state < 1:
        p.error('--least-us and --state are at least 1')
    tensors, has_steps = survey(args.saved)
    print('hitrain trace 1')
    for tensor in tensors.values():
        if tensor.parameter:
            print('parameter', tensor.name, tensor.bytes, tensor.bytes * args.state)
        else:
            print('tensor', tensor.name, tensor.bytes)
    converter = Converter(args.saved, tensors, has_steps, args.least_us, sys.stdout)
    for record in records(args.saved):
        converter.take(*record)
    converter.flush()
    if converter.aborts:
        say(args.saved, f'{converter.aborts} aborts are left out')


if __name__ == '__main__':
    main()
