/* SPDX-License-Identifier: Apache-2.0 */
/* held.h - tests hold back the updates of a root: no worker takes one. */
#pragma once

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "tests/unit/optim/step/fixture.h"

static inline void set_hold(struct fixture *f, bool hold)
{
    lock(f->o);
    struct ht_root *root = ht_opt_root_find(f->o, ROOT);
    if (root) { /* else it was deleted */
        root->hold = hold;
        ht_opt_root_ready(root);
        notify_changed(f->o);
    }
    unlock(f->o);
}

/* Also as fixture.before_start. */
static inline void hold_updates(struct fixture *f)
{
    set_hold(f, true);
}
