/* SPDX-License-Identifier: Apache-2.0 */
/* dump.c - what the mount is doing (tiering/base/dump.h): workers, jobs and parked reads. */
#include "fs/fuse/fuse_priv.h"

#include "tiering/base/dump.h"

void ht_fuse_dump(struct ht_fuse *f, struct ht_dump *d)
{
    ht_dump_put(d, "requests:\n  %u threads take requests, %u have one\n", f->workers.count, f->workers.busy);
    ht_job_dump(f, d);
    ht_park_dump(f, d);
}
