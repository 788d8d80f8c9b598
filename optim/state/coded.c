/* SPDX-License-Identifier: Apache-2.0 */
/* coded.c - see coded.h. In windows of whole blocks, each inside a range. */
#include <math.h>

#include "optim/state/coded.h"
#include "optim/state/range.h"

enum { WINDOW = 65536, SCALES = WINDOW / HT_FORM_BLOCK_DYNAMIC };
static_assert(WINDOW % HT_FORM_WINDOW == 0, "windows have whole blocks");

/* Elements [first, first + n) of the parameter. */
struct window {
    uint64_t first;
    size_t n;
    float x[WINDOW], scales[SCALES];
    uint8_t codes[WINDOW * sizeof(float)];
};

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
    uint64_t block = ht_form_block(c->form), in_range = first % s->range_elements, range_first = first - in_range;
    uint64_t range_end = ht_min_u64(range_first + s->range_elements, s->elements);

    out->first = range_first + in_range - in_range % block;
    end = range_first + ht_round_up(ht_min_u64(end, range_end) - range_first, block);
    out->n = (size_t)ht_min_u64(ht_min_u64(end, range_end) - out->first, WINDOW);
}

static int load(const struct ht_opt_coded *c, struct window *w)
{
    struct place at = place_of(c, w);
    int rc = ht_opt_read_all(c->obj, at.codes, w->codes, at.code_bytes);

    if (!rc && at.scales_bytes)
        rc = ht_opt_read_all(c->obj, at.scales, w->scales, at.scales_bytes);
    if (rc)
        return rc;
    struct ht_coded coded = coded_of(c, w);
    c->codecs->decode[c->form](&coded, w->x);
    return 0;
}

static int store(const struct ht_opt_coded *c, struct window *w)
{
    struct place at = place_of(c, w);
    struct ht_coded coded = coded_of(c, w);

    c->codecs->encode[c->form](&coded, w->x);
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

static int check(const struct ht_opt_coded *c, uint64_t off, const void *buf, size_t len, uint64_t *out_element)
{
    for (size_t i = 0; i < len; i += sizeof(float)) {
        float x;
        memcpy(&x, (const uint8_t *)buf + i, sizeof(x));
        if (fits(c, x))
            continue;
        *out_element = (off + i) / sizeof(float);
        return -ERANGE;
    }
    return 0;
}

ssize_t ht_opt_coded_write(const struct ht_opt_coded *c, uint64_t off, const void *buf, size_t len,
                           uint64_t *out_element)
{
    uint64_t first = off / sizeof(float), end = first + len / sizeof(float);
    struct window *w = malloc(sizeof(*w));
    int rc = w ? check(c, off, buf, len, out_element) : -ENOMEM;

    while (!rc && first < end) {
        place_window(c, first, end, w);
        uint64_t last = ht_min_u64(w->first + w->n, end);
        if (first > w->first || last < w->first + w->n)
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
