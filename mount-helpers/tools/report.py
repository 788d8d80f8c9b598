# SPDX-License-Identifier: Apache-2.0
"""hitrainctl report: gathers what a mounted store says about itself, and writes one page of HTML. Each hidden file is read
once. The size is bounded: the page shows the largest and the newest of everything.
"""
import collections
import os
import stat
import sys
import time

import accesses
import losses
import page
import plan
from store import Failure, attribute, counters, hidden_lines

EVENTS_MAX, EVENTS_READ_MAX = 200, 1 << 16
MODELS_MAX, MODELS_READ_MAX, DEVICES_MAX = 64, 256, 64
OPTIMIZER_CHARACTERS = 1024


class Report:
    """All that the page shows. None: the caller may not read it."""

    def __init__(self, version, point, settings):
        self.version, self.point, self.settings = version, point, settings
        self.at = time.time()
        self.counters = collections.Counter()
        self.devices, self.models = [], []
        self.trace = self.plan = self.events = self.losses = None
        self.events_seen = 0
        self.optimizers = {}    # path of a model -> the text of its attribute

    def gather(self):
        self.counters = counters(self.point)
        self.devices = list(hidden_lines(self.point, 'devices', DEVICES_MAX))
        self.models = list(hidden_lines(self.point, 'roots', MODELS_READ_MAX))
        self.trace = self.readable('trace', lambda: accesses.Trace(hidden_lines(self.point, 'trace', accesses.ACCESSES_MAX)))
        self.plan = self.readable('plan', lambda: plan.read(self.point))
        self.events = self.readable('events', self.newest_events)
        for path in [model.text('path') for model in self.models][:MODELS_MAX]:
            self.optimizers[path] = (attribute(self.point + path, 'optimizer') or '')[:OPTIMIZER_CHARACTERS]

    def readable(self, name, read):
        try:
            return read()
        except PermissionError:
            return None
        except ValueError:
            raise Failure(f'{self.point}: .hitrain/{name} is not as this program knows it: '
                          'the daemon is of another version') from None

    def newest_events(self):
        newest = collections.deque(maxlen=EVENTS_MAX)
        for line in hidden_lines(self.point, 'events', EVENTS_READ_MAX):
            newest.appendleft(line)
            self.events_seen += 1
        return newest

    def find_losses(self):
        """No option names losses: the newest of these files in a model's root has them, if one has any."""
        newest = []
        for path in (f'{self.point}{model}/{name}' for model in self.optimizers for name in ('loss.jsonl', 'loss.csv')):
            try:
                st = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(st.st_mode):
                newest.append((st.st_mtime_ns, path))
        try:
            return losses.read(max(newest)[1]) if newest else None
        except Failure:
            return None


def check_output(path):
    """Other things than regular files are not replaced: root may write /dev/null."""
    if path != '-' and os.path.exists(path) and not os.path.isfile(path):
        raise Failure(f'{path} is no regular file: name a file, or - for standard output')


def put(path, text):
    """Readers of the file see the old content or the new one, whole."""
    data = text.encode()
    if path == '-':
        sys.stdout.buffer.write(data)
        return
    new = f'{path}.{os.getpid()}'
    try:
        with open(new, 'xb') as f:
            f.write(data)
        os.replace(new, path)
    except OSError as e:
        if not isinstance(e, FileExistsError) and os.path.lexists(new):
            os.unlink(new)
        raise Failure(f'{path}: the report cannot be written: {e.strerror}') from None


def run(version, point, output, loss, *settings):
    """loss: a file, or ''. settings: NAME=VALUE."""
    check_output(output)
    report = Report(version, point, [s.partition('=')[::2] for s in settings])
    if loss:
        report.losses = losses.read(loss)
    report.gather()
    report.losses = report.losses or report.find_losses()
    put(output, page.of(report))
