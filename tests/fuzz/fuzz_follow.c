/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of logged steps: the reader takes or refuses them. What it takes, the writer writes again: the same bytes.
 *
 * The first byte says how the rest is meant. 0: it is a stream. Else it is the kind of proof of a header. Its step
 * follows, and then records, each with its type, its place and its payload. They get right numbers and checksums,
 * because no fuzzer finds these; so does the sum of a step whose end has no payload.
 */
#include "mount-helpers/stream/follow.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/records.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    return 0;
}

static struct ht_buf given, made;
static struct ht_follow_sum sum;

/* Adds to the sum of the step what the reader would add. */
static void add(uint8_t type, uint64_t place, const uint8_t *payload, size_t len)
{
    struct ht_hash128 of = ht_hash128(payload, len);

    if (type == HT_FOLLOW_STEP) {
        ht_hash128_sum_free(sum.sum);
        MUST(ht_follow_sum_begin(&sum, place) == 0);
    } else if (sum.sum && type == HT_FOLLOW_PARAM && len >= HT_FOLLOW_NUMBERS_BYTES) {
        char *path = fuzz_text(payload + HT_FOLLOW_NUMBERS_BYTES, len - HT_FOLLOW_NUMBERS_BYTES);
        ht_follow_sum_param(&sum, &(struct ht_follow_param){payload, path});
        free(path);
    } else if (sum.sum && (type == HT_FOLLOW_BLOCK || type == HT_FOLLOW_SPARSE)) {
        ht_follow_sum_block(&sum, (enum ht_follow_type)type, place, &of);
    }
}

static void frame(struct ht_reader *in, uint8_t first)
{
    struct ht_follow_head head = {.step = ht_get_u8(in), .lineage = 7, .proof = (enum ht_follow_proof)(first % 4)};
    struct ht_follow_writer w;
    uint64_t number = 0;

    MUST(ht_follow_writer_begin(&w, &head, fuzz_put, &given) == 0);
    ht_follow_writer_free(&w);
    while (in->p < in->end) {
        uint8_t type = ht_get_u8(in), done[17];
        uint64_t place = ht_get_u8(in);
        size_t len;
        const uint8_t *payload = fuzz_piece(in, &len);
        add(type, place, payload, len);
        if (type == HT_FOLLOW_DONE && !len && sum.sum) {
            struct ht_hash128 of = ht_follow_sum_end(&sum);
            memcpy(done, of.byte, sizeof(of.byte));
            done[16] = (uint8_t)(place & 1);
            payload = done;
            len = sizeof(done);
        }
        fuzz_put_record(&given, number++, type, place, payload, len);
    }
    ht_hash128_sum_free(sum.sum);
    sum.sum = NULL;
}

static int write_again(struct ht_follow_writer *w, const struct ht_follow_record *x)
{
    struct ht_hash128 of;

    switch (x->type) {
    case HT_FOLLOW_STEP:
        return ht_follow_put_step(w, &x->step);
    case HT_FOLLOW_PARAM:
        return ht_follow_put_param(w, &x->param);
    case HT_FOLLOW_BLOCK:
        return ht_follow_put_block(w, x->block.at, x->block.data, x->block.len);
    case HT_FOLLOW_SPARSE:
        return ht_follow_put_sparse(w, &x->sparse);
    case HT_FOLLOW_WORDS:
        return ht_follow_put_words(w, x->words.text);
    case HT_FOLLOW_FILE:
        return ht_follow_put_file(w, &x->file);
    case HT_FOLLOW_PART:
        return ht_follow_put_part(w, x->block.at, x->block.data, x->block.len);
    case HT_FOLLOW_DONE:
        MUST(ht_follow_put_done(w, x->done.files, &of) == 0);
        return memcmp(of.byte, x->done.sum.byte, sizeof(of.byte));
    default:
        return ht_follow_put_end(w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);
    struct ht_follow_record x = {.type = HT_FOLLOW_STEP};
    struct ht_follow_writer w = {0};
    struct ht_follow_reader r;

    if (!size)
        return -1;
    ht_buf_reset(&given);
    ht_buf_reset(&made);
    uint8_t first = ht_get_u8(&in);
    if (first)
        frame(&in, first);
    else
        ht_buf_put(&given, in.p, (size_t)(in.end - in.p));
    struct ht_reader from = ht_reader_of(given.data, given.len);
    int rc = ht_follow_reader_begin(&r, fuzz_get, &from);
    if (rc == 0)
        MUST(ht_follow_writer_begin(&w, &r.head, fuzz_put, &made) == 0);
    while (rc == 0 && x.type != HT_FOLLOW_END) {
        rc = ht_follow_next(&r, &x);
        if (rc == 0)
            MUST(write_again(&w, &x) == 0 && made.len == r.in.at);
    }
    MUST(rc == 0 || ((rc == -EPROTO || rc == -EPIPE) && r.in.why[0] != '\0'));
    MUST(made.len <= given.len && (!made.len || memcmp(made.data, given.data, made.len) == 0));
    ht_follow_writer_free(&w);
    ht_follow_reader_free(&r);
    return 0;
}
