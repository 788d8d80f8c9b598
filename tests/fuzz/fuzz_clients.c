/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of clients through attributes and hidden files: the input is a sequence of calls on a small store with a model
 * (attributes of hitrain and others, lines of .hitrain/ctl, gradients, optimizer states). No call waits for ever.
 * Afterwards the store unmounts, and fsck finds nothing.
 */
#include <fcntl.h>

#include "fs/ctl/hidden.h"
#include "tiering/base/idtable.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/memory.h"
#include "tests/support/sample.h"
#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

enum { CALLS_MAX = 40, DEPTH_MAX = 5, READ_BYTES = 1 << 16 };

static const struct ht_caller root_caller = {{0, 0, 0}, NULL, NULL};

static const char *const plain[][2] = {{NULL}, {"model"}, {"model", "w"}, {"model", "h"}, {"small"}, {"dir"}};

static const char *const hidden[][DEPTH_MAX] = {
    {"model", ".hitrain", "ctl"},
    {"model", ".hitrain", "grad", "w"},
    {"model", ".hitrain", "grad", "h"},
    {"model", ".hitrain", "grad-topk", "w"},
    {"model", ".hitrain", "grad-topk", "h"},
    {"model", ".hitrain", "update", "w"},
    {"model", ".hitrain", "ortho", "w"},
    {"model", ".hitrain", "state", "w", "exp_avg"},
    {"model", ".hitrain", "state", "h", "master"},
    {"model", ".hitrain", "state", "w", "step"},
    {"model", ".hitrain", "stats"},
    {".hitrain", "ctl"},
    {".hitrain", "events"},
    {".hitrain", "trace"},
    {".hitrain", "plan"},
};

static struct harness k;
static uint8_t *base;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    memory_keep(true);
    ht_id_hash_fix(); /* an input does the same each time */
    sample_format(&k);
    MUST(harness_open(&k, 1) == 0);
    sample_populate(&k, NULL, NULL);
    MUST(harness_close(&k, true) == 0);
    base = sample_keep(&k);
    return 0;
}

/* ------------------------------------------------------------------- calls */

static uint64_t plain_inode(unsigned which)
{
    uint64_t at = HT_NS_ROOT_INO;

    for (unsigned i = 0; i < 2 && plain[which][i] && at; i++)
        at = harness_find(&k, at, plain[which][i]);
    return at;
}

static void call_attribute(struct ht_reader *in, unsigned what, unsigned which)
{
    uint64_t ino = plain_inode(which % HT_ARRAY_SIZE(plain));
    size_t name_len, len;
    char buf[READ_BYTES];
    const uint8_t *name_bytes = fuzz_piece(in, &name_len), *value = fuzz_piece(in, &len);
    char *name = fuzz_text(name_bytes, name_len);
    bool word = ht_attribute_match(name);
    ssize_t n = 0;

    if (!ino || !name[0] || strlen(name) > HT_XATTR_NAME_BYTES_MAX || len > HT_XATTR_VALUE_BYTES_MAX)
        ; /* the kernel lets nothing of this through */
    else if (what == 0)
        n = word ? ht_attribute_set(k.ctl, ino, name, value, len, 0, &root_caller)
                 : ht_ns_setxattr(k.ns, ino, name, value, len, 0);
    else if (what == 1)
        n = word ? ht_attribute_get(k.ctl, ino, name, buf, sizeof(buf))
                 : ht_ns_getxattr(k.ns, ino, name, buf, sizeof(buf));
    else
        n = word ? ht_attribute_remove(k.ctl, ino, name, &root_caller) : ht_ns_removexattr(k.ns, ino, name);
    MUST(n <= (ssize_t)sizeof(buf));
    free(name);
}

/* A count is held on each inode of the way, as the kernel does. */
static uint64_t hidden_inode(const char *const path[DEPTH_MAX], uint64_t held[DEPTH_MAX], unsigned *depth)
{
    uint64_t at = HT_NS_ROOT_INO;
    struct stat st;

    for (*depth = 0; *depth < DEPTH_MAX && path[*depth]; (*depth)++) {
        int rc = ht_hidden_name(at, path[*depth]) ? ht_hidden_lookup(k.ctl, at, path[*depth], &st)
                                                  : ht_ns_lookup(k.ns, at, path[*depth], &st);
        if (rc)
            return 0;
        at = held[*depth] = st.st_ino;
    }
    return at;
}

static void use_hidden(struct ht_hidden_file *f, uint64_t off, const uint8_t *data, size_t len)
{
    static uint8_t buf[READ_BYTES];
    ssize_t n = len ? ht_hidden_write(f, off, data, len, true) : 0;

    n = ht_hidden_read(f, off, buf, sizeof(buf));
    MUST(n <= (ssize_t)sizeof(buf));
    n = ht_hidden_flush(f);
    (void)n;
    ht_hidden_release(f);
}

static void open_hidden(unsigned which, uint64_t off, const uint8_t *data, size_t len)
{
    uint64_t held[DEPTH_MAX];
    unsigned depth;
    struct ht_hidden_file *f;
    uint64_t ino = hidden_inode(hidden[which % HT_ARRAY_SIZE(hidden)], held, &depth);

    if (ino && ht_hidden_match(ino) && ht_hidden_open(k.ctl, ino, len ? O_RDWR : O_RDONLY, &root_caller, &f) == 0)
        use_hidden(f, off, data, len);
    while (depth-- > 0)
        if (!ht_hidden_match(held[depth]))
            ht_ns_forget(k.ns, held[depth], 1);
}

static void call_hidden(struct ht_reader *in, unsigned which)
{
    uint64_t off = (uint64_t)ht_get_u16(in) << (ht_get_u8(in) & 47);
    size_t len;
    const uint8_t *data = fuzz_piece(in, &len);

    open_hidden(which, off, data, len);
}

/* Of the open step, whose number no input can know: it is another one in each mount. */
static void apply_ortho(void)
{
    char number[32], line[64];
    ssize_t n = ht_attribute_get(k.ctl, plain_inode(1), "user.hitrain.step_open", number, sizeof(number) - 1);

    if (n <= 0)
        return;
    number[n] = '\0';
    int len = snprintf(line, sizeof(line), "apply ortho/w if=%s\n", number);
    open_hidden(0, 0, (const uint8_t *)line, (size_t)len);
}

static void call_root(unsigned which)
{
    uint64_t root = plain_inode(1);
    int rc = !root       ? 0
        : which % 4 == 0 ? ht_optim_commit(k.optim, root)
        : which % 4 == 1 ? ht_optim_abort(k.optim, root)
        : which % 4 == 2 ? ht_optim_step(k.optim, root)
                         : ht_ns_fsync(k.ns, plain_inode(which / 4 % HT_ARRAY_SIZE(plain)));

    (void)rc;
}

static void run_calls(struct ht_reader *in)
{
    for (unsigned i = 0; i < CALLS_MAX && !ht_reader_done(in); i++) {
        uint8_t what = ht_get_u8(in), which = ht_get_u8(in);
        if (what % 8 < 3)
            call_attribute(in, what % 8, which);
        else if (what % 8 < 7)
            call_hidden(in, which);
        else if (what / 8 % 4 == 1)
            apply_ortho();
        else
            call_root(which);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);
    struct sample_items items = {0};
    int rc;

    sample_restore(&k, base);
    MUST(harness_open(&k, 1) == 0);
    run_calls(&in);
    sample_read(&k, &items);
    sample_free(&items);
    MUST(harness_close(&k, true) == 0);
    MUST(harness_problems(&k, &rc) == 0 && rc == 0);
    return 0;
}
