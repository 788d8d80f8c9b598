/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Summaries of logged steps: the optimizer takes or refuses them. Entries of sparse pieces become elements, and these
 * become entries again.
 *
 * The first byte says how the rest is meant. 0: it is a summary. Else its second, third and fourth bit say which
 * version the summary has. The number of parameters follows, then their bytes, then pieces. The target makes the
 * header, because no fuzzer finds counts that are right. The input is also what the entries of pieces are read from.
 */
#include "optim/state/param.h"
#include "optim/redo/logged.h"
#include "tests/fuzz/fuzz.h"
#include "tiering/base/sparse.h"
#include <hitrain/limits.h>

enum { STEP = 4, DECODED_BYTES_MAX = 4 << 20 }; /* of an input: more of the same takes only time */

static struct ht_buf made;
static const uint8_t *object;
static size_t object_bytes, decoded_bytes;

static void make(struct ht_reader *in, uint8_t first)
{
    const bool ortho = first & 8, sections = ortho || first & 4, coded = sections || first & 2;
    const size_t param = sizeof(struct ht_disk_redo_param),
                 piece = coded ? sizeof(struct ht_disk_redo_coded) : sizeof(struct ht_disk_redo_piece);
    struct ht_disk_redo head = {.pad = {{0}}};
    uint64_t params = ht_get_u8(in);
    size_t left = (size_t)(in->end - in->p);

    params = ht_min_u64(params, left / param);
    uint64_t pieces = (left - params * param) / piece;
    ht_le32_store(&head.version,
                  ortho          ? HT_REDO_VERSION_ORTHO
                      : sections ? HT_REDO_VERSION_SECTIONS
                      : coded    ? HT_REDO_VERSION_CODED
                                 : HT_REDO_VERSION);
    ht_le64_store(&head.step, STEP);
    ht_le64_store(&head.params, params);
    ht_le64_store(&head.pieces, pieces);
    ht_buf_put(&made, &head, sizeof(head));
    ht_buf_put(&made, in->p, params * param + pieces * piece);
}

/* A block of its own, so that ASan sees a read beyond it. */
static uint8_t *copy_of(const void *bytes, size_t len)
{
    uint8_t *copy = malloc(len + 1);

    MUST(copy);
    if (len)
        memcpy(copy, bytes, len);
    return copy;
}

/* ------------------------------------------------------------------ pieces */

/* There are no more entries than came in, but for zeros at the end, which the encoder does not know to be the last. */
static void encode(const uint8_t *elements, size_t len, unsigned size, size_t most)
{
    struct ht_sparse_encoder count = {.size = size}, e = {.size = size};
    size_t bytes = ht_sparse_encode(&count, elements, len, NULL);

    most += len / size / (HT_SPARSE_ZEROS_MAX + 1) * ht_sparse_entry_bytes(size);
    uint8_t *entries = malloc(bytes + 1), *again = malloc(len);

    MUST(entries && again && bytes <= most);
    MUST(ht_sparse_encode(&e, elements, len, entries) == bytes);
    MUST(ht_sparse_decode(entries, bytes, size, again, len) == 0 && memcmp(again, elements, len) == 0);
    free(entries);
    free(again);
}

static void decode(const struct ht_redo_piece *piece, unsigned size)
{
    size_t len = piece->end - piece->begin;

    if (piece->at > object_bytes || piece->bytes > object_bytes - piece->at || decoded_bytes > DECODED_BYTES_MAX)
        return;
    decoded_bytes += len;
    uint8_t *entries = copy_of(object + piece->at, piece->bytes), *elements = malloc(len);
    MUST(elements);
    int rc = ht_sparse_decode(entries, piece->bytes, size, elements, len);
    MUST(rc == ht_sparse_decode(entries, piece->bytes, size, NULL, len));
    MUST(rc == 0 || rc == -EUCLEAN);
    if (rc == 0)
        encode(elements, len, size, piece->bytes);
    free(entries);
    free(elements);
}

/* Of a parameter that a store can have; 0: it has none such. */
static unsigned shape_of(const struct ht_redo_param *p, struct ht_param_shape *out)
{
    unsigned bytes = ht_dtype_trained_bytes(p->dtype);

    if ((p->chunk_bytes != HT_CHUNK_BYTES && p->chunk_bytes != HT_SMALL_CHUNK_BYTES) || !bytes ||
        p->elements > HT_FILE_BYTES_MAX / bytes)
        return 0;
    return ht_opt_shape_of(out, p->elements * bytes, p->chunk_bytes, p->dtype, p->grad_dtype) ? 0 : out->g_bytes;
}

static void take_piece(const struct ht_redo_summary *s, uint64_t i)
{
    struct ht_redo_piece piece;
    struct ht_redo_param param;
    struct ht_param_shape shape;
    uint32_t place;
    int rc = ht_opt_redo_piece_at(s, i, &place, &piece);

    MUST(rc == 0 || rc == -EUCLEAN);
    if (rc)
        return;
    MUST(place < s->params && piece.begin < piece.end);
    MUST(piece.sparse ? piece.bytes <= HT_REDO_SPARSE_BYTES_MAX : piece.bytes == piece.end - piece.begin);
    if (ht_opt_redo_param_at(s, place, &param) || !shape_of(&param, &shape) || !ht_opt_redo_piece_fits(&shape, &piece))
        return;
    unsigned size = ht_opt_redo_piece_bytes(&shape, &piece);
    MUST(piece.end <= ht_opt_range_elements(&shape, piece.range) * size);
    if (piece.sparse)
        decode(&piece, size);
}

/* Sections ascend, and lie in their parameter. Returns how many there are. */
static uint64_t take_sections(const struct ht_redo_summary *s, uint64_t i, const struct ht_redo_param *p)
{
    struct ht_param_section section = {.end = 0};
    uint64_t count, end = 0;
    int rc = ht_opt_redo_sections_of(s, i, &count);

    MUST(rc == 0 || rc == -EUCLEAN);
    for (uint64_t k = 1; rc == 0 && k <= count; k++) {
        MUST(ht_opt_redo_section_at(s, i + k, p->oid, end, p->elements, &section) == 0);
        MUST(end <= section.begin && section.begin < section.end && section.end <= p->elements);
        MUST(section.scalars.kernel < HT_KERNEL_COUNT);
        end = section.end;
    }
    return rc ? 0 : count;
}

static void take(const uint8_t *bytes, size_t len)
{
    struct ht_redo_summary s;
    struct ht_redo_param param;
    int rc = ht_opt_redo_parse(bytes, len, STEP, &s);

    MUST(rc == 0 || rc == -EUCLEAN);
    for (uint64_t i = 0; rc == 0 && i < s.params; i++) {
        int one = ht_opt_redo_param_at(&s, i, &param);
        MUST(one == 0 || one == -EUCLEAN);
        MUST(one || param.scalars.kernel < HT_KERNEL_COUNT);
        if (!one)
            i += take_sections(&s, i, &param);
    }
    for (uint64_t i = 0; rc == 0 && i < s.pieces; i++)
        take_piece(&s, i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);

    if (!size)
        return -1;
    object = data;
    object_bytes = size;
    decoded_bytes = 0;
    ht_buf_reset(&made);
    uint8_t first = ht_get_u8(&in);
    if (first)
        make(&in, first);
    else
        ht_buf_put(&made, in.p, (size_t)(in.end - in.p));
    uint8_t *summary = copy_of(made.data, made.len);
    take(summary, made.len);
    free(summary);
    return 0;
}
