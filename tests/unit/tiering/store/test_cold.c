/* SPDX-License-Identifier: Apache-2.0 */
/* Content in a vault: read, written over, taken back, kept apart from all that owns space. The vault is a folder. */
#include <sys/stat.h>

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/cold.h"
#include "tiering/base/hash.h"
#include "tiering/data/cold.h"

enum { LEASE = 7, SEGMENT = 3, ROOT = 77, BLOCKS = 6, UNITS = MIB / HT_BLOCK_BYTES, TAIL = 12345 };

static char folder[] = "/tmp/hitrain-cold-XXXXXX";
static char url[64];
static uint32_t vault_timeout_ms;
static const uint8_t uuid[16] = {1, 2, 3}, other[16] = {9};
static uint8_t *content;

static const char *in_folder(const char *name)
{
    char *path = test_alloc(256);

    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

/* A segment: a header, which the store does not read, and blocks. The last one is short. */
static void write_segment(void)
{
    FILE *f = fopen(in_folder("seg/00000007/0003"), "w");

    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fseek(f, HT_BLOCK_BYTES, SEEK_SET), 0);
    ck_assert_uint_eq(fwrite(content, 1, (BLOCKS - 1) * MIB + TAIL, f), (BLOCKS - 1) * MIB + TAIL);
    ck_assert_int_eq(ftruncate(fileno(f), HT_BLOCK_BYTES + BLOCKS * MIB), 0);
    ck_assert_int_eq(fclose(f), 0);
}

static void begin(void)
{
    ck_assert_ptr_nonnull(mkdtemp(folder));
    ck_assert_int_eq(mkdir(in_folder("seg"), 0700), 0);
    ck_assert_int_eq(mkdir(in_folder("seg/00000007"), 0700), 0);
    snprintf(url, sizeof(url), "file://%s", folder);
    content = pattern(BLOCKS * MIB, 5);
    write_segment();
}

static void end(void)
{
    char command[80];

    fixture_end();
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

static struct ht_obj_place place(unsigned block)
{
    uint32_t stored = block == BLOCKS - 1 ? TAIL : MIB;

    return (struct ht_obj_place){.index = block,
                                 .lease = LEASE,
                                 .segment = SEGMENT,
                                 .unit = 1 + block * UNITS,
                                 .stored = stored,
                                 .checksum = ht_hash64(content + block * MIB, stored, 0)};
}

static const uint64_t size = (BLOCKS - 1) * MIB + TAIL;

static struct ht_obj *cold_object(void)
{
    struct ht_obj_place p[BLOCKS];
    struct ht_obj *o = object(MIB, ROOT);

    for (unsigned i = 0; i < BLOCKS; i++)
        p[i] = place(i);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), p, BLOCKS), 0);
    return o;
}

static void commit(void)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_scope_commit(s, ROOT, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
}

/* The programs of vaults lie in the tree, where tests run. */
static void mount_vault(bool threads)
{
    mount_as(.no_threads = !threads, .vault_timeout_ms = vault_timeout_ms, .vault_programs = "mount-helpers/vault");
}

static void fresh_vault(bool threads)
{
    fresh(128, false);
    unmount_store();
    mount_vault(threads);
    ck_assert_int_eq(ht_store_set_vault(s, uuid, url), 0);
}

static struct ht_obj *committed(bool threads)
{
    fresh_vault(threads);
    struct ht_obj *o = cold_object();
    commit();
    return o;
}

static uint64_t cold_bytes(void)
{
    struct ht_store_stats st;

    ht_store_stats(s, &st);
    ck_assert_uint_eq(st.cold_bytes, ht_scope_cold_bytes(s, ROOT));
    return st.cold_bytes;
}

static const uint64_t all_cold = (uint64_t)(BLOCKS - 1) * MIB + HT_BLOCK_BYTES * 4;

TEST(content_is_read_from_the_vault_also_after_a_mount)
{
    struct ht_obj *o = committed(false);
    uint64_t oid = ht_obj_id(o), free_bytes = ht_store_available(s);

    expect(o, 0, content, size);
    ht_store_verify(s, true);
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    unmount_store();
    mount_vault(false);
    ck_assert_uint_eq(ht_store_available(s), free_bytes);
    ck_assert_uint_eq(cold_bytes(), all_cold);
    o = get_object(oid);
    expect(o, 3 * MIB - 5, content + 3 * MIB - 5, 10);
    expect(o, 0, content, size);
    ck_assert(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_COLD);
}

TEST(an_update_and_a_write_take_space_here)
{
    struct ht_obj *o = committed(true);
    uint8_t *want = test_alloc(size);
    struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o, .index = 1, .mode = HT_BATCH_PIN_UPDATE}}};

    memcpy(want, content, size);
    ck_assert_int_eq(ht_batch_pin_begin(&l), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&l), 0);
    ck_assert_int_eq(memcmp(l.chunk[0].data, content + MIB, MIB), 0);
    memset(l.chunk[0].data + 100, 0xee, 50);
    memset(want + MIB + 100, 0xee, 50);
    ht_batch_pin_end(&l, 1);
    ck_assert_int_eq(ht_batch_pin_finish(&l), 0);
    put_all(o, 2 * MIB + 77, (const uint8_t *)"a part", 6); /* the rest comes from the vault */
    memcpy(want + 2 * MIB + 77, "a part", 6);
    memset(want + 4 * MIB, 0x11, MIB);
    put_all(o, 4 * MIB, want + 4 * MIB, MIB);  /* the whole block: nothing is fetched */
    ck_assert_uint_eq(cold_bytes(), all_cold); /* until the commit */
    expect(o, 0, want, size);
    commit();
    ck_assert_uint_eq(cold_bytes(), all_cold - 3 * MIB);
    ht_obj_evict(o);
    expect(o, 0, want, size);
}

TEST(an_abort_goes_back_to_the_vault)
{
    struct ht_obj *o = committed(true);

    put_all(o, MIB, test_alloc(MIB), MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 3 * MIB + 9), 0);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    ck_assert_int_eq(ht_scope_abort(s, ROOT), 0);
    ck_assert_uint_eq(cold_bytes(), all_cold);
    expect(o, 0, content, size);
    struct ht_obj *never = cold_object();
    ck_assert_uint_eq(cold_bytes(), 2 * all_cold);
    ck_assert_int_eq(ht_scope_abort(s, ROOT), 0);
    put_object(never);
    ck_assert_uint_eq(cold_bytes(), all_cold);
}

TEST(truncation_and_holes)
{
    struct ht_obj *o = committed(false);
    uint8_t *want = test_alloc(size);
    uint64_t oid = ht_obj_id(o);

    memcpy(want, content, 2 * MIB + 100);
    memset(want + 500, 0, 1000);
    ck_assert_int_eq(ht_obj_punch(o, 500, 1000), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 2 * MIB + 100), 0);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    expect(o, 0, want, size);
    commit();
    unmount_store();
    mount_vault(false);
    o = get_object(oid);
    expect(o, 0, want, size);
    ck_assert_uint_eq(cold_bytes(), 2 * MIB); /* block 1, and block 2 of which few bytes count */
}

TEST(copies_share_inside_their_root_alone)
{
    struct ht_obj *o = committed(false), *in = object(MIB, ROOT), *out = object(MIB, 0);
    uint64_t before = ht_store_available(s);

    ck_assert_int_eq(ht_obj_clone(o, 0, in, 0, size), (ssize_t)size);
    ck_assert_uint_eq(cold_bytes(), 2 * all_cold);
    ck_assert_int_eq(ht_obj_clone(o, 0, out, 0, size), (ssize_t)size);
    ck_assert_uint_eq(cold_bytes(), 2 * all_cold);
    commit();
    ck_assert_int_eq(ht_obj_sync(out), 0);
    ck_assert_uint_gt(before - ht_store_available(s), (BLOCKS - 1) * MIB);
    expect(in, 0, content, size);
    expect(out, 0, content, size);
}

TEST(a_deleted_object_frees_nothing_in_the_vault)
{
    struct ht_obj *o = committed(false);
    uint64_t available = ht_store_available(s);

    delete (o);
    commit();
    ck_assert_uint_eq(cold_bytes(), 0);
    ck_assert_uint_eq(ht_store_available(s), available);
    ck_assert_int_eq(ht_store_set_vault(s, other, url), 0);
}

TEST(places_that_no_segment_has_are_refused)
{
    fresh_vault(false);
    struct ht_obj *o = object(MIB, ROOT), *small = object(HT_SMALL_CHUNK_BYTES, ROOT), *outside = object(MIB, 0);
    struct ht_obj_place good = place(0), p;
#define REFUSED(change)                                                           \
    do {                                                                          \
        p = good;                                                                 \
        change;                                                                   \
        ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), -EINVAL); \
    } while (0)

    REFUSED(p.index = 0); /* the object is empty */
    ck_assert_int_eq(ht_obj_truncate(o, 2 * MIB), 0);
    REFUSED(p.lease = 1 << HT_VAULT_LEASE_BITS);
    REFUSED(p.segment = 1 << HT_VAULT_SEGMENT_BITS);
    REFUSED(p.unit = 0);
    REFUSED(p.unit = HT_VAULT_UNITS);
    REFUSED(p.unit = HT_VAULT_UNITS - UNITS + 1);
    REFUSED(p.stored = 0);
    REFUSED(p.stored = MIB + 1);
    REFUSED(p.stored = UINT32_MAX);
    REFUSED(p.stored = MIB - 1); /* bytes themselves are as many as those of the block */
    REFUSED(p.codec = HT_CODEC_LOST);
    REFUSED(p.codec = 77);
    REFUSED(p.codec = HT_CODEC_PLANES); /* it would save nothing */
    REFUSED(p.index = 2);
    REFUSED(p.index = UINT64_MAX);
    ck_assert_int_eq(ht_obj_truncate(small, MIB), 0);
    ck_assert_int_eq(ht_obj_set_places(small, ht_obj_aborts(small), &good, 1), -EINVAL);
    ck_assert_int_eq(ht_obj_truncate(outside, MIB), 0);
    ck_assert_int_eq(ht_obj_set_places(outside, ht_obj_aborts(outside), &good, 1), -EINVAL);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &good, 1), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &good, 1), -EEXIST);
    put_all(o, MIB, (const uint8_t *)"x", 1);
    p = place(1);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), -EEXIST);
    ck_assert_uint_eq(cold_bytes(), MIB);
}

TEST(places_are_told_as_they_were_set)
{
    struct ht_obj *o = committed(false);
    struct ht_obj_place got[BLOCKS + 1];

    put_all(o, MIB + 1, (const uint8_t *)"x", 1);
    ck_assert_uint_eq(ht_obj_places(o, 0, got, BLOCKS + 1), BLOCKS - 1);
    for (unsigned i = 0; i < BLOCKS - 1; i++) {
        struct ht_obj_place want = place(i ? i + 1 : 0);
        ck_assert_uint_eq(got[i].index, want.index);
        ck_assert_uint_eq(got[i].unit, want.unit);
        ck_assert_uint_eq(got[i].stored, want.stored);
        ck_assert_uint_eq(got[i].lease, LEASE);
        ck_assert_uint_eq(got[i].segment, SEGMENT);
        ck_assert_uint_eq(got[i].checksum, want.checksum);
    }
    ck_assert_uint_eq(ht_obj_places(o, 5, got, 1), 1);
    ck_assert_uint_eq(got[0].index, 5);
}

TEST(a_vault_is_one_and_must_be_known)
{
    fresh(64, false);
    struct ht_vault_info info;
    struct ht_obj_place p = place(0);
    struct ht_obj *o = object(MIB, ROOT);

    ck_assert_int_eq(ht_store_vault(s, &info), -ENXIO);
    ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), -ENXIO);
    ck_assert_int_eq(ht_store_set_vault(s, uuid, "ftp"), -EINVAL);
    ck_assert(!(ht_store_super(s)->feat_refuse & HT_FEAT_REFUSE_COLD));
    ck_assert_int_eq(ht_store_set_vault(s, other, "/tmp/before"), 0);
    ck_assert_int_eq(ht_store_set_vault(s, uuid, url), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), 0);
    ck_assert_int_eq(ht_store_set_vault(s, other, url), -EBUSY);
    ck_assert_int_eq(ht_store_set_vault(s, uuid, "/tmp/elsewhere"), 0);
    ck_assert_int_eq(ht_store_vault(s, &info), 0);
    ck_assert_str_eq(info.url, "file:///tmp/elsewhere");
    ck_assert_int_eq(memcmp(info.uuid, uuid, 16), 0);
}

TEST(wrong_bytes_are_an_error)
{
    struct ht_obj *o = committed(false);
    uint8_t byte;

    content[2 * MIB + 9] ^= 1;
    write_segment();
    content[2 * MIB + 9] ^= 1;
    ck_assert_int_eq(ht_obj_read(o, 2 * MIB, &byte, 1), -EIO);
    expect(o, MIB, content + MIB, MIB);
    ck_assert_int_eq(truncate(in_folder("seg/00000007/0003"), 3 * MIB), 0);
    ck_assert_int_eq(ht_obj_read(o, 3 * MIB, &byte, 1), -EIO);
    ck_assert_int_eq(unlink(in_folder("seg/00000007/0003")), 0);
    ck_assert_int_eq(ht_obj_read(o, 4 * MIB, &byte, 1), -EIO);
    ck_assert_int_eq(ht_obj_write(o, 4 * MIB + 1, &byte, 1), -EIO);
    struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o, .index = 4, .mode = HT_BATCH_PIN_UPDATE}}};
    ck_assert_int_eq(ht_batch_pin_begin(&l), -EIO);
    write_segment();
    expect(o, 0, content, size);
}

static void check_part(void *ctx, const void *bytes, size_t len)
{
    ck_assert_int_eq(memcmp(bytes, content + (uintptr_t)ctx, len), 0);
}

TEST(prefetch_and_readers_bring_content_ahead)
{
    struct ht_obj *o = committed(true);
    struct ht_store_stats st;

    ck_assert_int_eq(ht_obj_prefetch(o), 0);
    ht_store_stats(s, &st);
    ck_assert_uint_eq(st.cold_read_bytes, all_cold);
    ck_assert_int_eq(rename(in_folder("seg"), in_folder("away")), 0);
    expect(o, 0, content, size); /* nothing is fetched again */
    ck_assert_int_eq(rename(in_folder("away"), in_folder("seg")), 0);
    ht_obj_evict(o);
    struct ht_obj_reader r = {0};
    uint8_t *buf = test_alloc(MIB);
    for (uint64_t at = 0; at < size; at += MIB / 4) {
        size_t n = at + MIB / 4 < size ? MIB / 4 : (size_t)(size - at);
        ck_assert_int_eq(ht_obj_read_in_place(o, &r, at, buf, n, check_part, (void *)(uintptr_t)at), (ssize_t)n);
    }
    ht_obj_reader_end(&r);
}

static void write_faults(const char *lines)
{
    FILE *faults = fopen(in_folder("~faults"), "w");

    ck_assert_ptr_nonnull(faults);
    ck_assert_int_ge(fputs(lines, faults), 0);
    ck_assert_int_eq(fclose(faults), 0);
    snprintf(url, sizeof(url), "test:%s", folder);
}

/* Each chunk is still on its way when the reader comes to it: that is no eviction. */
TEST(a_reader_that_waits_for_the_vault_reads_ahead_all_the_same)
{
    write_faults("**delay=0.02 get seg/\n");
    fixture_dram_bytes = 64 * MIB;
    struct ht_obj *o = committed(true);
    struct ht_obj_reader r = {0};
    uint8_t *buf = test_alloc(MIB);
    for (uint64_t at = 0; at < size; at += MIB) {
        size_t n = at + MIB < size ? MIB : (size_t)(size - at);
        ck_assert_int_eq(ht_obj_read_in_place(o, &r, at, buf, n, check_part, (void *)(uintptr_t)at), (ssize_t)n);
    }
    ck_assert_uint_eq(r.streams.up.window, 4 * MIB);
    ht_obj_reader_end(&r);
}

/* Has no reader and no fetch anything to come? */
static bool is_quiet(struct ht_obj *o, const struct ht_obj_reader *r)
{
    ht_store_lock(s);
    bool quiet = ht_list_empty(&r->pending);
    for (unsigned i = 0; i < BLOCKS; i++)
        quiet &= !ht_cold_is_coming(o, i);
    ht_store_unlock(s);
    return quiet;
}

/* The vault shows that it is the right one, and then never answers. */
TEST(readahead_stops_while_the_vault_is_silent)
{
    write_faults("delay=0 get vault/\n**lost-before any\n");
    fixture_dram_bytes = 64 * MIB;
    vault_timeout_ms = 200;
    struct ht_obj *o = committed(true);
    struct ht_obj_reader r = {0};
    uint8_t *buf = test_alloc(MIB);

    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(ht_obj_read_for(o, &r, i * MIB, buf, MIB), -EIO);
        while (!is_quiet(o, &r))
            usleep(1000);
    }
    ht_obj_reader_end(&r);
}

/* As the file of a state does when that was made anew. */
TEST(a_reader_begins_again_in_another_object)
{
    fixture_dram_bytes = 64 * MIB;
    struct ht_obj *first = committed(true), *second = cold_object();
    struct ht_obj_reader r = {0};
    uint8_t *buf = test_alloc(2 * MIB);

    ck_assert_int_eq(ht_obj_read_for(first, &r, 0, buf, 2 * MIB), 2 * MIB);
    ck_assert_int_eq(memcmp(buf, content, 2 * MIB), 0);
    ck_assert_uint_eq(r.oid, ht_obj_id(first));
    ck_assert_uint_gt(r.streams.up.window, 0);
    delete (first);
    ck_assert_int_eq(ht_obj_read_for(second, &r, 3 * MIB, buf, MIB), MIB);
    ck_assert_int_eq(memcmp(buf, content + 3 * MIB, MIB), 0);
    ck_assert_uint_eq(r.oid, ht_obj_id(second));
    ck_assert_uint_eq(r.streams.up.window, 0);
    ht_obj_reader_end(&r);
    ck_assert_ptr_null(r.obj);
    commit();
    ck_assert_uint_eq(cold_bytes(), all_cold);
}

RUN_TESTS("cold", .timeout_s = 120, .quiet = SILENT, .setup = begin, .teardown = end)
