# SPDX-License-Identifier: Apache-2.0
"""hitrainctl demote ROOT URL/JOB: a model becomes cold at its own name. With --older-than all models of a mount that rest.

    claim --idle--> keep a step --> archive --> read all of it back --> restore it cold, out of sight --> exchange the names
                                                     --> the old model is as it was: delete it; else exchange again

The claim keeps others from ending a step. At any moment, and after a crash, one of the two models has the name; the
other one is in a staging directory, which the next program removes.
"""
import os
import re
import time

from archive_command import put
from changes import state_of, walk
from cold import from_vault, report, set_vault
from control import open_ctl, tell
from errors import EngineError
from kept import Kept, lines_of, open_folder
from objects import Failure, is_job
from say import error, note
from staging import PREFIX, Replacing
from stores import Pinning, drop_pins, mount_of, root_lines, word
from verifier import Verifier
import engine
import identity
import jobs
import stop
import words


OWN = re.compile('demote-[0-9a-f]{8}')      # kept steps of demotions


def run(given):
    (path, url), o = words.parse(given, 2, 2, 'a model root and the URL of a job, or --older-than=TIME, a mount and the URL of a vault',
                                 older_than=words.seconds, rate=words.size, json=None)
    stop.catch()
    if o['older_than']:
        return demote_resting(path, url, o)
    place, job, at = engine.split_job(url)
    if at is not None:
        raise words.Usage('expected URL/JOB without a step')
    with engine.open(place) as e:
        vault, mount = jobs.open_vault(e), mount_of(path)
        set_vault(mount, e, vault)
        demote(path, mount, e, vault, job, o)
        drop_pins(mount, e)


def demote_resting(path, url, o):
    """Exit status: 1 if a model could not be demoted."""
    mount, failed, seen = mount_of(path), 0, {}
    if not os.path.samefile(path, mount.point):
        raise words.Usage(f'--older-than is for the mount point, {mount.point}')
    with engine.open(url) as e:
        vault = jobs.open_vault(e)
        for line in root_lines(mount):
            below = line.get('path', '').strip('/')
            root, job = os.path.join(mount.point, below), below.replace('/', '.')
            if PREFIX in below or word(root, 'cold') is not None or time.time() - newest(root) < o['older_than']:
                continue
            try:
                if not is_job(job) or job in seen:
                    raise Failure(f'{root}: {job!r} is no name of its own for a job: demote it by itself')
                seen[job] = root
                need_own(root, e, vault, job)
                set_vault(mount, e, vault)
                demote(root, mount, e, vault, job, o)
            except Failure as why:
                stop.check()
                error(str(why))
                failed = 1
        drop_pins(mount, e)
    return failed


def need_own(root, e, vault, job):
    """A path may be that of another host's model, too, whose archiver would end."""
    if jobs.highest(e, vault, job).entries:
        _, found = jobs.read_step(e, vault, job)
        own = identity.store(root)
        if any(s.store != own for s in found.summaries):
            raise Failure(f'{root}: the steps of {job} are of another store: demote it by itself, to a job of another name')


def newest(root):
    """The time of the newest change of a file or directory of the model. A commit changes the files of its parameters."""
    times = [os.stat(root).st_mtime]
    for folder, folders, files in os.walk(root, onerror=fail):
        times += [os.lstat(os.path.join(folder, name)).st_mtime for name in folders + files]
    return max(times)


def fail(e):
    raise Failure(f'{e.filename}: {e.strerror}')


# ---- one model ----

class Claimed:
    """A model that no program trains, until close. Failure where one may."""

    def __init__(self, root):
        self.root = root
        try:
            self.folder = open_folder(root)
            self.ctl = open_ctl(self.folder)
            tell(self.ctl, b'claim demote')
        except OSError as e:
            raise Failure(f'{root}: {e.strerror}') from None
        self.need_rest()
        for folder, _, files in os.walk(root, onerror=fail):
            for path in folder, *(os.path.join(folder, name) for name in files):
                if word(path, 'pin'):
                    raise Failure(f'{path} is pinned in memory: remove its attribute user.hitrain.pin first')
        for line in lines_of(root):
            if OWN.fullmatch(line['name']):
                self.forget(line['name'])       # of a demotion that was interrupted: it had this claim
            elif not line.get('archived'):
                raise Failure(f'{root}: no vault has its kept step {line["name"]}, which would go: archive or forget it first')

    def need_archived(self, e, vault):
        """This vault has its kept steps yet: a note says that some vault had them once. Where the store has no digest, the step of a job
        is to come from this store."""
        own = identity.store(self.root)
        for line in lines_of(self.root):
            if OWN.fullmatch(line['name']):
                continue
            try:
                _, found = jobs.read_step(e, vault, line['archived'], line['step'])
                there = any(s.digest.hex() == line['digest'] if 'digest' in line else s.store == own for s in found.summaries)
            except EngineError:
                raise
            except Failure:
                there = False
            if not there:
                raise Failure(f'{self.root}: {e.whole_url} has not its kept step {line["name"]}, which would go: archive or forget it first')

    def need_rest(self, at=None):
        """at: where it is now."""
        if word(self.folder.fd, 'step_open') != '0':
            raise Failure(f'{self.root}: a step is open: commit or abort it first')
        pid = user_of(os.path.realpath(at or self.root))
        if pid:
            raise Failure(f'{self.root}: process {pid} has it open')

    def keep(self):
        """The Kept of a new step, and what the model says of its changes."""
        name = f'demote-{os.urandom(4).hex()}'
        try:
            tell(self.ctl, f'snapshot {name}'.encode())
        except OSError as e:
            raise Failure(f'{self.root}: its step cannot be kept: {e.strerror}') from None
        self.state, self.files = self.look()
        if self.state.changed:
            raise Failure(f'{self.root}: a program changes it')
        return Kept(self.root, name)

    def look(self):
        """What it says of its steps, and all its files."""
        return state_of(self.folder.fd), dict(walk(self.folder))

    def still(self, at):
        """Failure where it changed since keep(). The exchange of names has changed its directory. Else the claim ends: the model is out
        of sight, and is removed."""
        self.need_rest(at)
        state, files = self.look()
        if state._replace(changed=False) != self.state or files != self.files:
            raise Failure(f'{self.root}: a program has changed it')
        self.ctl = None

    def forget(self, name):
        if not self.ctl:
            return
        try:
            tell(self.ctl, f'forget {name}'.encode())
        except OSError as e:
            note(f'{self.root} keeps step {name}: {e.strerror}')


def user_of(root):
    """The number of another process that has something at or below this path open, mapped, or as its directory; None: nobody whose
    descriptors the caller may see. In a namespace of its own a mount has another path, so files are also known by their numbers."""
    below, device, inodes = root + '/', os.stat(root).st_dev, set()
    for folder, _, files in os.walk(root, onerror=fail):
        inodes.update(os.lstat(os.path.join(folder, name)).st_ino for name in files)
    for pid in filter(str.isdigit, os.listdir('/proc')):
        if int(pid) == os.getpid():
            continue
        for path, number in used_by(f'/proc/{pid}', inodes):
            if path == root or path.startswith(below) or number == device:
                return int(pid)
    return None


def used_by(process, inodes):
    """Yields (path, None), and (path, device) of those whose inode has one of these numbers."""
    for link in 'cwd', 'root', 'exe':
        yield link_at(f'{process}/{link}'), None
    try:
        for number in os.listdir(f'{process}/fd'):
            yield link_at(f'{process}/fd/{number}'), device_of(process, number, inodes)
        with open(f'{process}/maps', errors='surrogateescape') as maps:
            for line in maps:
                _, _, _, device, inode, *path = line.rstrip('\n').split(maxsplit=5)
                yield ''.join(path), os.makedev(*(int(n, 16) for n in device.split(':'))) if int(inode) in inodes else None
    except OSError:
        pass                        # it has ended, or is another user's


def device_of(process, number, inodes):
    """None: of another inode, or a kernel before 5.14 does not say which. Asking any file could wait for the server of its file system."""
    try:
        with open(f'{process}/fdinfo/{number}') as f:
            found = re.search('^ino:\\s*([0-9]+)$', f.read(), re.M)
        return os.stat(f'{process}/fd/{number}').st_dev if found and int(found[1]) in inodes else None
    except OSError:
        return None


def link_at(path):
    try:
        return os.readlink(path)
    except OSError:
        return ''


def demote(root, mount, e, vault, job, o):
    claimed = Claimed(root)
    claimed.need_archived(e, vault)
    kept = claimed.keep()
    try:
        summary = put(root, kept, e, vault, job, rate=o['rate'])
        entry, step = jobs.read_step(e, vault, job, kept.step)
        if step.summaries[0].digest != summary.digest:
            raise Failure(f'{root}: another archiver put another step {kept.step} into {job}')
        read_back(e, vault, job, step)
        place = Replacing(root, claimed.folder, claimed.still, Pinning(mount))
        done, cold_bytes = from_vault(root, e, vault, job, kept.step, staging=place, archived=step)
    except BaseException:
        claimed.forget(kept.name)
        raise
    report(root, done, cold_bytes, o['json'])


def read_back(e, vault, job, step):
    """All of a step, with every checksum."""
    verifier = Verifier(e, vault)
    verifier.step(job, step.step, step.epoch, step.summaries)
    if verifier.damage:
        raise Failure('; '.join(verifier.damage[:3]))
