#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Converts what `hitrainctl trace save MOUNTPOINT` wrote into the text that bench/replay plays (docs/trace-format.md).

    trace_convert.py SAVED >TRACE

Requests that follow each other in one tensor become one access. The time in which no request waits becomes computing.
Updates are left out, because the store makes them from gradients. Memory follows the number of tensors.
"""
import argparse
import json
import sys

UNIT = 4096
NAME_BYTES_MAX = 255
OPS = ('read', 'write', 'gradient', 'update', 'open', 'close', 'prefetch', 'evict', 'step', 'commit', 'abort')
OF_ROOTS = 'step', 'commit', 'abort'


def number(record, key, default=None):
    value = record.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f'{key} is not a number')
    return value


def records(path):
    """(op, id, record) of each line."""
    with open(path, 'rb') as f:
        for line_number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or record.get('op') not in OPS:
                    raise ValueError('no operation of a trace')
                yield record['op'], number(record, 'id'), {
                    'path': record.get('path'), 'time_ns': number(record, 'time_ns'),
                    'waited_ns': number(record, 'waited_ns', 0), 'offset': number(record, 'offset', 0),
                    'bytes': number(record, 'bytes', 0)}
            except ValueError as e:
                sys.exit(f'trace_convert.py: {path}: line {line_number}: {e}')


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


def find_tensors(path):
    tensors = {}
    for op, number_, r in records(path):
        if op in OF_ROOTS:
            continue
        tensor = tensors.setdefault(number_, Tensor())
        tensor.path = r['path'] or tensor.path
        tensor.bytes = max(tensor.bytes, r['offset'] + r['bytes'])
        tensor.parameter |= op in ('gradient', 'update')
    tensors = {n: t for n, t in tensors.items() if t.bytes}
    name_tensors(tensors)
    return tensors


class Converter:
    """Entries of the trace, in order."""

    def __init__(self, tensors, least_us, out):
        self.tensors, self.least_us, self.out = tensors, least_us, out
        self.op = None  # of the access that grows
        self.id = self.low = self.high = 0
        self.offsets = set()
        self.graded = set()  # parameters whose gradient this step has
        self.busy_until_ns = None
        self.aborts = 0

    def put(self, *words):
        print(*words, file=self.out)

    def flush(self):
        if not self.op:
            return
        tensor = self.tensors[self.id]
        if self.op != 'gradient':
            whole = self.low == 0 and self.high == tensor.bytes
            self.put(self.op, tensor.name, *(() if whole else (self.low, self.high - self.low)))
        elif self.id not in self.graded:
            self.graded.add(self.id)
            self.put('gradient', tensor.name)
        self.op = None

    def access(self, op, number_, r):
        if (op, number_) != (self.op, self.id) or r['offset'] in self.offsets:
            self.flush()
            self.op, self.id, self.low, self.high = op, number_, r['offset'], r['offset'] + r['bytes']
            self.offsets.clear()
        self.low, self.high = min(self.low, r['offset']), max(self.high, r['offset'] + r['bytes'])
        self.offsets.add(r['offset'])

    def pass_time(self, r):
        if self.busy_until_ns is not None and r['time_ns'] - self.busy_until_ns >= self.least_us * 1000:
            self.flush()
            self.put('compute', (r['time_ns'] - self.busy_until_ns) // 1000)
        self.busy_until_ns = max(self.busy_until_ns or 0, r['time_ns'] + r['waited_ns'])

    def take(self, op, number_, r):
        if op == 'update':
            return
        self.pass_time(r)
        if op in ('step', 'commit'):
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


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('saved', help='a file: it is read twice')
    p.add_argument('--least-us', type=int, default=1000, help='a shorter pause between requests is no computing')
    p.add_argument('--state', type=int, default=2, metavar='N',
                   help="state of a parameter, in multiples of its bytes: AdamW's is 2 for f32, 5 for bf16")
    args = p.parse_args()
    if args.least_us < 1 or args.state < 1:
        p.error('--least-us and --state are at least 1')
    tensors = find_tensors(args.saved)
    print('hitrain trace 1')
    for tensor in tensors.values():
        if tensor.parameter:
            print('parameter', tensor.name, tensor.bytes, tensor.bytes * args.state)
        else:
            print('tensor', tensor.name, tensor.bytes)
    converter = Converter(tensors, args.least_us, sys.stdout)
    for record in records(args.saved):
        converter.take(*record)
    converter.flush()
    if converter.aborts:
        print(f'trace_convert.py: {args.saved}: {converter.aborts} aborts are left out', file=sys.stderr)


if __name__ == '__main__':
    main()
