/* SPDX-License-Identifier: Apache-2.0 */
/* model_engine.c - long random work on the engine against a simple model, with clean remounts and crashes between. */

#include "tests/support/dev.h"
#include "tests/support/engine.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"

enum { DEVICE_BYTES = 24 << 20, OPS = 3000, SEEDS = 6 };

/* A remount while the device loses nothing: the content of the log, and whole commits only. */
static void crash_and_compare(struct engine *e)
{
    struct ht_dev *copy;

    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, ht_dev_facts(e->dev)->lba, &copy), 0);
    memcpy(ht_dev_ram_data(copy), ht_dev_ram_data(e->dev), DEVICE_BYTES);
    /* The metadata client's published ids are of one engine at a time: close ours first. */
    engine_crash(e);
    const char *wrong = engine_verify_state(e, e->acks - 1, copy, e->rnd);
    if (wrong)
        printf("operation %llu: %s\n", (unsigned long long)e->operations, wrong);
    ck_assert_ptr_null(wrong);
    ht_dev_close(copy);
}

TEST_LOOP(random_work_equals_the_model, SEEDS * 4)
{
    struct engine e;
    long ops = getenv("HITRAIN_LONG") ? 50 * OPS : OPS;

    engine_format(&e, DEVICE_BYTES, _i % 2 ? 512 : 4096, 4711 + (uint64_t)_i);
    ck_assert_int_eq(engine_mount(&e), 0);
    for (long i = 0; i < ops; i++) {
        engine_step(&e);
        if (rnd_below(&e.rnd, 300) == 0)
            engine_check_exact(&e);
    }
    engine_check_exact(&e);
    crash_and_compare(&e);
    engine_free(&e);
}

RUN_TESTS("the engine against a model", .timeout_s = 600, .memory = memory_keep)
