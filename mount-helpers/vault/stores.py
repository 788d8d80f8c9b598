# SPDX-License-Identifier: Apache-2.0
"""What a program asks the mounted store that a path lies on: its model roots, which are cold, and which pins in a
vault this store still needs (docs/vault-format.md, "Pins").
"""
import collections
import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import time

from entry import COLD, NAME_BYTES_MAX, PATH_BYTES_MAX, PREFIX
from kept import explain, open_folder
from objects import Failure
from say import note
import engine
import identity
import jobs

WAIT_S = 60
ROOTS_SHOWN_MAX = 256   # lines of .hitrain/roots

# The mount that a path lies on: its mount point, whether the caller can find each model there, and the store's uuid of 16 bytes.
Mount = collections.namedtuple('Mount', 'point sees_all store')
# The job and the step that a model root at a path, or one of its kept steps, names.
Cold = collections.namedtuple('Cold', 'path job step')


def word(fd, name):
    """The text of user.hitrain.NAME of a path or descriptor, or None."""
    try:
        return os.getxattr(fd, PREFIX + name.encode()).decode(errors='replace')
    except OSError:
        return None


def mount_of(path):
    """Failure: the path is on no mount of a store."""
    try:
        at = os.stat(path).st_dev
    except OSError as e:
        raise explain(path, e) from None
    number = f'{os.major(at)}:{os.minor(at)}'.encode()
    with open('/proc/self/mountinfo', 'rb') as mounts:
        lines = [line.split() for line in mounts]
    mine = [line for line in lines if line[2] == number and line[3] == b'/' and b'fuse.hitrain' in line[6:]]
    if not mine:
        raise Failure(f'{path} is not on a hitrain mount')
    point, options = mine[-1][4], mine[-1][-1].split(b',')
    point = os.fsdecode(re.sub(rb'\\([0-7]{3})', lambda m: bytes([int(m[1], 8)]), point))
    alone = b'user_id=%d' % os.geteuid() in options and b'allow_other' not in options
    store = identity.uuid(point)
    if not store:
        raise Failure(f'{point}: cannot read the uuid of its store, which pins have: run it as a user who may read its device')
    return Mount(point, os.geteuid() == 0 or alone, store)


# ---- pins of this store ----

class Pinning:
    """A program that makes a model cold holds it shared, from before the attribute until the pin is there. One that removes pins holds it alone,
    from before the list of pins until the last one went. So none removes a pin that another one has just found there.
    """

    def __init__(self, mount, alone=False):
        self.folder, self.how = open_folder(mount.point), fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.point = mount.point

    def __enter__(self):
        end = time.monotonic() + WAIT_S
        while True:
            try:
                return fcntl.flock(self.folder.fd, self.how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Failure(f'{self.point}: another program has held its lock for {WAIT_S} s: `lslocks` names it') from None
                time.sleep(0.1)

    def __exit__(self, *_):
        fcntl.flock(self.folder.fd, fcntl.LOCK_UN)


def root_lines(mount):
    """Objects of .hitrain/roots. Failure."""
    try:
        with open(f'{mount.point}/.hitrain/roots', encoding='utf-8', errors='surrogateescape') as f:
            return [json.loads(line) for line in f]
    except OSError as e:
        raise explain(mount.point, e) from None
    except ValueError:
        raise Failure(f'{mount.point}: .hitrain/roots is not as this program knows it') from None


def cold_of(path, text):
    """Cold of the text JOB@STEP of an attribute. Failure: it is another one."""
    found = re.fullmatch('([A-Za-z0-9._-]{1,64})@([0-9]{1,19})', text)
    if not found:
        raise Failure(f'{path}: its attribute cold is not as this program knows it: {text}')
    return Cold(path, found[1], int(found[2]))


def cold_models(mount):
    """Yields the Cold of each model root and kept step, also of those that are being made."""
    lines = root_lines(mount)
    if len(lines) >= ROOTS_SHOWN_MAX:
        raise Failure(f'{mount.point}: pins stay: a store with {ROOTS_SHOWN_MAX} models or more does not list all')
    for line in lines:
        path = os.path.join(mount.point, line.get('path', '').lstrip('/'))
        if len(os.fsencode(line.get('path', ''))) >= PATH_BYTES_MAX - NAME_BYTES_MAX:     # it may be cut at a name
            raise Failure(f'{mount.point}: pins stay: the path of a model is too long')
        snap = f'{path}/.hitrain/snap'
        for each in itertools.chain([path], names_in(snap)):    # a step is kept with the attribute that the model has then
            try:
                yield cold_of(path, os.getxattr(each, COLD).decode(errors='replace'))
            except OSError as e:
                if e.errno != errno.ENODATA:
                    raise explain(each, e) from None


def names_in(folder):
    """Listed when the first one is asked for."""
    try:
        yield from [f'{folder}/{name}' for name in os.listdir(folder)]
    except OSError as e:
        raise explain(folder, e) from None


def unpin(mount, e):
    """Removes the pins of this store whose steps no model and no kept step here names. Returns their keys. Failure: nobody can say."""
    if not mount.sees_all:
        raise Failure(f'{mount.point}: pins go only for a user who can find each model there: run it as root')
    with Pinning(mount, alone=True):
        found = [key for job in jobs.list_jobs(e) for key in jobs.pins_of(e, job, mount.store)]
        if not found:
            return []
        # Twice: a model that takes another name during the first look has it during the second.
        needed = {(c.job, c.step) for _ in range(2) for c in cold_models(mount)}
        gone = [key for key, job, step in found if (job, step) not in needed]
        for key in gone:
            e.remove(key)
        return gone


def drop_pins(mount, e=None):
    """The same at the end of a command; None: of the vault that the mount reads. What cannot be told now, `vault unpin` removes."""
    url = next((w for w in (word(mount.point, 'vault') or '').split() if ':' in w), None)
    try:
        with contextlib.nullcontext(e) if e else engine.open(url) as at:
            return unpin(mount, at)
    except (Failure, OSError) as why:
        note(f'a pin in the vault stays: {why}; `hitrainctl vault unpin` removes it')
        return []
