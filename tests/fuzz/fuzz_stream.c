/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of steps: the reader takes or refuses them. A stream that it takes is the only one of its content: the writer
 * makes the same bytes again.
 *
 * The first byte says how the rest is meant. 0: it is a stream. Else it is a step, and records, each with its type, its
 * place and its payload. They get right numbers and checksums, because no fuzzer finds these. A step of 128 or more
 * makes the stream an incremental one, and one of 64 to 127 makes it one for rank 0 of "2 1-0".
 */
#include "mount-helpers/stream/stream.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/records.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    return 0;
}

static struct ht_buf given, made;

static const struct ht_shards table = {.changes = 2, .change = {{2, HT_SHARDS_NONE}, {1, 0}}};

static void frame(struct ht_reader *in)
{
    struct ht_stream_writer w;
    struct ht_stream_head head = {.step = ht_get_u8(in), .bytes = 1};
    uint64_t number = 0;

    head.incremental = head.step & 0x80;
    head.base.step = head.step & 0x7f;
    head.for_rank = !head.incremental && (head.step & 0x40);
    if (head.for_rank)
        head.shard = (struct ht_stream_shard){.table = table, .of = head.step & 1 ? HT_SHARDS_NONE : 0};
    MUST(ht_stream_writer_begin(&w, &head, fuzz_put, &given) == 0);
    number = w.out.number;
    ht_stream_writer_free(&w);
    while (in->p < in->end) {
        uint8_t type = ht_get_u8(in);
        uint64_t place = type == HT_STREAM_BLOCK || type == HT_STREAM_SAME ? ht_get_u8(in) : 0;
        size_t len;
        const uint8_t *payload = fuzz_piece(in, &len);
        fuzz_put_record(&given, number++, type & 0x7f, place, payload, len);
    }
}

/* Writes the records of a stream again, and an end mark where the stream lacks nothing else. True: there is one. */
static bool copy(struct ht_reader in)
{
    struct ht_stream_reader r;
    struct ht_stream_writer w = {0};
    struct ht_stream_record x = {.type = HT_STREAM_ENTRY};
    struct ht_hash128 digest;
    int rc = ht_stream_reader_begin(&r, fuzz_get, &in);

    ht_buf_reset(&made);
    if (rc == 0)
        MUST(ht_stream_writer_begin(&w, &r.head, fuzz_put, &made) == 0);
    while (rc == 0 && x.type != HT_STREAM_END) {
        rc = ht_stream_next(&r, &x);
        if (rc == 0 && x.type == HT_STREAM_ENTRY)
            MUST(ht_stream_put_entry(&w, &x.entry) == 0);
        else if (rc == 0 && x.type == HT_STREAM_STATE)
            MUST(ht_stream_put_state(&w, &x.state) == 0);
        else if (rc == 0 && x.type == HT_STREAM_BLOCK)
            MUST(ht_stream_put_block(&w, x.block.index, x.block.data, x.block.len) == 0);
        else if (rc == 0 && x.type == HT_STREAM_SAME)
            MUST(ht_stream_put_same(&w, &x.same) == 0);
    }
    MUST(rc == 0 || (rc == -EPROTO && r.in.why[0] != '\0'));
    bool ends = rc == 0 || (w.entries && strstr(r.in.why, "end mark is missing"));
    if (ends)
        MUST(ht_stream_put_end(&w, &digest) == 0);
    MUST(rc || memcmp(&digest, &x.digest, sizeof(digest)) == 0);
    if (w.digest.sum)
        ht_stream_writer_free(&w);
    ht_stream_reader_free(&r);
    return ends;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);

    if (!size)
        return -1;
    ht_buf_reset(&given);
    if (ht_get_u8(&in))
        frame(&in);
    else
        ht_buf_put(&given, in.p, (size_t)(in.end - in.p));
    if (!copy(ht_reader_of(given.data, given.len)))
        return 0;
    struct ht_buf whole = made;
    made = (struct ht_buf)HT_BUF_INIT;
    MUST(copy(ht_reader_of(whole.data, whole.len)));
    MUST(made.len == whole.len && memcmp(made.data, whole.data, made.len) == 0);
    ht_buf_free(&whole);
    return 0;
}
