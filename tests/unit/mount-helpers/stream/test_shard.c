/* SPDX-License-Identifier: Apache-2.0 */
/* Streams for a rank: which blocks they have, and that a reader takes no others. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#include "mount-helpers/stream/stream.h"
#include "mount-helpers/stream/tree.h"
#include "tests/support/suite.h"
#include "tests/unit/mount-helpers/stream/memory.h"

#define MIB ((uint64_t)HT_STREAM_BLOCK_BYTES)

static struct ht_stream_shard shard(const char *table, unsigned rank, unsigned of)
{
    struct ht_stream_shard s = {.rank = rank, .of = of};

    ck_assert_int_eq(ht_shards_parse(table, strlen(table), &s.table), 0);
    return s;
}

/* ------------------------------------------------------------------- blocks */

static uint64_t sent(struct ht_stream_shard s, uint64_t bytes, uint64_t state_bytes, struct ht_moved *out)
{
    struct ht_moves m;
    uint64_t sum = 0, blocks = ht_div_up(bytes, MIB);

    ck_assert_ptr_null(ht_stream_shard_refused(&s));
    ht_moves_begin(&m, &s);
    ck_assert_int_eq(ht_moves_file(&m, true, bytes), 0);
    for (uint64_t b = ht_moves_next(&m, 0, blocks); b < blocks; b = ht_moves_next(&m, b + 1, blocks)) {
        ck_assert(ht_moves_has(&m, b));
        sum += ht_min_u64(MIB, bytes - b * MIB);
    }
    ck_assert_uint_eq(m.sum.sent, sum);
    if (state_bytes) {
        ck_assert_int_eq(ht_moves_state(&m, "exp_avg", state_bytes), 0);
        ck_assert_uint_eq(m.sum.sent, sum + sum * (state_bytes / bytes));
    }
    *out = m.sum;
    ht_moves_end(&m);
    return sum;
}

static const char *const tables[] = {"4 3", "4 3-1", "3 8", "2 1-0", "1 256", "5 5-2", "4 3 8-2", "8 3 3-1"};

/* Each block that changes its owner is in one stream of one former rank, and in that of all. */
TEST_LOOP(streams_of_all_ranks_have_what_changes_its_owner, HT_ARRAY_SIZE(tables))
{
    const uint64_t bytes = 37 * MIB + 100, blocks = 38;
    struct ht_stream_shard s = shard(tables[_i], 0, HT_SHARDS_NONE);
    unsigned former = ht_stream_shard_former(&s), ranks = ht_shards_ranks(&s.table);
    uint16_t before[38], now[38];
    uint64_t moved = 0, all = 0, single = 0, least = 0;
    struct ht_moved sum;

    ht_shards_owners(&s.table, blocks, now);
    ck_assert(ht_shards_owners_before(&s.table, blocks, before));
    for (uint64_t b = 0; b < blocks; b++)
        moved += ht_shards_renumber(&s.table, before[b]) != now[b] ? ht_min_u64(MIB, bytes - b * MIB) : 0;
    for (s.rank = 0; s.rank < ranks; s.rank++) {
        s.of = HT_SHARDS_NONE;
        all += sent(s, bytes, 2 * bytes, &sum);
        ck_assert(sum.sent == sum.gets && sum.least <= sum.gets);
        least += sum.least;
        for (s.of = 0; s.of < former; s.of++)
            single += sent(s, bytes, 0, &sum);
    }
    ck_assert_uint_eq(all, moved);
    ck_assert_uint_eq(single, moved);
    ck_assert_uint_le(least, 3 * moved);
    /* The least of a rank is that of whole shares: ranks that get one more block are not in it. */
    ck_assert_uint_ge(least + 3 * ranks * MIB, 3 * moved);
    ck_assert_uint_le(ht_shards_least(&s.table, blocks, before), ht_div_up(moved, MIB));
}

TEST(the_least_is_what_no_even_shares_avoid)
{
    static const struct {
        const char *table;
        uint64_t blocks, least;
    } cases[] = {{"4 3", 48, 12}, {"4 3-1", 48, 12}, {"3 8", 24, 15}, {"2 1-0", 5, 3}, {"2 1", 5, 2},
                 {"1 2", 5, 2},   {"4 4-2", 8, 2},   {"3 8", 1, 0},   {"3 3-0", 1, 1}};

    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        struct ht_stream_shard s = shard(cases[i].table, 0, HT_SHARDS_NONE);
        uint16_t before[48], now[48];
        uint64_t moved = 0;
        ht_shards_owners(&s.table, cases[i].blocks, now);
        ck_assert(ht_shards_owners_before(&s.table, cases[i].blocks, before));
        for (uint64_t b = 0; b < cases[i].blocks; b++)
            moved += ht_shards_renumber(&s.table, before[b]) != now[b];
        ck_assert_msg(ht_shards_least(&s.table, cases[i].blocks, before) == cases[i].least, "%s", cases[i].table);
        ck_assert_msg(moved == cases[i].least, "%s", cases[i].table);
    }
}

TEST(new_ranks_get_files_of_the_first)
{
    struct ht_stream_shard s = shard("3 8", 3, 0);

    ck_assert(ht_stream_shard_is_new(&s) && ht_stream_shard_has_files(&s));
    s.of = 1;
    ck_assert(!ht_stream_shard_has_files(&s));
    s = shard("3 8", 2, HT_SHARDS_NONE);
    ck_assert(!ht_stream_shard_is_new(&s) && !ht_stream_shard_has_files(&s));
    s = shard("3 3-0", 0, 1); /* a new one in the place of the lost one */
    ck_assert(ht_stream_shard_is_new(&s) && ht_stream_shard_has_files(&s));
    s.of = 0;
    ck_assert(!ht_stream_shard_has_files(&s));
}

TEST(blocks_of_state_follow_the_parameter)
{
    struct ht_stream_shard s = shard("2 1-0", 0, 0);
    struct ht_moves m;

    ht_moves_begin(&m, &s);
    ck_assert_int_eq(ht_moves_file(&m, true, 2 * MIB + 8), 0);
    ck_assert(ht_moves_has(&m, 0) && !ht_moves_has(&m, 1) && ht_moves_has(&m, 2));
    ck_assert_int_eq(ht_moves_state(&m, "master", 4 * MIB + 16), 0);
    ck_assert(ht_moves_has(&m, 1) && !ht_moves_has(&m, 2) && !ht_moves_has(&m, 3) && ht_moves_has(&m, 4));
    for (uint64_t i = 0, next = 0; i < 5; i++, next = i) { /* the same answers, but without looking at each */
        while (next < 5 && !ht_moves_has(&m, next))
            next++;
        ck_assert_uint_eq(ht_moves_next(&m, i, 5), next);
    }
    ck_assert_int_eq(ht_moves_state(&m, "odd", 4 * MIB + 17), -EINVAL);
    ck_assert_int_eq(ht_moves_state(&m, "wide", 8 * (2 * MIB + 8)), -EINVAL);
    ck_assert_int_eq(ht_moves_state(&m, "hostile", (2 * MIB + 8) << 20), -EINVAL);
    ck_assert_int_eq(ht_moves_state(&m, "step", 4), 0);
    ck_assert(ht_moves_has(&m, 0));
    ck_assert_int_eq(ht_moves_file(&m, false, 3 * MIB), 0);
    ck_assert(!ht_moves_has(&m, 0) && ht_moves_next(&m, 0, 3) == 3);
    ck_assert_int_eq(ht_moves_state(&m, "exp_avg", 3 * MIB), -EINVAL);
    ck_assert_int_eq(ht_moves_file(&m, true, UINT64_MAX / 2), -EFBIG);
    ht_moves_end(&m);
}

/* ------------------------------------------------------------------ streams */

static uint8_t content[HT_STREAM_BLOCK_BYTES];

static void begin_dtype(struct ht_stream_writer *w, struct ht_stream_shard s, const char *table, const char *dtype)
{
    struct ht_stream_head head = {.step = 4, .for_rank = true, .shard = s};
    struct ht_buf a = HT_BUF_INIT;
    struct ht_stream_entry e = {.kind = HT_STREAM_DIRECTORY, .path = "", .target = ""};

    ht_buf_reset(&stream);
    ck_assert_int_eq(ht_stream_writer_begin(w, &head, put, NULL), 0);
    ht_stream_attribute_put(&a, "user.hitrain.shards", table, strlen(table));
    e.attributes = (struct ht_stream_attributes){a.data, a.len};
    ck_assert_int_eq(ht_stream_put_entry(w, &e), 0);
    ht_buf_reset(&a);
    ht_stream_attribute_put(&a, "user.hitrain.dtype", dtype, strlen(dtype));
    e = (struct ht_stream_entry){.kind = HT_STREAM_FILE, .path = "w", .target = "", .size = 2 * MIB + 8};
    e.attributes = (struct ht_stream_attributes){a.data, a.len};
    ck_assert_int_eq(ht_stream_put_entry(w, &e), 0);
    ht_buf_free(&a);
}

static void begin(struct ht_stream_writer *w, struct ht_stream_shard s, const char *table)
{
    begin_dtype(w, s, table, "f32");
}

static void end(struct ht_stream_writer *w)
{
    struct ht_hash128 digest;

    ck_assert_int_eq(ht_stream_put_end(w, &digest), 0);
    ht_stream_writer_free(w);
}

static char why[HT_RECORDS_WHY_MAX];
static uint64_t shape;

/* Records, or a negative errno. */
static int read_bytes(size_t len)
{
    struct ht_reader in = ht_reader_of(stream.data, len);
    struct ht_stream_record x = {.type = HT_STREAM_ENTRY};
    struct ht_stream_reader r;
    int rc = ht_stream_reader_begin(&r, get_left, &in), count = 0;

    for (; rc == 0 && x.type != HT_STREAM_END; count++)
        rc = ht_stream_next(&r, &x);
    memcpy(why, r.in.why, sizeof(why));
    shape = r.shape;
    ht_stream_reader_free(&r);
    return rc < 0 ? rc : count;
}

TEST(a_stream_for_a_rank_comes_back_whole_or_not)
{
    struct ht_stream_writer w;

    memset(content, 7, sizeof(content));
    begin(&w, shard("2 1-0", 0, 0), "2 1-0");
    ck_assert_int_eq(ht_stream_put_block(&w, 1, content, MIB), -EINVAL);
    ck_assert_int_eq(ht_stream_put_block(&w, 2, content, 8), 0);
    ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"exp_avg", 9}), -EINVAL);
    ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"step", 4}), 0);
    ck_assert_int_eq(ht_stream_put_block(&w, 0, content, 4), 0);
    end(&w);
    ck_assert_int_eq(read_bytes(stream.len), 6);
    for (size_t i = 0; i < stream.len; i++) {
        stream.data[i] ^= 0x20;
        ck_assert_int_eq(read_bytes(stream.len), -EPROTO);
        stream.data[i] ^= 0x20;
        ck_assert_int_eq(read_bytes(i), -EPROTO);
    }
    ck_assert_int_eq(read_bytes(stream.len), 6);
    ht_buf_put_u8(&stream, 0); /* the next stream, which this reader leaves */
    ck_assert_int_eq(read_bytes(stream.len), 6);
}

/* A writer that takes everything: it says that the stream is for another rank than the record does. */
TEST(blocks_of_others_and_other_tables_are_refused)
{
    struct ht_stream_writer w;

    memset(content, 7, sizeof(content));
    begin(&w, shard("2 1-0", 0, 0), "2 1-0");
    w.shard = shard("2 1", 0, 1);
    ck_assert_int_eq(ht_moves_file(&w.moves, false, 0), 0);
    ck_assert_int_eq(ht_moves_file(&w.moves, true, 2 * MIB + 8), 0);
    w.moves.blocks = 0;
    ck_assert_int_eq(ht_moves_file(&w.moves, true, 2 * MIB + 8), 0);
    ck_assert_int_eq(ht_stream_put_block(&w, 1, content, MIB), 0);
    end(&w);
    ck_assert_int_eq(read_bytes(stream.len), -EPROTO);
    ck_assert_ptr_nonnull(strstr(why, "block 1 is none that the rank gets"));
    begin(&w, shard("2 1-0", 0, 0), "2 1");
    end(&w);
    ck_assert_int_eq(read_bytes(stream.len), -EPROTO);
    ck_assert_ptr_nonnull(strstr(why, "another table of ranks"));
}

/* f16 and bf16 have the same sizes, and other numbers. */
TEST(models_of_another_dtype_have_another_shape)
{
    static const char *const dtype[] = {"f32", "bf16", "f16"};
    uint64_t sum[HT_ARRAY_SIZE(dtype)];

    for (size_t i = 0; i < HT_ARRAY_SIZE(dtype); i++) {
        struct ht_stream_writer w;
        begin_dtype(&w, shard("2 1-0", 0, 0), "2 1-0", dtype[i]);
        end(&w);
        ck_assert_int_eq(read_bytes(stream.len), 3);
        sum[i] = shape;
        for (size_t j = 0; j < i; j++)
            ck_assert(sum[i] != sum[j]);
    }
}

/* ------------------------------------------------------------------- merges */

static uint64_t passed;
static unsigned asked;

static void add(void *ctx, uint64_t bytes)
{
    (void)ctx;
    passed += bytes;
}

static bool stopped(void)
{
    return ++asked == 2;
}

/* The stream goes into a file of 0x3e bytes. */
static int merge(const struct ht_tree_progress *p, uint8_t out_first[3])
{
    char folder[] = "/tmp/hitrain-merge-XXXXXX", text[HT_TREE_WHY_MAX];
    struct ht_reader in = ht_reader_of(stream.data, stream.len);
    struct ht_stream_reader r;
    int dir, fd, rc;

    ck_assert_ptr_nonnull(mkdtemp(folder));
    dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    fd = openat(dir, "w", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    memset(content, 0x3e, sizeof(content));
    for (unsigned b = 0; b < 3; b++)
        ck_assert_int_eq(pwrite(fd, content, b < 2 ? MIB : 8, (off_t)(b * MIB)), b < 2 ? MIB : 8);
    ck_assert_int_eq(ht_stream_reader_begin(&r, get_left, &in), 0);
    passed = asked = 0;
    rc = ht_tree_merge(dir, &r, true, p, text);
    for (unsigned b = 0; b < 3; b++)
        ck_assert_int_eq(pread(fd, out_first + b, 1, (off_t)(b * MIB)), 1);
    ht_stream_reader_free(&r);
    close(fd);
    ck_assert_int_eq(unlinkat(dir, "w", 0), 0);
    close(dir);
    ck_assert_int_eq(rmdir(folder), 0);
    return rc;
}

/* Blocks that stay are counted, too: the whole is that of the model. */
TEST(progress_of_a_merge_ends_with_all_bytes)
{
    struct ht_stream_writer w;
    struct ht_tree_progress p = {add, NULL, NULL};
    uint8_t first[3];

    memset(content, 7, sizeof(content));
    begin(&w, shard("2 1-0", 0, 0), "2 1-0");
    ck_assert_int_eq(ht_stream_put_block(&w, 0, content, MIB), 0);
    end(&w);
    ck_assert_int_eq(merge(&p, first), 0);
    ck_assert(first[0] == 7 && first[1] == 0x3e && first[2] == 0);
    ck_assert_uint_eq(passed, 2 * MIB + 8);
    begin(&w, shard("2 1-0", 0, 1), "2 1-0"); /* has nothing for the rank */
    end(&w);
    ck_assert_int_eq(merge(&p, first), 0);
    ck_assert(first[0] == 0x3e && first[1] == 0x3e && first[2] == 0x3e);
    ck_assert_uint_eq(passed, 2 * MIB + 8);
}

/* For blocks of zeros nothing is read, where a signal would end it. */
TEST(zeros_are_written_until_the_caller_is_to_end)
{
    struct ht_stream_writer w;
    struct ht_tree_progress p = {.stopped = stopped};
    uint8_t first[3];

    begin(&w, shard("2 1-0", 0, 0), "2 1-0");
    end(&w);
    ck_assert_int_eq(merge(&p, first), -EINTR);
    ck_assert(first[0] == 0 && first[1] == 0x3e && first[2] == 0x3e);
}

TEST(a_table_without_a_change_has_no_stream)
{
    static const struct {
        const char *table;
        unsigned rank, of;
    } refused[] = {{"4", 0, HT_SHARDS_NONE}, {"4 3", 3, HT_SHARDS_NONE}, {"4 3", 0, 4}};
    struct ht_stream_head head = {.for_rank = true};
    struct ht_stream_writer w;

    for (size_t i = 0; i < HT_ARRAY_SIZE(refused); i++) {
        head.shard = shard(refused[i].table, refused[i].rank, refused[i].of);
        ck_assert_ptr_nonnull(ht_stream_shard_refused(&head.shard));
        ck_assert_int_eq(ht_stream_writer_begin(&w, &head, put, NULL), -EINVAL);
        ht_stream_writer_free(&w);
    }
    head.shard = shard("4 3", 0, 3);
    head.incremental = true;
    ck_assert_int_eq(ht_stream_writer_begin(&w, &head, put, NULL), -EINVAL);
    ht_stream_writer_free(&w);
}

int main(void)
{
    return run_tests("streams for a rank", .timeout_s = 300);
}
