#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A device of class capacity that comes over NVMe/TCP, in a machine whose own kernel serves it over loopback.

Part of `make check-vm`. One namespace holds the fast device, nvmet exports the other one. A model spills to that and trains, while the
connection is lost and comes back: first for less than capacity_timeout, then for longer. Requests in flight wait in the kernel
(ctrl_loss_tmo=-1). In the end each step has the bits of an undisturbed store.
"""
import json
import pathlib
import sys
import tempfile
import time

import machine
from raw import GONE, say
from replay import undisturbed

MODULES = 'nvmet', 'nvmet_tcp', 'nvme_tcp'
SIZE = 32 << 20
FILL = 17               # MiB of the fast device that another file has
TARGET, PORT = '/config/nvmet/subsystems/hitrain', '/config/nvmet/ports/1'
LINK = f'{PORT}/subsystems/hitrain'
SERVE = ' && '.join((
    'mkdir -p /config && mount -t configfs configfs /config && ifconfig lo 127.0.0.1 up', f'mkdir {TARGET} {TARGET}/namespaces/1 {PORT}',
    f'echo 1 >{TARGET}/attr_allow_any_host', f'echo -n /dev/block1 >{TARGET}/namespaces/1/device_path', f'echo 1 >{TARGET}/namespaces/1/enable',
    f'echo tcp >{PORT}/addr_trtype', f'echo ipv4 >{PORT}/addr_adrfam', f'echo 127.0.0.1 >{PORT}/addr_traddr', f'echo 4420 >{PORT}/addr_trsvcid',
    f'ln -s {TARGET} {LINK}'))
CONNECT = 'echo transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=hitrain,ctrl_loss_tmo=-1,reconnect_delay=1,nr_io_queues=1 >/dev/nvme-fabrics'
# A namespace that is neither of those on the bus. It comes a moment after the connection.
FIND = ('for i in $(seq 500); do for d in /dev/nvme*n1; do [ -b $d ] && [ $d != "$(readlink -f /dev/block0)" ] && '
        '[ $d != "$(readlink -f /dev/block1)" ] && ln -s $d /dev/remote && exit 0; done; usleep 20000; done; exit 1')
BOTH = '/dev/block0 /dev/remote'


def mount(m, *options):
    m.do(f'hitrain {BOTH} /mnt -o dram=32M,staging=24M{"".join("," + o for o in options)}')


class Steps:
    """The training loop, and what it has told."""

    def __init__(self, m):
        self.m, self.path = m, m.out / 'steps'
        self.path.touch()

    def count(self):
        return len(self.path.read_bytes().splitlines())

    def start(self, until):
        self.m.do(f'rm -f /out/ended; (trainer run --until={until} /mnt/model >>/out/steps 2>/out/trainer.errors; echo $? >/out/ended) &')

    def wait(self, more):
        enough = self.count() + more
        machine.wait_for(lambda: self.count() >= enough or self.ended() is not None, 'steps')

    def ended(self):
        """The exit status, if the loop has ended."""
        path = self.m.out / 'ended'
        text = path.read_text() if path.exists() else ''
        return int(text) if text else None

    def finish(self):
        machine.wait_for(lambda: self.ended() is not None, 'the end of the training loop')
        return self.ended()


def device(m):
    return json.loads(m.do('hitrainctl device --json /mnt'))['devices'][1]


def lost_for_a_moment(m, steps):
    mount(m)
    m.do(f'dd if=/dev/urandom of=/mnt/fill bs=1M count={FILL} 2>/dev/null; sync /mnt/fill; trainer make /mnt/model')
    steps.start(12)
    steps.wait(2)
    m.do(f'rm {LINK}')
    time.sleep(1)
    m.do(f'ln -s {TARGET} {LINK}')
    if status := steps.finish():
        raise AssertionError(f'the training loop: exit {status}')
    found = device(m)
    if found['class'] != 'capacity' or found['data_bytes'] - found['free_bytes'] < 1 << 20:
        raise AssertionError(f'the model has not spilled: {found}')
    say(f'NVMe/TCP: 12 steps, {(found["data_bytes"] - found["free_bytes"]) >> 20} MiB on the remote device, which was away for a moment')
    m.do(f'umount /mnt && {GONE} && hitrain-fsck -n {BOTH}')


def lost_for_long(m, steps):
    mount(m, 'capacity_timeout=1')
    steps.start(24)
    steps.wait(2)
    m.do(f'rm {LINK}')
    machine.wait_for(lambda: device(m)['health'] == 'not-answering', 'the silence of the remote device')
    m.do(f'ln -s {TARGET} {LINK}')
    machine.wait_for(lambda: device(m)['health'] == 'ok', 'the answer of the remote device')
    status = steps.finish()
    if status:      # a step that needed the device failed
        m.do('echo abort >/mnt/model/.hitrain/ctl')
        steps.start(24)
        if status := steps.finish():
            raise AssertionError(f'the training loop after an abort: exit {status}')
    events = m.do('hitrainctl events /mnt')
    if 'device-not-answering' not in events or 'device-answers' not in events:
        raise AssertionError(events)
    look = m.do('trainer look /mnt/model')
    m.do(f'umount /mnt && {GONE} && hitrain-fsck -n {BOTH}')
    mount(m)
    if m.do('trainer look /mnt/model') != look:
        raise AssertionError('another mount shows another model')
    m.do(f'umount /mnt && {GONE}')
    say(f'NVMe/TCP: away for longer than capacity_timeout: {look.strip()}')
    return look.split()


def main():
    if what := machine.lacking():
        say(f'skipped: {what} is not there; `make deps-vm` installs it')
        return 0
    with tempfile.TemporaryDirectory(prefix='hitrain-vm-') as folder:
        folder = pathlib.Path(folder)
        with machine.started(folder, (512, 4096), size=SIZE, modules=MODULES) as m:
            try:
                m.do(f'{SERVE} && {CONNECT}; {FIND}')
                m.do('mkfs.hitrain /dev/block0 --capacity=/dev/remote')
                steps = Steps(m)
                lost_for_a_moment(m, steps)
                _, step, _, digest = lost_for_long(m, steps)
                if undisturbed(folder, int(step))[int(step)] != digest:
                    raise AssertionError(f'step {step} is not what it is where nobody disturbs')
            except (AssertionError, RuntimeError) as e:
                say(f'FAILED: {e}')
                return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
