# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl restore`: a step from a vault or a pipe becomes a new model root.

A directory out of sight becomes a model root first, so nothing in it is published before its commit. At the end mark, with
the right digest, it gets its step, is committed and moves to its name. Until then any failure removes it, and after a crash
the next program does (staging.py).
"""
import collections
import importlib
import os
import stat

from archive import find_kept
from archived import Archived, Fetch, shared
from build import Builder
from control import open_ctl, tell
from entry import PREFIX, attribute
from kept import Kept, names_of
from manifest import Base, End, Reader
from objects import Damage, Failure
from pipe import Input
from say import Progress
from staging import Staging
from store import size_text
import archived
import heads
import jobs
import stop

Restored = collections.namedtuple('Restored', 'step end base fetched')     # base: the manifest.Base of changes, or None


# ---- the model ----

def commit(path, model, change):
    """Commits by a descriptor of ctl that was opened while the directory was the caller's own; change() comes between."""
    try:
        ctl = open_ctl(model)
    except OSError as e:
        raise Failure(f'{path}: .hitrain/ctl: {e.strerror}') from None
    change()
    try:
        tell(ctl, b'commit')
    except OSError as e:
        raise Failure(f'{path}: the step cannot be committed: {e.strerror}') from None


def set_step(path, model, root, step):
    if attribute(root, b'optimizer') is None:
        raise Failure(f'{path}: this is no model: its root has no optimizer')
    try:
        os.setxattr(model.fd, PREFIX + b'step', str(step).encode())
    except OSError as e:
        raise Failure(f'{path}: cannot set step {step}: {e.strerror}') from None


def finish(path, staging, builder, step, then):
    """A model at its step, durable, at its name. then(): what comes before that. To move a directory its owner needs to be able
    to write to it. A model that its owner may not write to gets its mode after it has its name: a crash in between leaves it
    whole, at its name, and writable.
    """
    mode = builder.root.mode
    later = os.geteuid() != 0 and not mode & stat.S_IWUSR
    set_step(path, staging.model, builder.root, step)
    builder.root = builder.root._replace(mode=mode | (stat.S_IWUSR if later else 0))
    commit(path, staging.model, builder.finish_root)
    then()
    staging.publish()
    if later:
        builder.root = builder.root._replace(mode=mode)
        try:
            commit(path, staging.model, builder.finish_root)
        except Failure as e:
            raise Failure(f'{e}; {path} has its name, but not its mode') from None


class Making:
    """What fill() of make() works with."""

    def __init__(self, path, staging):
        self.path, self.staging, self.builder = path, staging, None
        self.progress = Progress('restored', 0)

    def begin(self, total, base=None, root=None, kind=Builder):
        """Of so many bytes. base: a kept step of root whose blocks are shared. kind: the class that makes the files."""
        self.progress.total = total
        if base and os.fstat(base.folder.fd).st_dev != os.fstat(self.staging.folder.fd).st_dev:
            raise Failure(f'{self.path}: nothing is restored: {root} is in another store')
        self.builder = kind(self.staging.model, base, self.progress.add)

    def take(self, item):
        stop.check()
        self.builder.take(item)


def make(path, fill, steps=None, staging=None):
    """A new model root at path. fill(Making) calls begin(), gives all parts of the step to take(), and returns (step, what this
    returns, with the end mark as end). steps: of logged steps that follow (apply.Steps). staging: its place, or None for a new
    one. Failure leaves nothing.
    """
    stop.catch()
    making = Making(path, staging or Staging(path))
    staging, progress = making.staging, making.progress
    try:
        staging.make_model()
        step, result = fill(making)
        builder = making.builder
        builder.finish()
        progress.end()
        finish(path, staging, builder, step, lambda: steps and steps.apply(path, staging.model, result.end))
    except BaseException as e:
        progress.clear()
        if making.builder:
            making.builder.close()
        if not staging.published:
            staging.drop()
        if isinstance(e, Failure) and not str(e).startswith(path):
            raise Failure(f'{path}: nothing is restored: {e}') from None
        raise
    builder.close()
    return result


# ---- from a pipe ----

def begin_pipe(source):
    """(step, Summary, Reader, Base or None)"""
    step = source.header()
    records = source.records()
    first = next(records)
    if first.type != heads.SUMMARY or first.place:
        raise Damage('it does not say what it is about')
    summary = heads.parse_summary(first.payload)
    reader = Reader(records, step, in_pipe=True)
    base = reader.read_base() if summary.base != (0, 0) else None
    return step, summary, reader, base


def from_pipe(path, base_root=None, fd=0):
    """Restored. base_root: the model that keeps the step which changes build on."""
    source = Input(fd)
    last = ''

    def why(e):
        return Failure(f'{path}: nothing is restored: at byte {source.at}{last and f", after {last}"}: {e}')
    def fill(making):
        nonlocal last
        try:
            step, summary, reader, base = begin_pipe(source)
        except Failure as e:
            raise why(e) from None
        making.begin(summary.bytes, find_base(path, base_root, base) if base else None, base_root)
        items = iter(reader)
        while True:
            try:
                item = next(items)
                if isinstance(item, End):
                    source.expect_end()
            except Failure as e:
                raise why(e) from None
            making.take(item)
            if isinstance(item, End):
                return step, Restored(step, item, base, item.bytes)
            last = making.builder.entry.path[:120].decode(errors='surrogateescape')
    return make(path, fill)


def find_base(path, root, base):
    if not root:
        raise Failure(f'{path}: nothing is restored: these are changes since step {base.step} alone; --base=ROOT names a '
                      'model that keeps that step')
    kept = find_kept(root, base.step, base.digest)
    if not kept:
        raise Failure(f'{root} keeps no step {base.step} with digest {base.digest.hex()}, which the changes build on')
    return kept


# ---- from a vault ----

def local_base(root, others):
    """(kept step, its manifest) of the newest archived step that root keeps, too, or (None, None). others: yields
    (step, function that gives its OfManifest), the newest first.
    """
    if not root:
        return None, None
    there = {Kept(root, name).step for name in names_of(root)}
    for step, manifest in others:
        of = manifest() if step in there else None
        kept = of and find_kept(root, step, of.summary.digest)
        if kept:
            return kept, of
    return None, None


def manifests(engine, vault, job, rank, ranks):
    """Yields (step, function that gives the OfManifest of this rank) of the job's full steps of so many ranks, the newest first."""
    def of(e):
        step = jobs.read_step_object(engine, vault, job, e.step, e.epoch, e.sum)
        return archived.OfManifest(engine, vault.uuid, job, e.step, e.epoch, step.summaries[rank])
    for e in reversed(jobs.highest(engine, vault, job).entries):
        if e.kind == heads.FULL and e.ranks == ranks:
            yield e.step, lambda e=e: of(e)


def from_chain(path, engine, vault, job, chain, base_root=None, rank=(0, 1)):
    """Restored: all that this rank archived. chain: that of jobs.chain_of."""
    found, *logged = chain
    ranks = len(found.summaries)
    if ranks != rank[1]:
        raise Failure(f'{job}: step {found.step} has {ranks} ranks: --shard=rofR makes the model of a rank of another number, and '
                      f'--rank=rof{ranks} restores what one of these had')
    manifest = archived.OfManifest(engine, vault.uuid, job, found.step, found.epoch, found.summaries[rank[0]])
    steps = logged and importlib.import_module('apply').Steps(engine, vault, job, logged, rank[0])
    done = from_manifest(path, manifest, found.step, base_root, manifests(engine, vault, job, *rank), steps)
    if not logged:
        return done
    return Restored(logged[-1].step, done.end, Base(found.step, done.end.digest), done.fetched + steps.fetch.fetched)


def from_manifest(path, manifest, step, base_root=None, others=(), steps=None):
    """Restored, from a rank's manifest in a vault (archived.OfManifest)."""
    fetch = Fetch(manifest.engine)

    def fill(making):
        kept, of = local_base(base_root, others)
        items = manifest.items()
        if kept:
            items = shared(items, Archived(of.items()))
        making.begin(manifest.summary.bytes, kept, base_root)
        for item in fetch.in_order(items):
            making.take(item)
        return step, Restored(step, item, None, fetch.fetched)
    return make(path, fill, steps)


# ---- reports ----

def report(path, r, as_json, out):
    from json import dumps
    if as_json:
        about = {'path': path, 'step': r.step}
        about.update({'from': r.base.step} if r.base else {'digest': r.end.digest.hex()})
        out.write(dumps({**about, 'entries': r.end.entries, 'bytes': r.end.bytes, 'fetched_bytes': r.fetched}) + '\n')
    elif r.base:
        out.write(f'{path}: restored step {r.step} as changes since step {r.base.step}: {r.end.entries} entries, '
                  f'{size_text(r.end.bytes)} of content\n')
    else:
        out.write(f'{path}: restored step {r.step}: {r.end.entries} entries, {size_text(r.end.bytes)} of content, digest '
                  f'{r.end.digest.hex()}\n')
