/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/memory.h"
#include "tests/support/fsck_scenario.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

struct fsck_scenario_store fsck_scenario_stores[FSCK_SCENARIO_DEVICES];
struct harness fsck_scenario;
char fsck_scenario_text[FSCK_SCENARIO_TEXT_MAX];
size_t fsck_scenario_text_len;

/* ----------------------------------------------------------------- the stores */

static void make_world(unsigned devices)
{
    struct fsck_scenario_store *w = &fsck_scenario_stores[devices - 1];

    harness_format(&fsck_scenario, devices, SAMPLE_DEVICE_BYTES, 4096);
    ck_assert_int_eq(harness_open(&fsck_scenario, 1), 0);
    sample_populate(&fsck_scenario, NULL, NULL);
    damage_find(&fsck_scenario, &w->ids);
    ck_assert_int_eq(harness_close(&fsck_scenario, true), 0);
    ck_assert_int_eq(harness_open(&fsck_scenario, 1), 0);
    sample_read(&fsck_scenario, &w->items);
    ck_assert_uint_eq(w->items.errors, 0);
    ck_assert_int_eq(harness_close(&fsck_scenario, true), 0);
    for (unsigned i = 0; i < devices; i++) {
        w->bytes[i] = malloc(SAMPLE_DEVICE_BYTES);
        memcpy(w->bytes[i], ht_dev_ram_data(fsck_scenario.dev[i]), SAMPLE_DEVICE_BYTES);
    }
    fsck_scenario_end();
}

void fsck_scenario_end(void)
{
    harness_free(&fsck_scenario);
}

void fsck_scenario_begin(unsigned devices)
{
    fsck_scenario_end();
    fsck_scenario = (struct harness){.dev_count = devices};
    for (unsigned i = 0; i < devices; i++) {
        ck_assert_int_eq(dev_open_ram(SAMPLE_DEVICE_BYTES, 4096, &fsck_scenario.dev[i]), 0);
        memcpy(ht_dev_ram_data(fsck_scenario.dev[i]), fsck_scenario_stores[devices - 1].bytes[i], SAMPLE_DEVICE_BYTES);
    }
}

/* -------------------------------------------------------------------- one run */

/* Collects the output of f->out. A device that fails to read does so until fsck has reported it. */
static ssize_t listen(void *ctx, const char *buf, size_t len)
{
    for (unsigned i = 0; i < fsck_scenario.dev_count; i++)
        dev_fail(fsck_scenario.dev[i], HT_IO_READ, 0, false);
    ck_assert_uint_lt(fsck_scenario_text_len + len, FSCK_SCENARIO_TEXT_MAX);
    memcpy(fsck_scenario_text + fsck_scenario_text_len, buf, len);
    fsck_scenario_text_len += len;
    fsck_scenario_text[fsck_scenario_text_len] = '\0';
    return (ssize_t)len;
}

int fsck_scenario_fsck_with(const struct ht_fsck_options *opt)
{
    static const cookie_io_functions_t io = {.write = listen};
    struct ht_fsck *f = calloc(1, sizeof(*f));

    fsck_scenario_text_len = 0;
    fsck_scenario_text[0] = '\0';
    f->opt = *opt;
    f->out = fopencookie(NULL, "w", io);
    ht_json_init(&f->json, f->out);
    memcpy(f->devs, fsck_scenario.dev, sizeof(f->devs));
    f->dev_count = fsck_scenario.dev_count;
    int status = ht_fsck_run(f, "store");
    memcpy(fsck_scenario.dev, f->devs, sizeof(f->devs)); /* in the order of their numbers */
    f->dev_count = 0;                                    /* the devices are not its own */
    fclose(f->out);
    ht_fsck_close(f);
    free(f);
    return status;
}

bool fsck_scenario_reads_vault;

int fsck_scenario_fsck(enum ht_fsck_mode mode, bool json)
{
    const char *vault = fsck_scenario_reads_vault ? "" : NULL;

    return fsck_scenario_fsck_with(
        &(struct ht_fsck_options){.mode = mode, .json = json, .vault = vault, .vault_programs = "mount-helpers/vault"});
}

/* ---------------------------------------------------------------- kept content */

/* Mounts the store as the daemon does, and counts the items that did not change. */
size_t fsck_scenario_count(const struct fsck_scenario_store *w, size_t *out_errors)
{
    struct sample_items now = {0};
    size_t kept = 0;

    ck_assert_msg(harness_open(&fsck_scenario, 1) == 0, "it does not mount");
    sample_read(&fsck_scenario, &now);
    sample_sort(&now);
    for (size_t i = 0; i < w->items.count; i++)
        kept += sample_has(&now, w->items.item[i]);
    *out_errors = now.errors;
    sample_free(&now);
    return kept;
}

/* It goes on, and stays in order. */
void fsck_scenario_go_on(void)
{
    harness_put(&fsck_scenario, HT_NS_ROOT_INO, "later", "later", 5);
    ck_assert_int_eq(ht_store_commit(fsck_scenario.store), 0);
    ck_assert_int_eq(harness_close(&fsck_scenario, true), 0);
    ck_assert_msg(fsck_scenario_fsck(HT_FSCK_CHECK, false) == HT_FSCK_CLEAN, "after going on: %s", fsck_scenario_text);
}

void fsck_scenario_setup(void)
{
    if (fsck_scenario_stores[0].bytes[0])
        return;
    ht_log_set_level(HT_LOG_ERROR - 1); /* damaged stores have much to say */
    memory_keep(true);
    make_world(1);
    make_world(2);
}
