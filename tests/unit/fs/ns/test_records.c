/* SPDX-License-Identifier: Apache-2.0 */
/* Records: which ones decode, which ones are refused, and logs whose records do not fit together. */
#include "fs/ns/records.h"
#include "tests/support/memory.h"
#include "fixture.h"

static uint64_t rnd = 88172645463325252ull;

/* ---------------------------------------------------------------- codec */

static const struct ht_ns_record samples[] = {
    {.type = HT_REC_NS_INODE,
     .ino = 7,
     .attr = {1, -2, 3, 4, 5, S_IFDIR | 0755, HT_DTYPE_BF16, HT_DTYPE_F32, HT_CLASS_SCRATCH},
     .model_root = true},
    {.type = HT_REC_NS_INODE, .ino = 8, .attr = {.mode = S_IFCHR | 0600}, .rdev = 4711},
    {.type = HT_REC_NS_INODE_DEL, .ino = 9},
    {.type = HT_REC_NS_ENTRY,
     .ino = 8,
     .parent = 7,
     .time_ns = 99,
     .entry_type = S_IFCHR,
     .name = "some name",
     .name_len = 9},
    {.type = HT_REC_NS_ENTRY_DEL, .ino = 7, .parent = 7, .time_ns = -1, .name = "x", .name_len = 1},
    {.type = HT_REC_NS_XATTR, .ino = 3, .name = "user.x", .name_len = 6, .value = "\0\1\2", .value_len = 3},
    {.type = HT_REC_NS_XATTR_DEL, .ino = 3, .time_ns = 5, .name = "user.x", .name_len = 6},
    {.type = HT_REC_NS_TARGET, .ino = 4, .value = "../a", .value_len = 4},
};

/* The payload of one record in b. */
static const uint8_t *encode(struct ht_buf *b, const struct ht_ns_record *r, uint32_t *out_len)
{
    ht_buf_reset(b);
    ht_ns_record_encode(b, r);
    ck_assert_int_eq(b->err, 0);
    *out_len = (uint32_t)(b->len - HT_RECORD_HEADER_BYTES);
    return b->data + HT_RECORD_HEADER_BYTES;
}

TEST(records_come_back_as_they_were)
{
    struct ht_buf b = HT_BUF_INIT;
    struct ht_ns_record r;
    const uint8_t *p;
    uint32_t len;

    for (size_t n = 0; n < HT_ARRAY_SIZE(samples); n++) {
        const struct ht_ns_record *s = &samples[n];
        p = encode(&b, s, &len);
        OK(ht_ns_record_decode(s->type, p, len, &r));
        ck_assert_uint_eq(r.ino, s->ino);
        ck_assert_uint_eq(r.parent, s->parent);
        ck_assert_int_eq(r.time_ns, s->time_ns);
        ck_assert_int_eq(memcmp(&r.attr, &s->attr, sizeof(r.attr)), 0);
        ck_assert_uint_eq(r.rdev, s->rdev);
        ck_assert_uint_eq(r.model_root, s->model_root);
        ck_assert_uint_eq(r.entry_type, s->entry_type);
        ck_assert_uint_eq(r.name_len, s->name_len);
        ck_assert_uint_eq(r.value_len, s->value_len);
        if (s->name_len > 0)
            ck_assert_int_eq(memcmp(r.name, s->name, s->name_len), 0);
        if (s->value_len > 0)
            ck_assert_int_eq(memcmp(r.value, s->value, s->value_len), 0);
    }
    ht_buf_free(&b);
}

/* A payload of its own, so that a sanitizer sees reading beyond it. */
static int decode_copy(uint16_t type, const uint8_t *p, uint32_t len)
{
    uint8_t *copy = malloc(len > 0 ? len : 1);
    struct ht_ns_record r = {.type = 0};

    if (len > 0)
        memcpy(copy, p, len);
    int rc = ht_ns_record_decode(type, copy, len, &r);
    ck_assert(rc == 0 || rc == -EUCLEAN);
    if (rc == 0 && r.name)
        ck_assert_uint_le(r.name_len, 255);
    free(copy);
    return rc;
}

TEST(truncated_records_are_refused)
{
    struct ht_buf b = HT_BUF_INIT;
    const uint8_t *p;
    uint32_t len;

    for (size_t n = 0; n < HT_ARRAY_SIZE(samples); n++) {
        uint32_t fixed[] = {52, 52, 8, 26, 17, 23, 17, 9}; /* with the shortest name, or the name of a value */
        p = encode(&b, &samples[n], &len);
        for (uint32_t cut = 0; cut < fixed[n]; cut++)
            FAILS(decode_copy(samples[n].type, p, cut), EUCLEAN);
        OK(decode_copy(samples[n].type, p, fixed[n]));
    }
    ht_buf_free(&b);
}

static void refuse_inode(struct ht_ns_record r)
{
    struct ht_buf b = HT_BUF_INIT;
    uint32_t len;

    r.type = HT_REC_NS_INODE;
    const uint8_t *p = encode(&b, &r, &len);
    FAILS(decode_copy(r.type, p, len), EUCLEAN);
    ht_buf_free(&b);
}

TEST(fields_are_checked)
{
    struct ht_buf b = HT_BUF_INIT;
    uint8_t entry[26] = {1, [8] = 2, [24] = S_IFREG >> 12, [25] = 'n'};

    refuse_inode((struct ht_ns_record){.ino = 0, .attr = {.mode = S_IFREG}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = 0644}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = 0xf000}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = S_IFREG, .dtype = HT_DTYPE_BOOL + 1}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = S_IFREG, .grad_dtype = 255}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = S_IFREG, .obj_class = 2}});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = S_IFREG}, .model_root = true});
    refuse_inode((struct ht_ns_record){.ino = 1, .attr = {.mode = S_IFREG}, .rdev = 1});
    OK(decode_copy(HT_REC_NS_ENTRY, entry, sizeof(entry)));
    for (const char *bad = "/."; *bad != '\0'; bad++) {
        entry[25] = (uint8_t)*bad;
        FAILS(decode_copy(HT_REC_NS_ENTRY, entry, sizeof(entry)), EUCLEAN);
    }
    entry[25] = '\0';
    FAILS(decode_copy(HT_REC_NS_ENTRY, entry, sizeof(entry)), EUCLEAN);
    entry[25] = 'n';
    entry[24] = 0;
    FAILS(decode_copy(HT_REC_NS_ENTRY, entry, sizeof(entry)), EUCLEAN);
    FAILS(decode_copy(HT_REC_NS_LAST, entry, sizeof(entry)), EUCLEAN);
    FAILS(decode_copy(0, entry, sizeof(entry)), EUCLEAN);
    ht_buf_free(&b);
}

TEST(random_bytes_never_crash_the_decoder)
{
    uint8_t bytes[400];

    for (int n = 0; n < 300000; n++) {
        uint32_t len = (uint32_t)(random_next(&rnd) % sizeof(bytes));
        for (uint32_t i = 0; i < len; i += 8)
            memcpy(bytes + i, &(uint64_t){random_next(&rnd)}, 8);
        if (random_next(&rnd) % 2 == 0 && len > 10)
            memset(bytes, 0, len / 2);
        (void)!decode_copy((uint16_t)(HT_REC_NS_FIRST + random_next(&rnd) % 8), bytes, len);
    }
}

/* ------------------------------------------------- logs that do not fit */

static struct ht_store *bare; /* without names: these do not change */

static int take_any(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    (void)ctx, (void)type, (void)payload, (void)len;
    return 0;
}

static void put(const struct ht_ns_record *r, size_t count)
{
    struct ht_tx *tx;
    uint64_t lsn;
    const struct ht_participant any = {HT_REC_NS_FIRST, HT_REC_NS_LAST, .replay = take_any};
    struct ht_store_opts opts = {
        .dram_bytes = 8 * MIB, .staging_bytes = 24 * MIB, .numa_node = HT_NUMA_OFF, .no_threads = true};

    OK(ht_store_new(&w.dev, 1, &opts, &bare));
    OK(ht_store_register(bare, &any));
    OK(ht_store_mount(bare));
    OK(ht_tx_begin(bare, 4096 + count * 600, &tx));
    for (size_t n = 0; n < count; n++)
        ht_ns_record_encode(ht_tx_records(tx), &r[n]);
    OK(ht_tx_commit(tx, &lsn));
    OK(ht_store_sync(bare, lsn));
    ht_store_close(bare);
}

static size_t problems;
static const char *expected_code;

static void note_problem(void *ctx, const char *code, const char *text)
{
    (void)ctx;
    ck_assert_str_ne(text, "");
    if (!expected_code || strcmp(code, expected_code) == 0)
        problems++;
}

static int walk_entry(void *ctx, const struct ht_ns_dirent *e)
{
    struct stat st;

    (void)ctx;
    OK(ht_ns_getattr_locked(w.ns, e->ino, false, &st));
    return 0;
}

/* Every query that a store mounted read-only answers. */
static void inspect_all(void)
{
    char buf[300];
    struct stat st;
    struct ht_ns_tensor t;

    for (uint64_t ino = 0; ino < 12; ino++) {
        ht_ns_path(w.ns, ino, buf, sizeof(buf));
        if (ht_ns_getattr(w.ns, ino, &st) != 0)
            continue;
        OK(ht_ns_tensor(w.ns, ino, &t));
        ck_assert_int_ge(ht_ns_listxattr(w.ns, ino, true, NULL, 0), 0);
        if (S_ISDIR(st.st_mode))
            OK(ht_ns_readdir(w.ns, ino, 0, walk_entry, NULL));
        if (S_ISLNK(st.st_mode))
            ck_assert_int_ge(ht_ns_readlink(w.ns, ino, buf, sizeof(buf)), 0);
        ht_ns_parent(w.ns, ino);
    }
}

/* A mount for writing is refused. A read-only mount logs the problem, and the rest can be inspected. */
static void expect_problem(const struct ht_ns_record *r, size_t count, const char *code)
{
    fixture_new(&w);
    OK(ht_ns_fsync(w.ns, ROOT));
    fixture_kill(&w);
    put(r, count);
    FAILS(fixture_try_mount(&w), EUCLEAN);
    fixture_kill(&w);
    w.read_only = true;
    OK(fixture_try_mount(&w));
    problems = 0;
    expected_code = code;
    ck_assert_uint_ge(ht_ns_check(w.ns, note_problem, NULL), 1);
    ck_assert_uint_ge(problems, 1);
    inspect_all();
    fixture_kill(&w);
    ht_dev_close(w.dev);
}

#define INODE(n, m)                                             \
    {                                                           \
        .type = HT_REC_NS_INODE, .ino = n, .attr = {.mode = m } \
    }
#define MODEL_ROOT(n)                                                                    \
    {                                                                                    \
        .type = HT_REC_NS_INODE, .ino = n, .attr = {.mode = S_IFDIR}, .model_root = true \
    }
#define ENTRY(p, i, t, s)                                                                                     \
    {                                                                                                         \
        .type = HT_REC_NS_ENTRY, .parent = p, .ino = i, .entry_type = t, .name = s, .name_len = sizeof(s) - 1 \
    }
#define PROBLEM(code, ...)                              \
    do {                                                \
        const struct ht_ns_record r_[] = {__VA_ARGS__}; \
        expect_problem(r_, HT_ARRAY_SIZE(r_), code);    \
    } while (0)

TEST(records_that_do_not_fit_together_are_told)
{
    PROBLEM("NS-DANGLING", ENTRY(1, 5, S_IFREG, "a"));
    PROBLEM("NS-ROOT", ENTRY(1, 1, S_IFDIR, "a"), {.type = HT_REC_NS_INODE_DEL, .ino = 1});
    PROBLEM("NS-PARENT", INODE(5, S_IFREG), ENTRY(6, 5, S_IFREG, "a"));
    PROBLEM("NS-PARENT", INODE(5, S_IFREG), INODE(6, S_IFREG), ENTRY(1, 6, S_IFREG, "b"), ENTRY(6, 5, S_IFREG, "a"));
    PROBLEM("NS-DIRECTORY-NAMES", INODE(5, S_IFDIR), ENTRY(1, 5, S_IFDIR, "a"), ENTRY(1, 5, S_IFDIR, "b"));
    PROBLEM("NS-DIRECTORY-NAMES", ENTRY(1, 1, S_IFDIR, "self"));
    PROBLEM("NS-UNREACHABLE", INODE(5, S_IFDIR), INODE(6, S_IFDIR), ENTRY(5, 6, S_IFDIR, "a"),
            ENTRY(6, 5, S_IFDIR, "b"));
    PROBLEM("NS-UNREACHABLE", INODE(5, S_IFDIR), ENTRY(5, 5, S_IFDIR, "a"));
    PROBLEM("NS-UNREACHABLE", INODE(5, S_IFDIR), INODE(6, S_IFREG), ENTRY(5, 6, S_IFREG, "a"));
    PROBLEM("NS-NESTED-ROOT", MODEL_ROOT(5), MODEL_ROOT(6), ENTRY(1, 5, S_IFDIR, "a"), ENTRY(5, 6, S_IFDIR, "b"));
    PROBLEM("NS-LINK-ACROSS-ROOT", MODEL_ROOT(5), INODE(6, S_IFREG), ENTRY(1, 5, S_IFDIR, "a"),
            ENTRY(5, 6, S_IFREG, "b"), ENTRY(1, 6, S_IFREG, "c"));
    PROBLEM("NS-TARGET", INODE(5, S_IFLNK), ENTRY(1, 5, S_IFLNK, "a"));
    PROBLEM("NS-ATTRIBUTES", {.type = HT_REC_NS_XATTR, .ino = 5, .name = "user.a", .name_len = 6});
    PROBLEM("NS-ROOT", {.type = HT_REC_NS_INODE_DEL, .ino = 1}, INODE(5, S_IFREG));
}

/* These make no sense by themselves, whatever follows: not even read-only. */
static void expect_refused(const struct ht_ns_record *r, size_t count)
{
    fixture_new(&w);
    OK(ht_ns_fsync(w.ns, ROOT));
    fixture_kill(&w);
    put(r, count);
    FAILS(fixture_try_mount(&w), EUCLEAN);
    fixture_kill(&w);
    w.read_only = true;
    FAILS(fixture_try_mount(&w), EUCLEAN);
    fixture_kill(&w);
    ht_dev_close(w.dev);
}

TEST(records_that_contradict_each_other_are_refused)
{
    const struct ht_ns_record type_changes[] = {INODE(5, S_IFREG), INODE(5, S_IFDIR)};
    const struct ht_ns_record entry_of_other_type[] = {INODE(5, S_IFREG), ENTRY(1, 5, S_IFDIR, "a")};
    const struct ht_ns_record target_of_file[] = {INODE(5, S_IFREG),
                                                  {.type = HT_REC_NS_TARGET, .ino = 5, .value = "x", .value_len = 1}};
    const struct ht_ns_record bad_list[] = {INODE(5, S_IFREG),
                                            {.type = HT_REC_NS_XATTR,
                                             .ino = 5,
                                             .name = "system.posix_acl_access",
                                             .name_len = 23,
                                             .value = "\2\0\0\0",
                                             .value_len = 4}};

    expect_refused(type_changes, 2);
    expect_refused(entry_of_other_type, 2);
    expect_refused(target_of_file, 2);
    expect_refused(bad_list, 2);
}

static struct ht_ns_record random_record(char name[2])
{
    static const uint16_t types[] = {S_IFREG, S_IFDIR, S_IFLNK, S_IFIFO};
    uint64_t v = random_next(&rnd);
    struct ht_ns_record r = {.type = (uint16_t)(HT_REC_NS_FIRST + v % 7), .ino = 1 + (v >> 8) % 9};
    uint16_t type = r.ino <= 5 ? S_IFDIR : types[r.ino % 4]; /* mostly of one type per inode */

    name[0] = (char)('a' + (v >> 16) % 4);
    r.parent = 1 + (v >> 24) % 6;
    r.time_ns = (int64_t)((v >> 32) % 3);
    r.attr.mode = type | 0644;
    r.model_root = type == S_IFDIR && (v >> 40) % 8 == 0;
    r.entry_type = type;
    r.name = name;
    r.name_len = 1;
    r.value = name;
    r.value_len = 1;
    return r;
}

/* Whatever order records come in: a mount or a refusal, and then a check without surprise. */
TEST(random_logs_mount_or_are_refused)
{
    enum { ROUNDS = 150, RECORDS_MAX = 60 };
    unsigned mounted = 0;

    for (int round = 0; round < ROUNDS; round++) {
        char names[RECORDS_MAX][2];
        struct ht_ns_record r[RECORDS_MAX];
        size_t count = 1 + random_next(&rnd) % RECORDS_MAX;
        for (size_t n = 0; n < count; n++)
            r[n] = random_record(names[n]);
        fixture_new(&w);
        OK(ht_ns_fsync(w.ns, ROOT));
        fixture_kill(&w);
        put(r, count);
        int rc = fixture_try_mount(&w);
        ck_assert(rc == 0 || rc == -EUCLEAN);
        if (rc == 0) {
            mounted++;
            fixture_check(&w);
            inspect_all();
        }
        fixture_kill(&w);
        w.read_only = true;
        rc = fixture_try_mount(&w);
        ck_assert(rc == 0 || rc == -EUCLEAN);
        if (rc == 0)
            inspect_all();
        fixture_kill(&w);
        ht_dev_close(w.dev);
    }
    ck_assert_uint_gt(mounted, 0);
}

RUN_TESTS("records", .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
