/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of traces: the reader takes or refuses them. What it takes can be written, read again, and simulated. */
#include "bench/replay/sim.h"
#include "tests/fuzz/fuzz.h"

enum { BYTES_MAX = 64 << 20, ACCESSES_MAX = 10000 };

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    return 0;
}

static void read_again(const struct replay_trace *t)
{
    char *text = NULL, err[REPLAY_ERROR_MAX];
    size_t len;
    struct replay_trace again;
    FILE *to = open_memstream(&text, &len);

    MUST(to && replay_trace_write(t, to) == 0 && fclose(to) == 0);
    FILE *from = fmemopen(text, len, "r");
    MUST(from && replay_trace_read(from, &again, err) == 0);
    MUST(again.tensors == t->tensors && again.entries == t->entries);
    MUST(again.entries == 0 || memcmp(again.entry, t->entry, t->entries * sizeof(*t->entry)) == 0);
    fclose(from);
    free(text);
    replay_trace_free(&again);
}

static void simulate(const struct replay_trace *t)
{
    static const struct sim_policy *const policies[] = {&sim_ideal, &sim_belady, &sim_lru, &sim_today};
    struct sim_config c = {.dram_bytes = 4 << 20, .read_rate = 1 << 30, .write_rate = 1 << 30, .buffer_bytes = 1 << 20};
    struct sim_result r;
    struct sim_string s;

    MUST(sim_string_make(t, &s) == 0);
    for (unsigned i = 0; s.accesses <= ACCESSES_MAX && i < HT_ARRAY_SIZE(policies); i++) {
        MUST(sim_run(&s, &c, policies[i], &r) == 0);
        MUST(r.hits <= r.accesses && r.steps && r.time_ns == r.compute_ns + r.stall_ns);
    }
    sim_string_free(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char err[REPLAY_ERROR_MAX];
    struct replay_trace t;

    if (!size)
        return -1;
    FILE *from = fmemopen((void *)(uintptr_t)data, size, "r");
    MUST(from);
    int rc = replay_trace_read(from, &t, err);
    fclose(from);
    MUST(rc == 0 || err[0]);
    if (rc)
        return 0;
    read_again(&t);
    if (t.bytes <= BYTES_MAX)
        simulate(&t);
    replay_trace_free(&t);
    return 0;
}
