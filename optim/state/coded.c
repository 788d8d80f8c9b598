/* SPDX-License-Identifier: Apache-2.0 */
/* coded.c - see coded.h. In windows of whole blocks, each inside a range. */
#include <math.h>

#include "optim/rules/master.h"
#include "optim/state/coded.h"
#include "optim/state/param.h"

enum { WINDOW = 65536, SCALES = WINDOW / HT_FORM_BLOCK_DYNAMIC };
static_assert(WINDOW % HT_FORM_WINDOW == 0 && WINDOW % HT_MASTER_BLOCK == 0, "windows have whole blocks");

/* Elements [first, first + n) of the parameter. */
struct window {
    uint64_t first;
    size_t n;
    float x[WINDOW];
    union {
        struct {
            float scales[SCALES];
            uint8_t codes[WINDOW * sizeof(float)];
        };
        struct { /* masters in two bytes */
            uint16_t p[WINDOW], low[WINDOW];
            struct ht_disk_master block[WINDOW / HT_MASTER_BLOCK];
        };
    };
};

static bool is_master(const struct ht_opt_coded *c)
{
    return c->kind == HT_STATE_MASTER_LOW;
}

int ht_opt_coded_get(const struct ht_param *p, unsigned word, struct ht_opt_coded *out)
{
    const struct ht_layout *l = &p->cur.layout;
    struct ht_store *s = p->o->store;

    *out = (struct ht_opt_coded){.o = p->o, .kind = l->kind[word], .form = l->form[word]};
    out->obj = ht_obj_get(s, p->cur.oid[word]);
    bool all = out->obj && !ht_opt_state_shape(p, &out->shape);
    if (is_master(out)) {
        out->p = ht_obj_get(s, p->oid);
        out->blocks = ht_obj_get(s, p->cur.oid[word + 1]);
        all = all && out->p && out->blocks;
    }
    if (!all) {
        ht_opt_coded_put(out);
        *out = (struct ht_opt_coded){.obj = NULL};
    }
    return all ? 0 : -ESTALE;
}

void ht_opt_coded_put(const struct ht_opt_coded *c)
{
    ht_obj_put(c->obj);
    ht_obj_put(c->p);
    ht_obj_put(c->blocks);
}

/* ----------------------------------------------------------------- masters */

/* Bytes after the end of an object, which another program may have truncated, are zeros. */
static int read_padded(struct ht_obj *obj, uint64_t off, void *buf, size_t len)
{
    ssize_t n = ht_obj_read(obj, off, buf, len);

    if (n < 0)
        return (int)n;
    memset((uint8_t *)buf + n, 0, len - (size_t)n);
    return 0;
}

static uint64_t blocks_at(const struct ht_opt_coded *c, const struct window *w)
{
    uint64_t range = w->first / c->shape.range_elements, in_range = w->first % c->shape.range_elements;

    return range * HT_SMALL_CHUNK_BYTES + in_range / HT_MASTER_BLOCK * sizeof(struct ht_disk_master);
}

static size_t blocks_bytes(const struct window *w)
{
    return ht_div_up(w->n, HT_MASTER_BLOCK) * sizeof(struct ht_disk_master);
}

static int load_masters(const struct ht_opt_coded *c, struct window *w)
{
    int rc = read_padded(c->p, w->first * 2, w->p, w->n * 2);

    if (!rc)
        rc = read_padded(c->obj, w->first * 2, w->low, w->n * 2);
    if (!rc)
        rc = read_padded(c->blocks, blocks_at(c, w), w->block, blocks_bytes(w));
    for (size_t i = 0; !rc && i < w->n; i += HT_MASTER_BLOCK)
        ht_master_expand(c->o->kernels, &w->block[i / HT_MASTER_BLOCK], w->p + i, w->low + i,
                         ht_min_u64(HT_MASTER_BLOCK, w->n - i), w->x + i);
    return rc;
}

static int store_masters(const struct ht_opt_coded *c, struct window *w)
{
    for (size_t i = 0; i < w->n; i += HT_MASTER_BLOCK)
        ht_master_compress(c->o->kernels, w->x + i, w->p + i, ht_min_u64(HT_MASTER_BLOCK, w->n - i), w->low + i,
                           &w->block[i / HT_MASTER_BLOCK]);
    int rc = ht_opt_write_all(c->obj, w->first * 2, w->low, w->n * 2);
    return rc ? rc : ht_opt_write_all(c->blocks, blocks_at(c, w), w->block, blocks_bytes(w));
}

/* ----------------------------------------------------------------- windows */

/* Its place in the object. */
struct place {
    uint64_t codes, scales;
    size_t code_bytes, scales_bytes;
};

static struct place place_of(const struct ht_opt_coded *c, const struct window *w)
{
    const struct ht_param_shape *s = &c->shape;
    uint64_t range = w->first / s->range_elements, in_range = w->first % s->range_elements;
    uint64_t stride = ht_opt_state_stride(s, c->kind, c->form), block = ht_form_block(c->form);
    uint64_t at = range * stride * ht_opt_state_chunk_bytes(s, c->kind);

    return (struct place){
        .codes = at + ht_form_code_bytes(c->form, in_range),
        .scales = at + ht_form_scales_at(c->form, ht_opt_range_elements(s, range)) + in_range / block * sizeof(float),
        .code_bytes = (size_t)ht_form_code_bytes(c->form, w->n),
        .scales_bytes = block > 1 ? (size_t)ht_div_up(w->n, block) * sizeof(float) : 0,
    };
}

static struct ht_coded coded_of(const struct ht_opt_coded *c, struct window *w)
{
    return (struct ht_coded){.codes = w->codes, .scales = w->scales, .n = w->n, .kind = c->kind, .nearest = true};
}

/* The blocks of elements [first, end), at most a window, and none of the next range. */
static void place_window(const struct ht_opt_coded *c, uint64_t first, uint64_t end, struct window *out)
{
    const struct ht_param_shape *s = &c->shape;
    uint64_t block = is_master(c) ? HT_MASTER_BLOCK : ht_form_block(c->form);
    uint64_t in_range = first % s->range_elements, range_first = first - in_range;
    uint64_t range_end = ht_min_u64(range_first + s->range_elements, s->elements);

    out->first = range_first + in_range - in_range % block;
    end = range_first + ht_round_up(ht_min_u64(end, range_end) - range_first, block);
    out->n = (size_t)ht_min_u64(ht_min_u64(end, range_end) - out->first, WINDOW);
}

static int load(const struct ht_opt_coded *c, struct window *w)
{
    if (is_master(c))
        return load_masters(c, w);
    struct place at = place_of(c, w);
    int rc = ht_opt_read_all(c->obj, at.codes, w->codes, at.code_bytes);

    if (!rc && at.scales_bytes)
        rc = ht_opt_read_all(c->obj, at.scales, w->scales, at.scales_bytes);
    if (rc)
        return rc;
    struct ht_coded coded = coded_of(c, w);
    c->o->codecs->decode[c->form](&coded, w->x);
    return 0;
}

static int store(const struct ht_opt_coded *c, struct window *w)
{
    if (is_master(c))
        return store_masters(c, w);
    struct place at = place_of(c, w);
    struct ht_coded coded = coded_of(c, w);

    c->o->codecs->encode[c->form](&coded, w->x);
    int rc = ht_opt_write_all(c->obj, at.codes, w->codes, at.code_bytes);
    if (!rc && at.scales_bytes)
        rc = ht_opt_write_all(c->obj, at.scales, w->scales, at.scales_bytes);
    return rc;
}

ssize_t ht_opt_coded_read(const struct ht_opt_coded *c, uint64_t off, void *buf, size_t len)
{
    uint64_t size = c->shape.elements * sizeof(float);
    struct window *w = malloc(sizeof(*w));
    size_t done = 0;
    int rc = w ? 0 : -ENOMEM;

    len = off < size ? (size_t)ht_min_u64(len, size - off) : 0;
    while (!rc && done < len) {
        uint64_t at = off + done;
        place_window(c, at / sizeof(float), ht_div_up(off + len, sizeof(float)), w);
        rc = load(c, w);
        size_t skip = (size_t)(at - w->first * sizeof(float));
        size_t n = rc ? 0 : (size_t)ht_min_u64(len - done, w->n * sizeof(float) - skip);
        if (n)
            memcpy((uint8_t *)buf + done, (const uint8_t *)w->x + skip, n);
        done += n;
    }
    free(w);
    return rc ? rc : (ssize_t)done;
}

static bool fits(const struct ht_opt_coded *c, float x)
{
    if (!isfinite(x) || (x < 0 && ht_state_is_positive(c->kind)))
        return false;
    /* From the middle between the largest bf16 and the next one on it would become infinite. */
    return c->form != HT_FORM_BF16 || fabsf(x) < 0x1.ffp127f;
}

/* w: memory for the parameter, to which masters must round. */
static int check(const struct ht_opt_coded *c, struct window *w, uint64_t off, const void *buf, size_t len,
                 uint64_t *out_element)
{
    uint64_t first = off / sizeof(float), end = first + len / sizeof(float);

    w->first = w->n = 0;
    for (uint64_t e = first; e < end; e++) {
        float x;
        memcpy(&x, (const uint8_t *)buf + (e - first) * sizeof(x), sizeof(x));
        if (is_master(c) && e >= w->first + w->n) {
            place_window(c, e, end, w);
            int rc = read_padded(c->p, w->first * 2, w->p, w->n * 2);
            if (rc)
                return rc;
        }
        if (is_master(c) ? ht_master_rounds_to(x, w->p[e - w->first]) : fits(c, x))
            continue;
        *out_element = e;
        return is_master(c) ? -EDOM : -ERANGE;
    }
    return 0;
}

ssize_t ht_opt_coded_write(const struct ht_opt_coded *c, uint64_t off, const void *buf, size_t len,
                           uint64_t *out_element)
{
    uint64_t first = off / sizeof(float), end = first + len / sizeof(float);
    struct window *w = malloc(sizeof(*w));
    int rc = w ? check(c, w, off, buf, len, out_element) : -ENOMEM;

    while (!rc && first < end) {
        place_window(c, first, end, w);
        uint64_t last = ht_min_u64(w->first + w->n, end);
        if (is_master(c) || first > w->first || last < w->first + w->n)
            rc = load(c, w);
        memcpy(w->x + (first - w->first), buf, (last - first) * sizeof(float));
        if (!rc)
            rc = store(c, w);
        buf = (const uint8_t *)buf + (last - first) * sizeof(float);
        first = last;
    }
    free(w);
    return rc ? rc : (ssize_t)len;
}

static bool any_negative(const struct window *w)
{
    for (size_t i = 0; i < w->n; i++)
        if (w->x[i] < 0)
            return true;
    return false;
}

int ht_opt_coded_convert(const struct ht_opt_coded *from, const struct ht_opt_coded *to)
{
    struct window *w = malloc(sizeof(*w));
    uint64_t at = 0;
    int rc = w ? 0 : -ENOMEM;

    while (!rc && at < to->shape.elements) {
        place_window(to, at, to->shape.elements, w);
        rc = load(from, w);
        if (!rc && ht_state_is_positive(to->kind) && any_negative(w))
            rc = -ERANGE;
        if (!rc && !ht_is_zero((const uint8_t *)w->x, w->n * sizeof(float))) /* new state is zeros */
            rc = store(to, w);
        at = w->first + w->n;
    }
    free(w);
    return rc;
}
