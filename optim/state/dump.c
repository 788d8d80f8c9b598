/* SPDX-License-Identifier: Apache-2.0 */
/* dump.c - what the optimizer is doing (tiering/base/dump.h): gates, steps and queues of the roots. */
#include "tiering/base/dump.h"
#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/state/root.h"

enum { ROOTS_MAX = 64, PARAMS_MAX = 32 }; /* PARAMS_MAX: of one root */
static void put_params(const struct ht_root *root, struct ht_dump *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    unsigned shown = 0;

    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root) {
        bool idle = !p->pending && !p->failed && ht_list_empty(&p->inflight) && ht_list_empty(&p->waiters);
        if (idle || shown++ >= PARAMS_MAX)
            continue;
        ht_dump_put(d, "    parameter %llu: %llu ranges pending, %llu failed%s%s\n", (unsigned long long)p->oid,
                    (unsigned long long)p->pending, (unsigned long long)p->failed,
                    ht_list_empty(&p->inflight) ? "" : "; its gradient is being written",
                    ht_list_empty(&p->waiters) ? "" : "; readers wait for its updates");
        ht_dump_id(d, p->oid);
    }
    if (shown > PARAMS_MAX)
        ht_dump_put(d, "    and %u more parameters\n", shown - PARAMS_MAX);
}

/* A gradient whose first bytes are being written does not count yet: the thread that writes them is in the dump. */
static bool is_idle(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return !root->open && !root->pending && !root->running && !root->backlog_bytes && !root->gate && !root->draining &&
        !root->hold && !root->failure;
}

static void put_root(const struct ht_root *root, struct ht_dump *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_dump_put(d, "  root %llu: ", (unsigned long long)root->id);
    if (root->open)
        ht_dump_put(d, "step %llu is open", (unsigned long long)root->open);
    else
        ht_dump_put(d, "no step is open");
    ht_dump_put(d, "; ranges: %llu pending, %llu in work; %llu bytes of gradients queued",
                (unsigned long long)root->pending, (unsigned long long)root->running,
                (unsigned long long)root->backlog_bytes);
    ht_dump_put(d, "; gate: ");
    if (root->gate)
        ht_dump_thread(d, root->gate_thread);
    ht_dump_put(d, "%s%s%s%s", root->gate ? "" : "open", root->async ? "; a step is being closed" : "",
                root->draining ? "; writers of gradients wait" : "",
                root->hold || root->alone ? "; no update starts" : "");
    ht_dump_put(d, "%s\n", root->failure ? "; an update has failed" : "");
    put_params(root, d);
    ht_dump_id(d, root->id);
}

void ht_optim_dump(struct ht_optim *o, struct ht_dump *d)
{
    unsigned shown = 0;

    ht_dump_put(d, "model roots:\n");
    if (!ht_dump_lock(d, ht_optim_lock(o), "the optimizer"))
        return;
    ht_list_for_each_entry(root, &o->roots, const struct ht_root, all)
        if (!is_idle(root) && shown++ < ROOTS_MAX)
            put_root(root, d);
    if (shown > ROOTS_MAX)
        ht_dump_put(d, "  and %u more\n", shown - ROOTS_MAX);
    if (!ht_list_empty(&o->invals))
        ht_dump_put(d, "  the kernel is asked to drop pages of updated files\n");
    ht_mutex_unlock(ht_optim_lock(o));
}
