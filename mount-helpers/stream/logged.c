/* SPDX-License-Identifier: Apache-2.0 */
/* logged.c - see logged.h. Nothing in the file is believed before it was checked. */
#include "mount-helpers/stream/logged.h"

#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/stream/follow.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

/* most: the latest version that is read. */
static int take_version(struct ht_logged *l, const char *part, uint32_t version, uint32_t most)
{
    if (version > most) {
        l->part = part;
        l->version = version;
        l->version_most = most;
        return -EPROTONOSUPPORT;
    }
    return version ? 0 : -EPROTO;
}

void ht_logged_explain(const struct ht_logged *l, int err, char *buf, size_t cap)
{
    if (err == -EPROTONOSUPPORT)
        snprintf(
            buf, cap,
            "the %s of this logged step is of version %u, and this program reads up to version %u: use a hitrainctl that "
            "is as new as the program that has mounted the store",
            l->part, l->version, l->version_most);
    else if (err == -EPROTO)
        snprintf(buf, cap,
                 "this logged step makes no sense: its header, its summary or its length is wrong; unmount, and run "
                 "hitrain-fsck -n");
    else
        snprintf(buf, cap, "%s", strerror(-err));
}

int ht_logged_take_header(struct ht_logged *l, const struct ht_redo_file *h, uint64_t step, uint64_t *out_bytes)
{
    uint64_t len = ht_le64_load(&h->summary_bytes);

    if (memcmp(h->magic, HT_REDO_FILE_MAGIC, sizeof(h->magic)) != 0)
        return -EPROTO;
    int rc = take_version(l, "file", ht_le32_load(&h->version), HT_REDO_FILE_VERSION);
    if (rc)
        return rc;
    if (ht_le64_load(&h->step) != step || len < sizeof(struct ht_disk_redo) || len > HT_LOGGED_SUMMARY_BYTES_MAX)
        return -EPROTO;
    l->step = step;
    l->lineage = ht_le64_load(&h->lineage);
    l->bytes = ht_le64_load(&h->gradient_bytes);
    l->gradients_at = sizeof(*h) + len;
    *out_bytes = len;
    return 0;
}

const uint8_t *ht_logged_param(const struct ht_logged *l, uint64_t i)
{
    return l->summary + sizeof(struct ht_disk_redo) + i * sizeof(struct ht_disk_redo_param);
}

bool ht_logged_is_section(const struct ht_logged *l, uint64_t i)
{
    return l->sections && !ht_logged_param(l, i)[offsetof(struct ht_disk_redo_section, no_dtype)];
}

/* ------------------------------------------------------------------ pieces */

static int compare(const void *a, const void *b)
{
    const struct ht_logged_piece *x = a, *y = b;

    if (x->param != y->param)
        return x->param < y->param ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Bytes of the gradient for a chunk of the parameter; 0: it makes no sense. */
static uint64_t range_bytes(const uint8_t *param)
{
    struct ht_disk_redo_param d;

    memcpy(&d, param, sizeof(d));
    unsigned p = ht_dtype_trained_bytes(d.dtype), g = ht_dtype_trained_bytes(d.grad_dtype);
    return p ? ht_le32_load(&d.chunk_bytes) / p * g : 0;
}

/* Are its entries, or its bytes, as long as they may be? */
static bool fits(const struct ht_logged_piece *p)
{
    return p->sparse ? p->bytes <= HT_REDO_SPARSE_BYTES_MAX && p->len <= HT_FOLLOW_SPARSE_BYTES_MAX
                     : p->bytes == p->len;
}

/* False: no such piece is in this step. */
static bool take_piece(const struct ht_logged *l, const uint8_t *from, bool coded, struct ht_logged_piece *out)
{
    struct ht_disk_redo_coded d = {.coding = {{0}}};

    memcpy(&d, from, coded ? sizeof(d) : sizeof(d.piece));
    uint32_t begin = ht_le32_load(&d.piece.begin), end = ht_le32_load(&d.piece.end), coding = ht_le32_load(&d.coding);
    uint64_t range = ht_le32_load(&d.piece.range), bytes;
    if (begin >= end || coding > HT_REDO_SPARSE || ht_le32_load(&d.piece.param) >= l->params ||
        ht_logged_is_section(l, ht_le32_load(&d.piece.param)))
        return false;
    out->at = ht_le64_load(&d.piece.at);
    out->param = ht_le32_load(&d.piece.param);
    out->len = end - begin;
    out->bytes = coded ? ht_le32_load(&d.bytes) : out->len;
    out->sparse = coding == HT_REDO_SPARSE;
    if (out->bytes > l->bytes || out->at > l->bytes - out->bytes)
        return false;
    bytes = range_bytes(ht_logged_param(l, out->param));
    if (bytes && range > (HT_FILE_BYTES_MAX - end) / bytes)
        return false;
    out->offset = bytes * range + begin;
    return fits(out);
}

static int take_pieces(struct ht_logged *l, bool coded)
{
    const size_t bytes = coded ? sizeof(struct ht_disk_redo_coded) : sizeof(struct ht_disk_redo_piece);
    const uint8_t *from = ht_logged_param(l, l->params);

    l->piece = malloc((l->pieces + 1) * sizeof(*l->piece));
    if (!l->piece)
        return -ENOMEM;
    for (uint64_t i = 0; i < l->pieces; i++)
        if (!take_piece(l, from + i * bytes, coded, &l->piece[i]))
            return -EPROTO;
    if (l->pieces)
        qsort(l->piece, l->pieces, sizeof(*l->piece), compare);
    return 0;
}

int ht_logged_take_summary(struct ht_logged *l, uint8_t *summary, size_t len)
{
    struct ht_disk_redo head;

    l->summary = summary;
    if (len < sizeof(head))
        return -EPROTO;
    memcpy(&head, summary, sizeof(head));
    uint32_t version = ht_le32_load(&head.version);
    int rc = take_version(l, "summary", version, HT_REDO_VERSION_SECTIONS);
    if (rc)
        return rc;
    l->sections = version == HT_REDO_VERSION_SECTIONS;
    bool coded = l->sections || version == HT_REDO_VERSION_CODED;
    size_t left = len - sizeof(head), param = sizeof(struct ht_disk_redo_param),
           piece = coded ? sizeof(struct ht_disk_redo_coded) : sizeof(struct ht_disk_redo_piece);
    l->params = ht_le64_load(&head.params);
    l->pieces = ht_le64_load(&head.pieces);
    if (ht_le64_load(&head.step) != l->step || l->params > left / param || l->pieces > left / piece ||
        l->params * param + l->pieces * piece != left || (l->params && ht_logged_is_section(l, 0)))
        return -EPROTO;
    return take_pieces(l, coded);
}

void ht_logged_free(struct ht_logged *l)
{
    free(l->summary);
    free(l->piece);
    l->summary = NULL;
    l->piece = NULL;
}
