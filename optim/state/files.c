/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files.c - optimizer state as files: the rule's state, master (of parameters of two bytes), and step.
 *
 * step is the number of steps the moments stand for, as one f32, like torch.optim's. The others are their objects, or
 * masters in two bytes seen as f32. Bytes are read and written without the lock; a reference to the parameter keeps
 * them.
 *
 * Masters in two bytes are two objects on devices: missing bits, two bytes per element, and blocks, of which each range
 * has a chunk (rules/master.h). Updates work on both in one batch pin (update.c). Here they are read and written in
 * windows, with several calls, while no update comes between them, or they are read again. So is state in another form
 * than f32. coded.h does both.
 */
#include <math.h>

#include "optim/state/coded.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

/* Up to it every whole number is a float. */
#define STEP_MAX 0x1p24f

static uint64_t elements_of(const struct ht_param_desc *desc)
{
    unsigned bytes = ht_dtype_trained_bytes(desc->dtype);

    return bytes ? ht_obj_size(desc->obj) / bytes : 0;
}

/* The layout of the present state, or of the state that the first gradient would make. */
static int find_layout(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_layout *out)
{
    uint64_t oid = ht_obj_id(desc->obj);
    struct ht_optim_config config;
    char why[HT_OPTIM_ERROR_MAX];

    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    bool exists = p && !p->gone && p->cur.exists;
    if (exists)
        *out = p->cur.layout;
    unlock(o);
    if (exists)
        return 0;
    int rc = ht_optim_words_of(o, desc->root, oid, &config, why);
    if (!rc)
        *out = ht_opt_layout(&config, desc->dtype, elements_of(desc));
    return rc;
}

/* Kinds that are files; "step" comes after them. */
static unsigned file_count(const struct ht_layout *layout)
{
    return layout->count - (ht_opt_master_kinds(layout) == 2);
}

/* A conversion may have come between, which changes forms alone. */
static bool same_files(const struct ht_layout *a, const struct ht_layout *b)
{
    return a->count == b->count && !memcmp(a->kind, b->kind, a->count);
}

/* Index of a word in its layout. */
static int find_word(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, struct ht_layout *layout)
{
    int rc = find_layout(o, desc, layout);

    if (rc)
        return rc;
    for (unsigned i = 0; i < file_count(layout); i++)
        if (!strcmp(name, ht_state_word(layout->kind[i])))
            return (int)i;
    return !strcmp(name, "step") ? (int)file_count(layout) : -ENOENT;
}

int ht_optim_state_name(struct ht_optim *o, const struct ht_param_desc *desc, unsigned index, const char **out_name)
{
    struct ht_layout layout;
    int rc = ht_dtype_trained_bytes(desc->dtype) ? find_layout(o, desc, &layout) : -ENOENT;

    if (rc || index > file_count(&layout))
        return -ENOENT;
    *out_name = index < file_count(&layout) ? ht_state_word(layout.kind[index]) : "step";
    return 0;
}

int64_t ht_optim_state_size(struct ht_optim *o, const struct ht_param_desc *desc, const char *name)
{
    struct ht_layout layout;
    int word = find_word(o, desc, name, &layout);
    int64_t size = 0;

    if (word < 0 || !ht_dtype_trained_bytes(desc->dtype))
        return -ENOENT;
    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, ht_obj_id(desc->obj));
    if (p && !p->gone && p->cur.exists)
        size = word == (int)file_count(&layout) ? 4 : (int64_t)(p->cur.elements * 4);
    unlock(o);
    return size;
}

/*
 * Releases the lock while it waits, until no update of [off, off+len) of a state file is pending. Returns a
 * number that changes with each update.
 */
static uint64_t wait_for_range(struct ht_param *p, uint64_t off, uint64_t len) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t per_range = (uint64_t)p->shape.range_elements * 4, version = p->rewrites;

    for (uint64_t i = off / per_range; i < p->shape.range_count && i * per_range < off + len; i++) {
        const struct ht_range *r;
        while ((r = ht_opt_range_find(p, i)) && ht_opt_range_updating(r) && !p->o->stopping)
            wait_changed(p->o);
        version += r ? r->updates : 0;
    }
    return version;
}

/* ------------------------------------------------------------------- views */

/* No f32 object: masters in two bytes, or another form. */
static bool needs_view(const struct ht_layout *l, unsigned word)
{
    return l->kind[word] == HT_STATE_MASTER_LOW || l->form[word] != HT_FORM_F32;
}

/* Do bytes come from outside, or those of another step, object by object? */
static bool is_rewritten(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return p->rewriting || p->root->reverting;
}

/* Releases the lock in between. Several places are read. If they have changed meanwhile, they are read again. */
static ssize_t read_view(struct ht_param *p, unsigned word, const struct ht_layout *layout, uint64_t off, void *buf,
                         size_t len) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_opt_coded c;
    uint64_t version;
    ssize_t rc;

    do {
        while (is_rewritten(p) && !p->o->stopping)
            wait_changed(p->o);
        version = wait_for_range(p, off, len);
        rc = p->cur.exists && same_files(layout, &p->cur.layout) ? ht_opt_coded_get(p, word, &c) : -ESTALE;
        if (rc)
            return rc;
        unlock(p->o);
        rc = ht_opt_coded_read(&c, off, buf, len);
        ht_opt_coded_put(&c);
        lock(p->o);
    } while ((is_rewritten(p) || wait_for_range(p, off, len) != version) && !p->o->stopping);
    return rc;
}

static ssize_t read_step(struct ht_param *p, uint64_t off, void *buf, size_t len) HT_REQUIRES(HT_LOCK_OPTIM)
{
    /* Moments of updated ranges are those of the open step. */
    float t = (float)(p->cur.t + p->has_grad);

    if (off >= sizeof(t))
        return 0;
    len = ht_min_u64(len, sizeof(t) - off);
    memcpy(buf, (const uint8_t *)&t + off, len);
    return (ssize_t)len;
}

ssize_t ht_optim_state_read_for(struct ht_optim *o, const struct ht_param_desc *desc, const char *name,
                                struct ht_obj_reader *reader, uint64_t off, void *buf, size_t len)
{
    struct ht_obj *obj = NULL;
    struct ht_layout layout;
    ssize_t rc = find_word(o, desc, name, &layout);
    unsigned word = (unsigned)rc;

    if (rc < 0)
        return rc;
    struct ht_param *p = ht_opt_param_get(o, ht_obj_id(desc->obj));
    if (!p)
        return 0;
    lock(o);
    rc = ht_opt_wait_replayed(p->root);
    len = ht_min_u64(len, HT_FILE_BYTES_MAX);
    if (!rc && p->cur.exists && off < HT_FILE_BYTES_MAX)
        wait_for_range(p, off, len);
    bool exists = !rc && p->cur.exists;
    if (exists && !same_files(&layout, &p->cur.layout))
        rc = -ESTALE;
    else if (exists && word < file_count(&layout) && needs_view(&p->cur.layout, word))
        rc = read_view(p, word, &layout, off, buf, len);
    else if (exists && word < file_count(&layout))
        obj = ht_obj_get(o->store, p->cur.oid[word]);
    else if (exists)
        rc = read_step(p, off, buf, len);
    unlock(o);
    if (obj)
        rc = ht_obj_read_for(obj, reader, off, buf, len);
    ht_obj_put(obj);
    ht_opt_param_put(p);
    return rc;
}

/* ----------------------------------------------------------------- compare */

/* References to the objects of a state file. False: there are none. */
static bool get_objects(struct ht_optim *o, const struct ht_param_desc *desc, const struct ht_layout *layout,
                        unsigned word, struct ht_opt_coded *out) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = ht_opt_param_find(o, ht_obj_id(desc->obj));

    return p && !p->gone && p->cur.exists && ht_opt_same_layout(layout, &p->cur.layout) &&
        !ht_opt_coded_get(p, word, out);
}

/* Two that are there, or none. */
static bool same_whole(struct ht_obj *a, struct ht_obj *b)
{
    uint64_t at = 0;

    if (!a && !b)
        return true;
    while (at != UINT64_MAX && ht_obj_same(a, b, at, &at))
        ;
    return at == UINT64_MAX && ht_obj_size(a) == ht_obj_size(b);
}

bool ht_optim_state_same(struct ht_optim *o, const struct ht_param_desc *a, const struct ht_param_desc *b,
                         const char *name, uint64_t off, uint64_t *out_end)
{
    struct ht_opt_coded x = {.obj = NULL}, y = {.obj = NULL};
    struct ht_layout layout;
    int word = find_word(o, a, name, &layout);
    bool same = false;

    *out_end = UINT64_MAX;
    if (word < 0 || word >= (int)file_count(&layout))
        return false;
    lock(o);
    bool both = get_objects(o, a, &layout, (unsigned)word, &x) && get_objects(o, b, &layout, (unsigned)word, &y);
    unlock(o);
    if (both && !needs_view(&layout, (unsigned)word))
        same = ht_obj_same(x.obj, y.obj, off, out_end);
    else if (both)
        same = same_whole(x.obj, y.obj) && same_whole(x.p, y.p) && same_whole(x.blocks, y.blocks);
    ht_opt_coded_put(&x);
    ht_opt_coded_put(&y);
    return same;
}

/* ------------------------------------------------------------------- write */

/* Bytes of a state file from a client. */
struct write {
    struct ht_param *p;
    struct ht_layout layout;
    unsigned word; /* in the layout */
    uint64_t off, len;
    const void *buf;
    uint64_t element;                         /* that does not round to the parameter, or has no such form */
    int (*fn)(void *ctx, struct ht_obj *obj); /* in place of bytes, or NULL */
    void *ctx;
};

/* It fits; before anything is created. */
static int validate_write(const struct write *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t size = w->p->shape.elements * 4;
    float t;

    if (w->word < file_count(&w->layout))
        return w->off % 4 || w->len % 4 || w->off > size || w->len > size - w->off ? -EINVAL : 0;
    if (w->off != 0 || w->len != sizeof(t))
        return -EINVAL;
    memcpy(&t, w->buf, sizeof(t));
    return t >= 0 && t <= STEP_MAX && t == floorf(t) ? 0 : -EINVAL;
}

/* Under the gate; releases the lock in between. Updates that are queued now run when it is over. */
static ssize_t write_objects(struct write *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = w->p;
    bool viewed = needs_view(&p->cur.layout, w->word);
    struct ht_opt_coded c = {.obj = NULL};
    struct ht_obj *obj = viewed ? NULL : ht_obj_get(p->o->store, p->cur.oid[w->word]);

    if (viewed && w->fn)
        return -EOPNOTSUPP;
    ssize_t rc = viewed ? ht_opt_coded_get(p, w->word, &c) : obj ? 0 : -ESTALE;
    if (rc)
        return rc;
    p->root->hold = true;
    p->rewriting = viewed;
    unlock(p->o);
    if (viewed)
        rc = ht_opt_coded_write(&c, w->off, w->buf, w->len, &w->element);
    else
        rc = w->fn ? w->fn(w->ctx, obj) : ht_obj_write(obj, w->off, w->buf, w->len);
    ht_opt_coded_put(&c);
    ht_obj_put(obj);
    lock(p->o);
    p->root->hold = p->rewriting = false;
    p->rewrites += viewed;
    ht_opt_root_ready(p->root);
    notify_changed(p->o);
    return rc;
}

/* Under the gate; releases the lock in between. */
static ssize_t write_word(struct write *w) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = w->p;
    float t;

    if (p->gone || !p->cur.exists || !same_files(&w->layout, &p->cur.layout))
        return -ESTALE;
    if (p->root->open || p->has_grad || p->pending)
        return -EBUSY;
    if (w->word < file_count(&w->layout))
        return write_objects(w);
    if (w->fn)
        return -EOPNOTSUPP;
    memcpy(&t, w->buf, sizeof(t));
    p->cur.t = (uint64_t)t;
    return sizeof(t);
}

/* Under the gate, which it leaves; not locked. */
static ssize_t write_gated(struct write *w)
{
    struct ht_param *p = w->p;

    lock(p->o);
    bool make = !p->cur.exists && !p->gone && !p->root->open;
    ssize_t rc = validate_write(w);
    unlock(p->o);
    if (!rc && make)
        rc = ht_opt_state_create(p, &w->layout);
    lock(p->o);
    if (!rc)
        rc = write_word(w);
    p->root->redo.gap = true;
    if (rc >= 0)
        ht_opt_succeeded(p->root, HT_EVENT_REFUSED, p->oid);
    ht_opt_gate_leave(p->root);
    unlock(p->o);
    return rc;
}

/* Every refusal has a name. Not locked. */
static ssize_t report_refused(const struct write *w, const char *name, ssize_t err)
{
    const struct ht_param *p = w->p;

    if (err == -EDOM)
        ht_opt_refuse(p->root, HT_EVENT_REFUSED, p->oid,
                      "state %s: element %llu does not round to the parameter; write the parameter first", name,
                      (ull)w->element);
    else if (err == -ERANGE)
        ht_opt_refuse(p->root, HT_EVENT_REFUSED, p->oid,
                      "state %s: element %llu is %s; state_bits=32 keeps such a value", name, (ull)w->element,
                      ht_state_is_positive(w->layout.kind[w->word]) ? "negative, not finite, or too large"
                                                                    : "not finite, or too large");
    else if (err == -EINVAL && !strcmp(name, "step"))
        ht_opt_refuse(p->root, HT_EVENT_REFUSED, p->oid, "state step: must be one f32, a whole number up to 2^24");
    else if (err == -EINVAL)
        ht_opt_refuse(p->root, HT_EVENT_REFUSED, p->oid,
                      "state %s: must be whole elements of f32, within the %llu bytes that it has", name,
                      (ull)(p->shape.elements * 4));
    else if (err == -EBUSY)
        ht_opt_refuse(p->root, HT_EVENT_REFUSED, p->oid, "state %s: a step is open; commit or abort it first", name);
    return err == -EDOM || err == -ERANGE ? -EINVAL : err;
}

static ssize_t write_state(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, struct write *w)
{
    int word = find_word(o, desc, name, &w->layout);

    if (word < 0)
        return word;
    w->word = (unsigned)word;
    /* This checks dtype and size, and makes the parameter known. */
    ssize_t rc = ht_opt_param_open(o, desc, &w->p);
    if (rc)
        return rc;
    lock(o);
    rc = w->p->gone ? -ESTALE : ht_opt_gate_enter(w->p->root);
    unlock(o);
    if (!rc)
        rc = report_refused(w, name, write_gated(w));
    ht_opt_param_close(w->p);
    return rc;
}

ssize_t ht_optim_state_write(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, uint64_t off,
                             const void *buf, size_t len)
{
    struct write w = {.off = off, .buf = buf, .len = len};

    return write_state(o, desc, name, &w);
}

/* Of a state that stays as it is. */
static int look_at_object(struct ht_optim *o, const struct ht_param_desc *desc, const char *name,
                          int (*fn)(void *ctx, struct ht_obj *obj), void *ctx)
{
    struct ht_opt_coded of = {.obj = NULL};
    struct ht_layout layout;
    int word = find_word(o, desc, name, &layout);

    if (word < 0)
        return word;
    lock(o);
    bool found = word < (int)file_count(&layout) && get_objects(o, desc, &layout, (unsigned)word, &of);
    unlock(o);
    int rc = !found ? -ENOENT : needs_view(&layout, (unsigned)word) ? -EOPNOTSUPP : fn(ctx, of.obj);
    ht_opt_coded_put(&of);
    return rc;
}

int ht_optim_state_object(struct ht_optim *o, const struct ht_param_desc *desc, const char *name, bool make,
                          int (*fn)(void *ctx, struct ht_obj *obj), void *ctx)
{
    struct write w = {.fn = fn, .ctx = ctx};

    return make ? (int)write_state(o, desc, name, &w) : look_at_object(o, desc, name, fn, ctx);
}

uint64_t ht_optim_state_stored(struct ht_optim *o, uint64_t oid)
{
    uint64_t bytes = 0;

    lock(o);
    const struct ht_param *p = ht_opt_param_find(o, oid);
    for (unsigned i = 0; p && !p->gone && p->cur.exists && i < p->cur.layout.count; i++) {
        struct ht_obj *obj = ht_obj_get(o->store, p->cur.oid[i]);
        struct ht_obj_stat st = {0};
        if (obj)
            ht_obj_stat(obj, &st);
        ht_obj_put(obj);
        bytes += st.stored_bytes;
    }
    unlock(o);
    return bytes;
}
