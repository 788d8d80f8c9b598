# SPDX-License-Identifier: Apache-2.0
"""Reads steps of a vault with every checksum, for `hitrainctl vault verify` and before a model becomes cold."""
from archived import Fetch, OfManifest
from errors import Missing
from manifest import End
from objects import Damage, key_segment
from places import Place, parse_table
from sums import sum64
import heads
import jobs
import stop


class Verifier:
    """Reads steps, each block once. Memory: some 100 bytes for each block."""

    def __init__(self, engine, vault):
        self.engine, self.vault = engine, vault
        self.seen, self.bytes, self.damage = set(), 0, []

    def step(self, job, step, epoch, summaries):
        for s in summaries:
            try:
                if s.kind == heads.LOGGED:
                    self.segments(job, step, epoch, s)
                else:
                    self.blocks(OfManifest(self.engine, self.vault.uuid, job, step, epoch, s), s)
            except Damage as e:
                self.damage.append(f'{job}, step {step}: {e}')

    def new(self, items, new):
        for item in items:
            if isinstance(item, Place):
                key = item.lease << 28 | item.n << 13 | item.unit
                if key in self.seen or key in new:
                    continue
                new.add(key)
            yield item

    def blocks(self, manifest, summary):
        fetch, new = Fetch(self.engine), set()
        for item in fetch.in_order(self.new(manifest.items(), new)):
            if isinstance(item, End) and item.digest != summary.digest:
                raise manifest.damage('its digest is not the one that the step names')
        self.seen.update(new)       # all are good: damage ends the loop
        self.bytes += fetch.fetched

    def segments(self, job, step, epoch, s):
        """Of a logged step: whole segments."""
        OfManifest(self.engine, self.vault.uuid, job, step, epoch, s)
        for lease, n, count in jobs.read_segments(self.engine, self.vault, job, step, epoch, s.rank):
            for i in range(n, n + count):
                stop.check()
                if (lease, i) not in self.seen:
                    self.segment(lease, i)
                    self.seen.add((lease, i))

    def segment(self, lease, n):
        key = key_segment(lease, n)
        try:
            data = self.engine.get(key)
        except Missing:
            raise Damage(f'{self.engine.url}: {key}: it is gone') from None
        rows = jobs.parse(f'{self.engine.url}: {key}', parse_table, data[:4096], lambda at: data[at:], len(data), self.vault.uuid, lease, n)[1]
        for row in rows:
            if sum64(data[row.unit * 4096:row.unit * 4096 + row.stored]) != row.sum:
                raise Damage(f'{self.engine.url}: {key} at {row.unit * 4096}: its checksum is wrong')
        self.bytes += len(data)


def steps_of(engine, vault, job, step, verifier):
    """Yields the Step of each step that the head lists, or of one."""
    if step is not None:
        yield from jobs.chain_of(engine, vault, job, step)
        return
    try:
        entries = jobs.highest(engine, vault, job).entries
    except Damage as e:
        verifier.damage.append(str(e))
        return
    for e in entries:
        try:
            found = jobs.read_step_object(engine, vault, job, e.last, e.epoch, e.sum)
            yield found
            while found.step > e.step:
                found = jobs.read_step_object(engine, vault, job, found.step - 1, e.epoch, found.before)
                yield found
        except Damage as why:
            verifier.damage.append(str(why))
