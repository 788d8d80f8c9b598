/* SPDX-License-Identifier: Apache-2.0 */
/* mending.c - see mending.h. */
#include "tests/support/dev.h"
#include "tests/support/memory.h"
#include "tests/support/mending.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

struct mending_store mending_stores[MENDING_DEVICES];
struct harness mending;
char mending_text[MENDING_TEXT_MAX];
size_t mending_text_len;

/* ----------------------------------------------------------------- the stores */

static void make_world(unsigned devices)
{
    struct mending_store *w = &mending_stores[devices - 1];

    harness_format(&mending, devices, SAMPLE_DEVICE_BYTES, 4096);
    ck_assert_int_eq(harness_open(&mending, 1), 0);
    sample_populate(&mending, NULL, NULL);
    damage_find(&mending, &w->ids);
    ck_assert_int_eq(harness_close(&mending, true), 0);
    ck_assert_int_eq(harness_open(&mending, 1), 0);
    sample_read(&mending, &w->items);
    ck_assert_uint_eq(w->items.errors, 0);
    ck_assert_int_eq(harness_close(&mending, true), 0);
    for (unsigned i = 0; i < devices; i++) {
        w->bytes[i] = malloc(SAMPLE_DEVICE_BYTES);
        memcpy(w->bytes[i], ht_dev_ram_data(mending.dev[i]), SAMPLE_DEVICE_BYTES);
    }
    harness_free(&mending);
}

void mending_begin(unsigned devices)
{
    mending = (struct harness){.dev_count = devices};
    for (unsigned i = 0; i < devices; i++) {
        ck_assert_int_eq(dev_open_ram(SAMPLE_DEVICE_BYTES, 4096, &mending.dev[i]), 0);
        memcpy(ht_dev_ram_data(mending.dev[i]), mending_stores[devices - 1].bytes[i], SAMPLE_DEVICE_BYTES);
    }
}

/* -------------------------------------------------------------------- one run */

/* Collects the output of f->out. A device that fails to read does so until fsck has reported it. */
static ssize_t listen(void *ctx, const char *buf, size_t len)
{
    for (unsigned i = 0; i < mending.dev_count; i++)
        dev_fail(mending.dev[i], HT_IO_READ, 0, false);
    ck_assert_uint_lt(mending_text_len + len, MENDING_TEXT_MAX);
    memcpy(mending_text + mending_text_len, buf, len);
    mending_text_len += len;
    mending_text[mending_text_len] = '\0';
    return (ssize_t)len;
}

int mending_fsck_with(const struct ht_fsck_options *opt)
{
    static const cookie_io_functions_t io = {.write = listen};
    struct ht_fsck *f = calloc(1, sizeof(*f));
    int status;

    mending_text_len = 0;
    mending_text[0] = '\0';
    f->opt = *opt;
    f->out = fopencookie(NULL, "w", io);
    ht_json_init(&f->json, f->out);
    memcpy(f->devs, mending.dev, sizeof(f->devs));
    f->dev_count = mending.dev_count;
    status = ht_fsck_run(f, "store");
    memcpy(mending.dev, f->devs, sizeof(f->devs)); /* in the order of their numbers */
    f->dev_count = 0;                              /* the devices are not its own */
    fclose(f->out);
    ht_fsck_close(f);
    free(f);
    return status;
}

int mending_fsck(enum ht_fsck_mode mode, bool json)
{
    return mending_fsck_with(&(struct ht_fsck_options){.mode = mode, .json = json});
}

/* ---------------------------------------------------------------- kept content */

/* Mounts the store as the daemon does, and counts the items that did not change. */
size_t mending_count(const struct mending_store *w, size_t *out_errors)
{
    struct sample_items now = {0};
    size_t kept = 0;

    ck_assert_msg(harness_open(&mending, 1) == 0, "it does not mount");
    sample_read(&mending, &now);
    sample_sort(&now);
    for (size_t i = 0; i < w->items.count; i++)
        kept += sample_has(&now, w->items.item[i]);
    *out_errors = now.errors;
    sample_free(&now);
    return kept;
}

/* It goes on, and stays in order. */
void mending_go_on(void)
{
    harness_put(&mending, HT_NS_ROOT_INO, "later", "later", 5);
    ck_assert_int_eq(ht_store_commit(mending.store), 0);
    ck_assert_int_eq(harness_close(&mending, true), 0);
    ck_assert_msg(mending_fsck(HT_FSCK_CHECK, false) == HT_FSCK_CLEAN, "after going on: %s", mending_text);
}

void mending_setup(void)
{
    if (mending_stores[0].bytes[0])
        return;
    ht_log_set_level(HT_LOG_ERROR - 1); /* damaged stores have much to say */
    memory_keep(true);
    make_world(1);
    make_world(2);
}
