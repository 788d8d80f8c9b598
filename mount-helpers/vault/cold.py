# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl restore --cold`: a model root whose content stays in the vault. The store gets the places of its blocks, and reads
them from there. Files without a dtype, and tensors smaller than a block, are written as by any restore.

The pin comes before the head is read, and after the model says whose step it is: so a collector and `vault unpin` both see one of
the two. The digest is compared as ever, because a manifest has the sums of all blocks.
"""
import collections
import errno
import json
import os

from archived import Fetch, OfManifest
from build import Builder
from cold_places import PLACES_MAX, set_places
from control import open_ctl, tell
from entry import Entry, attribute
from kept import Handle, open_folder
from manifest import State
from objects import Failure
from places import BLOCK_BYTES, Place
from restore import Restored, make
from store import printable, size_text
from stores import Pinning, drop_pins, mount_of, word
import identity
import jobs

Stays = collections.namedtuple('Stays', 'places')       # blocks of the present file or state that stay in the vault


def stays_of(items):
    """The items of a step, with at most PLACES_MAX blocks at a time as Stays where the store can read them from the vault."""
    group, has_dtype, stays = [], False, False
    for item in items:
        if isinstance(item, Place) and stays:
            group.append(item)
            if len(group) == PLACES_MAX:
                yield Stays(group)
                group = []
            continue
        if group:
            yield Stays(group)
            group = []
        if isinstance(item, Entry):
            has_dtype = bool(attribute(item, b'dtype'))
            stays = has_dtype and item.size >= BLOCK_BYTES
        elif isinstance(item, State):
            stays = has_dtype and item.size >= BLOCK_BYTES
        yield item


class ColdBuilder(Builder):
    """A Builder that also takes Stays. cold_bytes: of these. fetch: for state that the store keeps in another form than it shows."""

    def __init__(self, *words):
        super().__init__(*words)
        self.fetch, self.cold_bytes = None, 0
        self.sample = None      # the file of the first ones, and where they begin

    def take(self, item):
        if isinstance(item, Stays):
            self.take_stays(item.places)
        else:
            super().take(item)

    def take_stays(self, places):
        self.wait()
        try:
            set_places(self.to, places)
        except OSError as e:
            if e.errno != errno.EOPNOTSUPP or not self.state:
                with self.doing('leave its blocks in the vault'):
                    raise
            for place in places:
                block = self.fetch.read([place], 'state', self.size)[0]
                self.fetch.fetched += len(block.data)
                self.take_block(block)
            return
        self.cold_bytes += sum(p.stored for p in places)
        self.sample = self.sample or (self.to, places[0].index * BLOCK_BYTES)
        last = places[-1].index * BLOCK_BYTES
        self.passed(min(last + BLOCK_BYTES, self.size))


    def read_one(self):
        """The daemon reads the vault by a URL and with rights of its own: one block shows that it can."""
        if not self.sample:
            return
        file, at = self.sample
        try:
            reader = Handle(os.open(f'/proc/self/fd/{file.fd}', os.O_RDONLY | os.O_CLOEXEC))
            os.pread(reader.fd, 1, at)
        except OSError as e:
            raise Failure(f'the daemon cannot read it from the vault: {e.strerror}: "error" of the mount says why') from None


# ---- the store's vault ----

def set_vault(mount, engine, vault):
    """The store reads cold content from this vault from now on. Failure: it reads from another one, or the caller may not say so."""
    try:
        tell(open_ctl(open_folder(mount.point)), f'vault {vault.uuid.hex()} {engine.whole_url}'.encode())
    except PermissionError:
        if vault.uuid.hex() not in (word(mount.point, 'vault') or ''):
            raise Failure(f'{mount.point}: root and the owner of the mount alone say from which vault it reads') from None
    except OSError as e:
        raise Failure(f'{mount.point}: {e.strerror}') from None


# ---- restore ----

def from_vault(path, engine, vault, job, step=None, rank=(0, 1), staging=None, archived=None):
    """(Restored, bytes that stay in the vault) of a full step. staging: its place, or None for a new one. archived: the Step of a model that
    goes for it: it is that one, and the daemon can read it."""
    entry, found = jobs.read_step(engine, vault, job, step)
    if archived and archived.epoch != found.epoch:
        raise Failure(f'{job}: another archiver has put step {step} anew')
    if found.step != entry.step or entry.kind != jobs.FULL:
        raise Failure(f'{job}: step {found.step} is logged; cold models have the content of a full step, such as {entry_before(engine, vault, job, entry)}')
    if len(found.summaries) != rank[1]:
        raise Failure(f'{job}: step {found.step} has {len(found.summaries)} ranks: --rank=rof{len(found.summaries)} restores what one of these had')
    mount = mount_of(os.path.dirname(path.rstrip('/')) or '.')
    manifest = OfManifest(engine, vault.uuid, job, found.step, found.epoch, found.summaries[rank[0]])
    set_vault(mount, engine, vault)
    fetch, built = Fetch(engine), []

    def fill(making):
        making.begin(manifest.summary.bytes, kind=ColdBuilder)
        built.append(making.builder)
        making.builder.fetch = fetch
        for item in fetch.in_order(stays_of(manifest.items())):
            making.take(item)
            if isinstance(item, Entry) and not item.path:
                begin(making, mount, engine, vault, job, entry)
        if archived:
            making.builder.read_one()
        return found.step, Restored(found.step, item, None, fetch.fetched)
    try:
        return make(path, fill, staging=staging), built[0].cold_bytes
    except BaseException:
        drop_pins(mount, engine)
        raise


def begin(making, mount, engine, vault, job, entry):
    """The model is cold, and its step pinned, before it gets a place."""
    with Pinning(mount):
        try:
            tell(open_ctl(making.staging.model), f'cold {job}@{entry.step}'.encode())
        except OSError as e:
            raise Failure(f'{making.path}: {e.strerror}') from None
        jobs.pin(engine, vault, job, entry, mount.store, identity.boot(), identity.host())


def entry_before(engine, vault, job, entry):
    full = [e.step for e in jobs.highest(engine, vault, job).entries if e.kind == jobs.FULL and e.step < entry.step]
    return full[-1] if full else 'none that is there'


def report(path, r, cold_bytes, as_json):
    if as_json:
        print(json.dumps({'path': path, 'step': r.step, 'digest': r.end.digest.hex(), 'entries': r.end.entries, 'bytes': r.end.bytes,
                          'fetched_bytes': r.fetched, 'cold_bytes': cold_bytes}))
    else:
        print(printable(f'{path}: restored step {r.step}: {size_text(cold_bytes)} stay in the vault, {size_text(r.fetched)} are here, '
                        f'digest {r.end.digest.hex()}'))
