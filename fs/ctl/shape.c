/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shape.c - does the attribute shape name as many elements as the file has? Checked when it is set on a file with
 * content, and when a gradient is opened: in between a program may write a file whose shape it has set first. And the
 * blocks of a parameter of muon, which follow from its shape.
 */
#include "fs/ctl/ctl_priv.h"
#include "optim/rules/blocks.h"

enum { SHAPE_TEXT_MAX = 512 };

int ht_shape_fits(struct ht_ctl *c, uint64_t ino, const char *text, size_t len, char err[HT_CTL_ERROR_MAX])
{
    struct ht_ns_tensor t;
    struct ht_shape shape;
    struct stat st;

    if (ht_ns_getattr(c->ns, ino, &st) || !S_ISREG(st.st_mode) || st.st_size == 0 || ht_ns_tensor(c->ns, ino, &t))
        return 0;
    const struct ht_dtype_word *row = ht_dtype_row(t.dtype);
    if (!row || ht_parse_shape(text, len, &shape) || shape.elements * row->bytes == (uint64_t)st.st_size)
        return 0;
    snprintf(
        err, HT_CTL_ERROR_MAX,
        "shape %.*s says %llu elements, but the file has %lld bytes of %s: set the shape that it has, or remove it",
        (int)ht_min_u64(len, 64), text, (unsigned long long)shape.elements, (long long)st.st_size, row->word);
    return -EINVAL;
}

int ht_shape_blocks(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *config, struct ht_optim_sections *sections,
                    char err[HT_OPTIM_ERROR_MAX])
{
    char text[SHAPE_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, ino, HT_XATTR_PREFIX "shape", text, sizeof(text));
    struct ht_shape shape;

    if (n >= 0 && ht_parse_shape(text, (size_t)n, &shape) == 0)
        return ht_muon_blocks(shape.dim, shape.count, config, sections, err);
    snprintf(err, HT_OPTIM_ERROR_MAX,
             "muon needs to know the shape of the matrix: set " HT_XATTR_PREFIX "shape, as in 1024,768");
    return -EINVAL;
}

int ht_shape_check(struct ht_ctl *c, uint64_t ino, char err[HT_CTL_ERROR_MAX])
{
    char text[SHAPE_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, ino, HT_XATTR_PREFIX "shape", text, sizeof(text));

    return n < 0 ? 0 : ht_shape_fits(c, ino, text, (size_t)n, err);
}
