/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.c - .hitrain/delta/STEP: the changes of a step, as a safetensors file (state/delta.h has the content).
 *
 *   NAME.indices   I32, or I64 beyond 2^31 elements; ascending, in the flat parameter NAME
 *   NAME.values    the new values, in the parameter's dtype, or bf16
 *   __metadata__   format, version, step, base_step, lineage, and shapes: JSON with the shape of each NAME
 *
 * Names are those at the open: another name cuts the chain of deltas. One that is open needs no lock.
 */
#include "fs/ctl/hidden_priv.h"

#include <limits.h>
#include <unistd.h>

enum { ALIGN_BYTES = 8 };

struct tensor {
    const struct ht_delta_change *of;
    size_t param;
    bool values;
    uint64_t at, end; /* from the end of the header on */
};

struct ht_delta_file {
    struct ht_delta *delta;
    struct tensor *tensor;
    size_t tensors;
    char *header; /* with its length before it */
    size_t header_bytes;
};

/* ------------------------------------------------------------------- names */

/* The path of a parameter below its root. -ESTALE: it has none, or none that has room. */
static int name_of(struct ht_ctl *c, uint64_t root, uint64_t ino, char name[PATH_MAX])
{
    char above[PATH_MAX];

    ht_ns_path(c->ns, root, above, sizeof(above));
    ht_ns_path(c->ns, ino, name, PATH_MAX);
    size_t skip = strlen(above) + (above[0] != '\0');
    if (strncmp(name, above, strlen(above)) != 0 || strlen(name) <= skip)
        return -ESTALE;
    memmove(name, name + skip, strlen(name + skip) + 1);
    return 0;
}

/* May the caller read it by this name? */
static int check_name(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *name, const struct ht_caller *caller)
{
    uint64_t found;
    int rc = ht_ctl_resolve(c, root, name, strlen(name), caller, &found);

    if (rc)
        return rc == -ENOENT ? -ESTALE : rc;
    rc = found == ino ? ht_ctl_access(c, ino, R_OK, caller) : -ESTALE;
    ht_ns_forget(c->ns, found, 1);
    return rc;
}

/* ------------------------------------------------------------------ header */

static const char *word_of(const struct tensor *t)
{
    if (!t->values)
        return t->of->index_bytes == 8 ? "I64" : "I32";
    return t->of->dtype == HT_DTYPE_F32 ? "F32" : t->of->dtype == HT_DTYPE_BF16 ? "BF16" : "F16";
}

/* Where each tensor lies: those of long elements first, so that each is aligned. */
static void place_tensors(struct ht_delta_file *f, size_t params)
{
    uint64_t at = 0;

    for (unsigned bytes = 8; bytes >= 2; bytes /= 2)
        for (size_t i = 0; i < 2 * params; i++) {
            struct tensor t = {ht_optim_delta_change(f->delta, i / 2), i / 2, i & 1, at, at};
            if ((t.values ? ht_dtype_trained_bytes(t.of->dtype) : t.of->index_bytes) != bytes)
                continue;
            at = t.end += t.of->changed * bytes;
            f->tensor[f->tensors++] = t;
        }
}

static void put_shape(struct ht_ctl *c, struct ht_json *j, const char *name, const struct ht_delta_change *p)
{
    struct ht_shape shape;

    if (ht_shape_of(c, p->oid, &shape) || shape.elements != p->elements)
        shape = (struct ht_shape){.dim = {p->elements}, .count = 1};
    ht_json_array(j, name);
    for (unsigned i = 0; i < shape.count; i++)
        ht_json_u64(j, NULL, shape.dim[i]);
    ht_json_end(j);
}

static void put_number(struct ht_json *j, const char *key, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    ht_json_str(j, key, text);
}

/* Values of metadata are texts. */
static void put_metadata(struct ht_json *j, const struct ht_delta_stat *st, const char *shapes)
{
    ht_json_object(j, "__metadata__");
    ht_json_str(j, "format", "hitrain-delta");
    ht_json_str(j, "version", "1");
    put_number(j, "step", st->step);
    put_number(j, "base_step", st->base_step);
    put_number(j, "lineage", st->lineage);
    ht_json_str(j, "shapes", shapes);
    ht_json_end(j);
}

static void put_tensor(struct ht_json *j, const struct tensor *t, const char *name)
{
    char key[PATH_MAX + 16];

    snprintf(key, sizeof(key), "%s.%s", name, t->values ? "values" : "indices");
    ht_json_object(j, key);
    ht_json_str(j, "dtype", word_of(t));
    ht_json_array(j, "shape");
    ht_json_u64(j, NULL, t->of->changed);
    ht_json_end(j);
    ht_json_array(j, "data_offsets");
    ht_json_u64(j, NULL, t->at);
    ht_json_u64(j, NULL, t->end);
    ht_json_end(j);
    ht_json_end(j);
}

static int make_header(struct ht_delta_file *f, const struct ht_delta_stat *st, char *const *names, const char *shapes)
{
    FILE *to = open_memstream(&f->header, &f->header_bytes);
    ht_le64 length = {{0}};

    if (!to)
        return -ENOMEM;
    fwrite(&length, sizeof(length), 1, to);
    struct ht_json j = ht_feed_line(to);
    put_metadata(&j, st, shapes);
    for (size_t i = 0; i < f->tensors; i++)
        put_tensor(&j, &f->tensor[i], names[f->tensor[i].param]);
    ht_json_end(&j);
    fprintf(to, "%*s", ALIGN_BYTES, ""); /* cut below */
    if (fclose(to))
        return -ENOMEM;
    f->header_bytes = f->header_bytes / ALIGN_BYTES * ALIGN_BYTES;
    ht_le64_store(&length, f->header_bytes - sizeof(length));
    memcpy(f->header, &length, sizeof(length));
    return 0;
}

/* -------------------------------------------------------------------- life */

/* Names and shapes of the parameters that changed. */
static int name_params(struct ht_ctl *c, uint64_t root, const struct ht_delta_file *f, size_t params,
                       const struct ht_caller *caller, char **names, FILE *shapes)
{
    char name[PATH_MAX];
    struct ht_json j = ht_feed_line(shapes);
    int rc = 0;

    for (size_t i = 0; i < params && !rc; i++) {
        const struct ht_delta_change *p = ht_optim_delta_change(f->delta, i);
        rc = name_of(c, root, p->oid, name);
        if (!rc && caller)
            rc = check_name(c, root, p->oid, name, caller);
        if (!rc && !(names[i] = strdup(name)))
            rc = -ENOMEM;
        if (!rc)
            put_shape(c, &j, name, p);
    }
    ht_json_end(&j);
    return rc;
}

static int describe(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller, struct ht_delta_file *f)
{
    struct ht_delta_stat st;
    char *shapes = NULL;
    size_t len;

    ht_optim_delta_stat(f->delta, &st);
    char **names = calloc(st.params + 1, sizeof(*names));
    FILE *to = open_memstream(&shapes, &len);
    f->tensor = calloc(2 * st.params + 1, sizeof(*f->tensor));
    int rc = names && to && f->tensor ? name_params(c, root, f, st.params, caller, names, to) : -ENOMEM;
    if (to && fclose(to) && !rc)
        rc = -ENOMEM;
    if (!rc) {
        shapes[strcspn(shapes, "\n")] = '\0'; /* the end of the line */
        place_tensors(f, st.params);
        rc = make_header(f, &st, names, shapes);
    }
    for (size_t i = 0; names && i < st.params; i++)
        free(names[i]);
    free(names);
    free(shapes);
    return rc;
}

int ht_delta_open(struct ht_ctl *c, uint64_t root, uint64_t step, const struct ht_caller *caller,
                  struct ht_delta_file **out)
{
    struct ht_delta_file *f = calloc(1, sizeof(*f));
    int rc = f ? ht_optim_delta_open(c->optim, root, step, &f->delta) : -ENOMEM;

    if (!rc)
        rc = describe(c, root, caller, f);
    if (!rc)
        *out = f;
    else if (f)
        ht_delta_close(f);
    return rc;
}

void ht_delta_close(struct ht_delta_file *f)
{
    if (f->delta)
        ht_optim_delta_close(f->delta);
    free(f->tensor);
    free(f->header);
    free(f);
}

uint64_t ht_delta_bytes(const struct ht_delta_file *f)
{
    return f->header_bytes + (f->tensors ? f->tensor[f->tensors - 1].end : 0);
}

/* ------------------------------------------------------------------- bytes */

/* Of the header, or of one tensor. */
static ssize_t read_part(struct ht_delta_file *f, uint64_t off, void *buf, size_t len)
{
    size_t next = 1;

    if (off < f->header_bytes) {
        size_t n = ht_min_u64(len, f->header_bytes - off);
        memcpy(buf, f->header + off, n);
        return (ssize_t)n;
    }
    off -= f->header_bytes;
    HT_PARTITION_POINT(next, f->tensors, i, f->tensor[i].at <= off);
    const struct tensor *t = &f->tensor[next - 1];
    ssize_t n = ht_optim_delta_read(f->delta, t->param, t->values, off - t->at, buf, len);
    return n ? n : -EIO;
}

ssize_t ht_delta_read(struct ht_delta_file *f, uint64_t off, void *buf, size_t len)
{
    uint64_t all = ht_delta_bytes(f);
    size_t want = off < all ? ht_min_u64(len, all - off) : 0, done = 0;

    while (done < want) {
        ssize_t n = read_part(f, off + done, (uint8_t *)buf + done, want - done);
        if (n < 0)
            return done ? (ssize_t)done : n;
        done += (size_t)n;
    }
    return (ssize_t)done;
}
