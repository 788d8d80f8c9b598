/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of steps: the reader returns what the writer wrote, and refuses all other bytes. */
#include <stdio.h>
#include <stdlib.h>
#include "mount-helpers/stream/stream.h"
#include "tests/support/suite.h"
#include "tests/unit/mount-helpers/stream/memory.h"

struct source {
    const uint8_t *p, *end;
    size_t most; /* bytes at once */
};

static ssize_t get(void *ctx, void *data, size_t len)
{
    struct source *s = ctx;
    size_t left = (size_t)(s->end - s->p), n = len < left ? len : left;

    n = n < s->most ? n : s->most;
    if (n)
        memcpy(data, s->p, n);
    s->p += n;
    return (ssize_t)n;
}

/* ----------------------------------------------------------------- a sample */

static uint8_t content[HT_STREAM_BLOCK_BYTES];
static struct ht_hash128 digest;

static void fill(uint8_t first)
{
    for (size_t i = 0; i < sizeof(content); i++)
        content[i] = (uint8_t)(first + i * 7 + i / 251);
}

static void entry(struct ht_stream_writer *w, struct ht_stream_entry e)
{
    e.path = e.path ? e.path : "";
    e.target = e.target ? e.target : "";
    ck_assert_int_eq(ht_stream_put_entry(w, &e), 0);
}

/* Properties of the sample that tests change. */
struct change {
    const char *name, *dtype, *tier;
    uint64_t step, size;
    uint16_t mode;
    uint32_t uid;
    int64_t mtime_ns;
    uint8_t byte, state;
    bool no_state;
};
static const struct change plain = {.name = "w", .dtype = "f32", .tier = "fast", .step = 7, .size = 100, .mode = 0644};

static void write_sample(const struct change *c)
{
    struct ht_stream_writer w;
    struct ht_stream_head head = {.step = c->step, .bytes = 12345};
    struct ht_buf a = HT_BUF_INIT;
    char path[32];

    ht_buf_reset(&stream);
    ht_stream_attribute_put(&a, "user.hitrain.dtype", c->dtype, strlen(c->dtype));
    ht_stream_attribute_put(&a, "user.hitrain.tier", c->tier, strlen(c->tier));
    ck_assert_int_eq(ht_stream_writer_begin(&w, &head, put, NULL), 0);
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_DIRECTORY, .mode = 0755});
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_DIRECTORY, .mode = 0700, .path = "layer"});
    snprintf(path, sizeof(path), "layer/%s", c->name);
    entry(&w,
          (struct ht_stream_entry){.kind = HT_STREAM_FILE,
                                   .path = path,
                                   .size = c->size,
                                   .mode = c->mode,
                                   .uid = c->uid,
                                   .gid = 4,
                                   .mtime_ns = c->mtime_ns,
                                   .attributes = {a.data, a.len}});
    fill(c->byte);
    ck_assert_int_eq(ht_stream_put_block(&w, 0, content, c->size), 0);
    if (!c->no_state) {
        ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"exp_avg", 40}), 0);
        fill((uint8_t)(c->state + 1));
        ck_assert_int_eq(ht_stream_put_block(&w, 0, content, 40), 0);
        ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"step", 4}), 0);
        ck_assert_int_eq(ht_stream_put_block(&w, 0, (const uint8_t *)"\0\0", 2), 0); /* zeros are left out */
    }
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_LINK, .path = "layer2", .target = path});
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_SYMLINK, .path = "z", .target = "../elsewhere", .uid = 3});
    ck_assert_int_eq(ht_stream_put_end(&w, &digest), 0);
    ck_assert_uint_eq(w.entries, 5);
    ht_stream_writer_free(&w);
    ht_buf_free(&a);
}

static char why[HT_RECORDS_WHY_MAX];

/* Reads the whole stream. Returns the number of records, or a negative errno, with the reason in why. */
static int read_bytes(const uint8_t *data, size_t len, size_t most)
{
    struct source s = {data, data + len, most};
    struct ht_stream_record record = {.type = HT_STREAM_ENTRY};
    struct ht_stream_reader r;
    int rc = ht_stream_reader_begin(&r, get, &s), count = 0;

    while (rc == 0 && record.type != HT_STREAM_END) {
        rc = ht_stream_next(&r, &record);
        count++;
    }
    if (rc == 0)
        ck_assert_mem_eq(&record.digest, &digest, sizeof(digest));
    else
        ck_assert_uint_gt(strlen(r.in.why), 0);
    memcpy(why, r.in.why, sizeof(why));
    ht_stream_reader_free(&r);
    return rc < 0 ? rc : count;
}

static int read_stream(void)
{
    return read_bytes(stream.data, stream.len, SIZE_MAX);
}

TEST(what_is_written_comes_back)
{
    struct source s;
    struct ht_stream_reader r;
    struct ht_stream_record x;
    struct ht_stream_attribute a;

    write_sample(&plain);
    s = (struct source){stream.data, stream.data + stream.len, 3};
    ck_assert_int_eq(ht_stream_reader_begin(&r, get, &s), 0);
    ck_assert_uint_eq(r.head.step, 7);
    ck_assert_uint_eq(r.head.bytes, 12345);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert_str_eq(x.entry.path, "layer/w");
    ck_assert_uint_eq(x.entry.size, 100);
    ck_assert_uint_eq(x.entry.mode, 0644);
    ck_assert_uint_eq(x.entry.gid, 4);
    ck_assert(ht_stream_attribute_next(&x.entry.attributes, &a) && a.name_len == 18 && a.value_len == 3);
    ck_assert_mem_eq(a.name, "user.hitrain.dtype", 18);
    ck_assert_mem_eq(a.value, "f32", 3);
    ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    fill(0);
    ck_assert(x.type == HT_STREAM_BLOCK && x.block.index == 0 && x.block.len == 100);
    ck_assert_mem_eq(x.block.data, content, 100);
    ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert(x.type == HT_STREAM_STATE && x.state.size == 40);
    ck_assert_str_eq(x.state.name, "exp_avg");
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert_int_eq(x.entry.kind, HT_STREAM_LINK);
    ck_assert_str_eq(x.entry.target, "layer/w");
    ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert_str_eq(x.entry.target, "../elsewhere");
    ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert_int_eq(x.type, HT_STREAM_END);
    ck_assert_mem_eq(&x.digest, &digest, sizeof(digest));
    ht_stream_reader_free(&r);
}

TEST(a_cut_stream_is_refused_at_every_byte)
{
    write_sample(&plain);
    ck_assert_int_eq(read_stream(), 10);
    for (size_t len = 0; len < stream.len; len++) {
        ck_assert_int_eq(read_bytes(stream.data, len, SIZE_MAX), -EPROTO);
        ck_assert_msg(strstr(why, "the stream is cut"), "%s", why);
    }
    ht_buf_put_u8(&stream, 0);
    ck_assert_int_eq(read_stream(), -EPROTO);
    ck_assert_msg(strstr(why, "bytes after the end mark"), "%s", why);
}

TEST(every_changed_byte_is_noticed)
{
    write_sample(&plain);
    for (size_t i = 0; i < stream.len; i++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            stream.data[i] ^= (uint8_t)(1u << bit);
            ck_assert_int_eq(read_stream(), -EPROTO);
            stream.data[i] ^= (uint8_t)(1u << bit);
        }
    }
    ck_assert_int_eq(read_stream(), 10);
}

TEST(a_message_says_where_it_broke)
{
    write_sample(&plain);
    stream.data[stream.len - 300] ^= 1;
    ck_assert_int_eq(read_stream(), -EPROTO);
    ck_assert_msg(strncmp(why, "at byte ", 8) == 0 && strstr(why, ", after layer"), "%s", why);
}

/* ------------------------------------------------------------------- digest */

static void digest_of(const struct change *c, char text[HT_DIGEST_TEXT_MAX])
{
    write_sample(c);
    ht_digest_text(&digest, text);
}

TEST(a_digest_is_that_of_what_the_step_is)
{
    const struct change other[] = {
        {.name = "v", .dtype = "f32", .tier = "fast", .step = 7, .size = 100},
        {.name = "w", .dtype = "i32", .tier = "fast", .step = 7, .size = 100},
        {.name = "w", .dtype = "f32", .tier = "fast", .step = 8, .size = 100},
        {.name = "w", .dtype = "f32", .tier = "fast", .step = 7, .size = 101},
        {.name = "w", .dtype = "f32", .tier = "fast", .step = 7, .size = 100, .byte = 1},
        {.name = "w", .dtype = "f32", .tier = "fast", .step = 7, .size = 100, .state = 1},
        {.name = "w", .dtype = "f32", .tier = "fast", .step = 7, .size = 100, .no_state = true},
    };
    char one[HT_DIGEST_TEXT_MAX], two[HT_DIGEST_TEXT_MAX];

    digest_of(&plain, one);
    for (size_t i = 0; i < HT_ARRAY_SIZE(other); i++) {
        digest_of(&other[i], two);
        ck_assert_str_ne(one, two);
    }
}

TEST(a_digest_does_not_depend_on_owners_times_and_places)
{
    const struct change same = {.name = "w",
                                .dtype = "f32",
                                .tier = "capacity",
                                .step = 7,
                                .size = 100,
                                .mode = 0400,
                                .uid = 9,
                                .mtime_ns = -5};
    char one[HT_DIGEST_TEXT_MAX], two[HT_DIGEST_TEXT_MAX];

    digest_of(&plain, one);
    digest_of(&same, two);
    ck_assert_str_eq(one, two);
    ck_assert_str_eq(one, "606fb8da39a3bf7fb83fc5abcd34c9bb"); /* in streams for ever */
}

TEST(a_digest_without_a_stream_is_the_same)
{
    struct ht_stream_writer w;
    struct ht_hash128 with, without;

    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(ht_stream_writer_begin(&w, &(struct ht_stream_head){.step = 1}, i ? put : NULL, NULL), 0);
        entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_DIRECTORY});
        ck_assert_int_eq(ht_stream_put_end(&w, i ? &with : &without), 0);
        ht_stream_writer_free(&w);
    }
    ck_assert_mem_eq(&with, &without, sizeof(with));
}

/* --------------------------------------------- streams that no writer makes */

static uint64_t number;

static void put_header(uint32_t version, uint32_t features, uint32_t block_bytes, uint64_t step, uint64_t unknown)
{
    uint8_t h[HT_STREAM_HEADER_BYTES] = HT_STREAM_MAGIC;

    ht_buf_reset(&stream);
    number = 0;
    ht_le32_store(h + 8, version);
    ht_le32_store(h + 12, features);
    ht_le32_store(h + 16, block_bytes);
    ht_le64_store(h + 24, step);
    ht_le64_store(h + 40, unknown);
    ht_le64_store(h + 56, ht_hash64(h, 56, 0));
    ht_buf_put(&stream, h, sizeof(h));
}

static void put_record(uint8_t type, uint64_t place, const void *payload, size_t len)
{
    uint8_t h[HT_RECORDS_HEAD_BYTES] = {type};
    struct ht_hash128 sum = ht_hash128(payload, len);

    ht_le32_store(h + 4, (uint32_t)len);
    ht_le64_store(h + 8, number++);
    ht_le64_store(h + 16, place);
    memcpy(h + 24, &sum, sizeof(sum));
    ht_le64_store(h + 40, ht_hash64(h, 40, 0));
    ht_buf_put(&stream, h, sizeof(h));
    ht_buf_put(&stream, payload, len);
}

static void put_raw_entry(uint16_t kind, const char *path, const char *target, uint64_t size, const char *attribute)
{
    struct ht_buf b = HT_BUF_INIT;

    ht_buf_put_u16(&b, kind);
    ht_buf_put_u16(&b, 0);
    ht_buf_put_u64(&b, 0);
    ht_buf_put_u16(&b, (uint16_t)strlen(path));
    ht_buf_put_u16(&b, (uint16_t)strlen(target));
    ht_buf_put_u64(&b, 0);
    ht_buf_put_u64(&b, size);
    ht_buf_put(&b, path, strlen(path));
    ht_buf_put(&b, target, strlen(target));
    if (attribute)
        ht_stream_attribute_put(&b, attribute, "x", 1);
    put_record(HT_STREAM_ENTRY, 0, b.data, b.len);
    ht_buf_free(&b);
}

static void begin(void)
{
    put_header(1, 0, HT_STREAM_BLOCK_BYTES, 0, 0);
    put_raw_entry(HT_STREAM_DIRECTORY, "", "", 0, NULL);
}

#define REFUSED(text)                                       \
    do {                                                    \
        ck_assert_int_eq(read_stream(), -EPROTO);           \
        ck_assert_msg(strstr(why, (text)) != 0, "%s", why); \
    } while (0)

TEST(a_foreign_header_is_refused)
{
    put_header(2, 0, HT_STREAM_BLOCK_BYTES, 0, 0);
    REFUSED("version 2");
    put_header(0x01000000, 0, HT_STREAM_BLOCK_BYTES, 0, 0); /* the other endianness */
    REFUSED("version 16777216");
    put_header(1, 4, HT_STREAM_BLOCK_BYTES, 0, 0);
    REFUSED("features that this program does not know: 0x4");
    put_header(1, 0, 65536, 0, 0);
    REFUSED("blocks of 65536 bytes");
    put_header(1, 0, HT_STREAM_BLOCK_BYTES, UINT64_MAX, 0);
    REFUSED("number of the step");
    put_header(1, 0, HT_STREAM_BLOCK_BYTES, 0, 1);
    REFUSED("does not know");
    ht_buf_reset(&stream);
    for (int i = 0; i < 100; i++)
        ht_buf_put(&stream, "some text\n", 10);
    REFUSED("no stream of a step");
}

static const struct {
    uint16_t kind;
    const char *path, *target;
    uint64_t size;
    const char *attribute, *why;
} refused[] = {
    {HT_STREAM_FILE, "..", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, ".", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "/etc", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "d/../../x", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "d/", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "d//x", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, ".hitrain", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "d/.hitrain", "", 0, NULL, "leaves the model"},
    {HT_STREAM_FILE, "", "", 0, NULL, "root is not the first"},
    {HT_STREAM_FILE, "missing/x", "", 0, NULL, "does not follow its directory"},
    {HT_STREAM_FILE, "link/x", "", 0, NULL, "no directory"},
    {HT_STREAM_FILE, "link", "", 0, NULL, "twice"},
    {HT_STREAM_FILE, "d", "", 0, NULL, "not in order"},
    {HT_STREAM_FILE, "d/f2", "", 0, NULL, "does not follow its directory"},
    {HT_STREAM_FILE, "x", "y", 0, NULL, "no link"},
    {HT_STREAM_FILE, "x", "", 1ull << 50, NULL, "size"},
    {HT_STREAM_DIRECTORY, "x", "", 1, NULL, "size"},
    {HT_STREAM_FILE, "x", "", 0, "trusted.x", "neither user"},
    {HT_STREAM_FILE, "x", "", 0, "security.capability", "neither user"},
    {HT_STREAM_FILE, "x", "", 0, "user.", "neither user"},
    {HT_STREAM_DIRECTORY, "x", "", 0, "user.hitrain-follow", "neither user"},
    {HT_STREAM_DIRECTORY, "x", "", 0, "user.hitrain-receive", "neither user"},
    {HT_STREAM_FILE, "x", "", 0, "", "no proper name"},
    {HT_STREAM_SYMLINK, "x", "", 0, NULL, "link to nothing"},
    {HT_STREAM_SYMLINK, "x", "y", 0, "user.a", "has attributes"},
    {HT_STREAM_LINK, "x", "", 0, NULL, "link to nothing"},
    {HT_STREAM_LINK, "x", "../x", 0, NULL, "target leaves"},
    {HT_STREAM_LINK, "x", "y", 0, NULL, "does not stand before"},
    {HT_STREAM_LINK, "x", "x", 0, NULL, "does not stand before"},
    {0, "x", "", 0, NULL, "kind is unknown"},
    {9, "x", "", 0, NULL, "kind is unknown"},
};

TEST_LOOP(an_impossible_entry_is_refused, HT_ARRAY_SIZE(refused))
{
    begin();
    put_raw_entry(HT_STREAM_DIRECTORY, "d", "", 0, NULL);
    put_raw_entry(HT_STREAM_FILE, "d/f", "", 0, NULL);
    put_raw_entry(HT_STREAM_SYMLINK, "link", "/etc", 0, NULL);
    put_raw_entry(refused[_i].kind, refused[_i].path, refused[_i].target, refused[_i].size, refused[_i].attribute);
    REFUSED(refused[_i].why);
}

TEST(an_entry_too_deep_is_refused)
{
    char path[2 * HT_STREAM_DEPTH_MAX + 4] = "a";

    begin();
    for (int i = 0; i <= HT_STREAM_DEPTH_MAX; i++) {
        put_raw_entry(HT_STREAM_DIRECTORY, path, "", 0, NULL);
        strcat(path, "/a");
    }
    REFUSED("the stream is cut"); /* so far all is well */
    put_raw_entry(HT_STREAM_DIRECTORY, path, "", 0, NULL);
    REFUSED("too many directories");
}

TEST(text_with_a_nul_or_attributes_in_disorder_are_refused)
{
    uint8_t raw[34] = {HT_STREAM_FILE};
    struct ht_stream_entry e = {.kind = HT_STREAM_FILE, .path = "x", .target = ""};
    struct ht_buf b = HT_BUF_INIT;

    begin();
    raw[12] = 2;
    raw[32] = 'a';
    put_record(HT_STREAM_ENTRY, 0, raw, sizeof(raw)); /* "a\0" */
    REFUSED("no proper path");
    ht_stream_attribute_put(&b, "user.b", "", 0);
    ht_stream_attribute_put(&b, "user.a", "", 0);
    e.attributes = (struct ht_stream_attributes){b.data, b.len};
    ck_assert_str_eq(ht_stream_entry_refused(&e), "its attributes are not in order");
    e.attributes.len--;
    ck_assert_str_eq(ht_stream_entry_refused(&e), "its attributes are cut");
    e.attributes.len = b.len / 2;
    ck_assert_ptr_null(ht_stream_entry_refused(&e));
    ht_buf_free(&b);
}

static void put_raw_state(const char *name, uint64_t size)
{
    struct ht_buf b = HT_BUF_INIT;

    ht_buf_put_u64(&b, size);
    ht_buf_put(&b, name, strlen(name));
    put_record(HT_STREAM_STATE, 0, b.data, b.len);
    ht_buf_free(&b);
}

TEST(impossible_state_is_refused)
{
    static const char *const names[] = {"", "../x", "a/b", "A", "exp_avg "};

    for (size_t i = 0; i < HT_ARRAY_SIZE(names); i++) {
        begin();
        put_raw_entry(HT_STREAM_FILE, "w", "", 4, NULL);
        put_raw_state(names[i], 4);
        REFUSED("proper name");
    }
    begin();
    put_raw_state("step", 4);
    REFUSED("state of no file");
    begin();
    put_raw_entry(HT_STREAM_FILE, "w", "", 4, NULL);
    put_raw_state("step", 0);
    REFUSED("size of its state");
    begin();
    put_raw_entry(HT_STREAM_FILE, "w", "", 4, NULL);
    put_raw_state("step", 4);
    put_raw_state("exp_avg", 4);
    REFUSED("not in order");
}

TEST(impossible_blocks_are_refused)
{
    static const struct {
        uint64_t size, index[2];
        size_t len;
        uint8_t first;
        const char *why;
    } block[] = {
        {100, {0}, 99, 1, "another size"},
        {100, {0}, 101, 1, "another size"},
        {100, {1}, 100, 1, "beyond the end"},
        {0, {0}, 0, 1, "beyond the end"},
        {1ull << 40, {UINT64_MAX}, HT_STREAM_BLOCK_BYTES, 1, "beyond the end"},
        {100, {0}, 100, 0, "is zero"},
        {2 * HT_STREAM_BLOCK_BYTES, {1, 1}, HT_STREAM_BLOCK_BYTES, 1, "not in order"},
    };

    memset(content, 0, sizeof(content));
    for (size_t i = 0; i < HT_ARRAY_SIZE(block); i++) {
        begin();
        put_raw_entry(HT_STREAM_FILE, "w", "", block[i].size, NULL);
        content[0] = block[i].first;
        put_record(HT_STREAM_BLOCK, block[i].index[0], content, block[i].len);
        if (block[i].index[1])
            put_record(HT_STREAM_BLOCK, block[i].index[1], content, block[i].len);
        REFUSED(block[i].why);
    }
}

static const struct ht_stream_base base = {5, {{1, 2, 3}}};

/* An incremental stream as far as its root. */
static void begin_incremental(void)
{
    struct ht_buf b = HT_BUF_INIT;

    put_header(1, HT_STREAM_INCREMENTAL, HT_STREAM_BLOCK_BYTES, 6, 0);
    ht_buf_put_u64(&b, base.step);
    ht_buf_put(&b, base.digest.byte, sizeof(base.digest.byte));
    put_record(HT_STREAM_BASE, 0, b.data, b.len);
    put_raw_entry(HT_STREAM_DIRECTORY, "", "", 0, NULL);
    ht_buf_free(&b);
}

static void put_raw_same(uint64_t index, uint64_t count, const char *path)
{
    struct ht_buf b = HT_BUF_INIT;

    ht_buf_put_u64(&b, count);
    ht_buf_put(&b, path, strlen(path));
    put_record(HT_STREAM_SAME, index, b.data, b.len);
    ht_buf_free(&b);
}

TEST(an_incremental_stream_comes_back)
{
    struct ht_stream_head head = {.step = 6, .incremental = true, .base = base};
    struct ht_stream_record x;
    struct ht_stream_writer w;
    struct ht_stream_reader r;

    ht_buf_reset(&stream);
    ck_assert_int_eq(ht_stream_writer_begin(&w, &head, put, NULL), 0);
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_DIRECTORY});
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){0, 1, ""}), -EINVAL); /* of no file */
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_FILE, .path = "w", .size = 3 * HT_STREAM_BLOCK_BYTES});
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){1, 0, ""}), -EINVAL);
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){1, 1, "../x"}), -EINVAL);
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){1, 2, "old/w"}), 0);
    ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"step", 4}), 0);
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){0, 1, ""}), 0);
    ck_assert_int_eq(ht_stream_put_end(&w, &digest), 0);
    ht_stream_writer_free(&w);
    ck_assert_int_eq(read_stream(), 6);
    struct source s = {stream.data, stream.data + stream.len, SIZE_MAX};
    ck_assert_int_eq(ht_stream_reader_begin(&r, get, &s), 0);
    ck_assert(r.head.incremental && r.head.base.step == 5 && r.head.base.digest.byte[2] == 3);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(ht_stream_next(&r, &x), 0);
    ck_assert_int_eq(x.type, HT_STREAM_SAME);
    ck_assert(x.same.index == 1 && x.same.count == 2 && strcmp(x.same.path, "old/w") == 0);
    ht_stream_reader_free(&r);
    size_t len = stream.len;
    for (size_t i = 0; i < len; i++) { /* each byte has a part in a checksum or is checked itself */
        stream.data[i] ^= 0x20;
        ck_assert_int_eq(read_stream(), -EPROTO);
        stream.data[i] ^= 0x20;
        ck_assert_int_eq(read_bytes(stream.data, i, SIZE_MAX), -EPROTO);
    }
}

TEST(impossible_blocks_of_a_base_are_refused)
{
    static const struct {
        uint64_t index, count;
        const char *path, *why;
    } same[] = {
        {0, 0, "", "number of blocks"},
        {UINT64_MAX, 1, "", "number of blocks"},
        {1, UINT64_MAX, "", "number of blocks"},
        {0, 4, "", "beyond the end"},
        {3, 1, "", "beyond the end"},
        {0, 1, "../x", "leaves the model"},
        {0, 1, "/x", "leaves the model"},
        {0, 1, ".hitrain/state/w/step", "leaves the model"},
    };

    for (size_t i = 0; i < HT_ARRAY_SIZE(same); i++) {
        begin_incremental();
        put_raw_entry(HT_STREAM_FILE, "w", "", 3 * HT_STREAM_BLOCK_BYTES, NULL);
        put_raw_same(same[i].index, same[i].count, same[i].path);
        REFUSED(same[i].why);
    }
    begin_incremental();
    put_raw_entry(HT_STREAM_FILE, "w", "", 3 * HT_STREAM_BLOCK_BYTES, NULL);
    put_raw_same(0, 2, "");
    put_raw_same(1, 1, "");
    REFUSED("not in order");
    begin_incremental();
    put_raw_entry(HT_STREAM_FILE, "w", "", 3, NULL);
    put_record(HT_STREAM_SAME, 0, "\1\0\0\0\0\0\0", 7);
    REFUSED("no proper path");
    begin_incremental();
    put_raw_same(0, 1, "");
    REFUSED("no base or no file");
    begin(); /* a whole step */
    put_raw_entry(HT_STREAM_FILE, "w", "", 3, NULL);
    put_raw_same(0, 1, "");
    REFUSED("no base or no file");
}

TEST(a_base_comes_first_and_once)
{
    uint8_t payload[24] = {0};

    put_header(1, HT_STREAM_INCREMENTAL, HT_STREAM_BLOCK_BYTES, 6, 0);
    put_raw_entry(HT_STREAM_DIRECTORY, "", "", 0, NULL);
    REFUSED("does not say what it builds on");
    put_header(1, HT_STREAM_INCREMENTAL, HT_STREAM_BLOCK_BYTES, 6, 0);
    put_record(HT_STREAM_BASE, 0, payload, 23);
    REFUSED("does not say what it builds on");
    memset(payload, 0xff, 8);
    put_header(1, HT_STREAM_INCREMENTAL, HT_STREAM_BLOCK_BYTES, 6, 0);
    put_record(HT_STREAM_BASE, 0, payload, 24);
    REFUSED("does not say what it builds on");
    begin_incremental();
    put_record(HT_STREAM_BASE, 0, payload, 24);
    REFUSED("unknown type 5");
}

TEST(impossible_records_are_refused)
{
    put_header(1, 0, HT_STREAM_BLOCK_BYTES, 0, 0);
    put_record(HT_STREAM_END, 0, content, 32);
    REFUSED("the root is missing");
    begin();
    put_record(9, 0, "", 0);
    REFUSED("unknown type 9");
    begin();
    put_record(HT_STREAM_END, 1, content, 32);
    REFUSED("has a place");
    begin();
    put_record(HT_STREAM_END, 0, content, 32);
    REFUSED("other counts");
    begin();
    number = 5;
    put_record(HT_STREAM_END, 0, content, 32);
    REFUSED("record 5 comes in the place of record 1");
    begin();
    ht_buf_reset(&stream);
    put_header(1, 0, HT_STREAM_BLOCK_BYTES, 0, 0);
    put_raw_entry(HT_STREAM_FILE, "", "", 0, NULL);
    REFUSED("the root is no directory");
}

TEST(the_writer_takes_only_what_a_reader_would)
{
    struct ht_stream_writer w;
    struct ht_stream_entry e = {.kind = HT_STREAM_FILE, .path = "b", .target = ""};

    ck_assert_int_eq(ht_stream_writer_begin(&w, &(struct ht_stream_head){0}, NULL, NULL), 0);
    ck_assert_int_eq(ht_stream_put_entry(&w, &e), -EINVAL); /* before the root */
    entry(&w, (struct ht_stream_entry){.kind = HT_STREAM_DIRECTORY});
    ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"step", 4}), -EINVAL);
    ck_assert_int_eq(ht_stream_put_entry(&w, &e), 0);
    e.path = "a";
    ck_assert_int_eq(ht_stream_put_entry(&w, &e), -EINVAL);
    e.path = "c/../d";
    ck_assert_int_eq(ht_stream_put_entry(&w, &e), -EINVAL);
    ck_assert_int_eq(ht_stream_put_block(&w, 0, content, 0), -EINVAL);
    ck_assert_int_eq(ht_stream_put_block(&w, 0, content, HT_STREAM_BLOCK_BYTES + 1ul), -EINVAL);
    ht_stream_writer_free(&w);
}

int main(void)
{
    return run_tests("stream", .timeout_s = 300);
}
