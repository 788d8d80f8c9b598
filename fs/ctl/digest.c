/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest.c - digests of kept steps, computed in the background (tiering/base/step_digest.h).
 *
 *   a step without a digest, kept some seconds ago --begin--> reading --all read--> noting --in the log--> it has one
 *                                                               |
 *                                       cannot be read: event, and not again before the next mount
 *
 * One step at a time is read, the newest first: it stays longest. Steps with a name come before, as they do not expire.
 * A step that expires within seconds is not read at all, and if one went while it was read, later ones wait twice as
 * long. What a kept step has never changes, so the walk goes on where it stopped. Between two calls it keeps numbers of
 * inodes and names alone: nothing that ends meanwhile stays because of it. The digest is noted in one transaction of
 * its own. After a crash or an unmount before that the work begins anew.
 *
 * A directory is read in small parts, so the lock of names is held for moments. A heap gives the names in their order.
 * The walk has memory for the directories on its way: at most twice the bytes of their names, and 32 for each. A file
 * of which it has met some names and not all takes its first path and 80 bytes.
 *
 * The order is that of a manifest of the step (mount-helpers/vault/tree.py): a directory, then what is in it by the
 * bytes of names; a file, then its blocks, then its states.
 *
 * Only the thread that serves the engine uses the walk. Figures are atomic, failures are under the lock of ctl.
 */
#include "fs/ctl/ctl_priv.h"
#include "tiering/base/step_digest.h"

#include <linux/limits.h>
#include <search.h>

#define NS_PER_S INT64_C(1000000000)
#define AFTER_NS (3 * NS_PER_S) /* the commit that kept the step */
#define AFTER_NS_MAX (3600 * NS_PER_S)

enum { FAILURES_MAX = 64, STATES_MAX = 16, NAMES_IN_PART = 256 };

static const char optimizer[] = HT_XATTR_PREFIX "optimizer";

struct name {
    uint64_t ino;
    size_t at; /* in the texts of its directory */
};

/* A directory that is being read. */
struct frame {
    uint64_t ino, cookie; /* of the last name that was read */
    unsigned part;        /* names that were read at once */
    bool whole;           /* no name is missing */
    struct ht_buf text;
    struct name *name; /* a heap: the least one by their bytes is the first */
    size_t count, cap;
    size_t path_len; /* of its path */
};

/* The first path of a file with several names, until all are met. */
struct link {
    uint64_t ino;
    uint64_t left; /* names that are not met yet */
    char path[];
};

struct walk {
    struct ht_ctl *c;
    struct ht_ns_kept about;
    struct ht_digest digest;
    struct frame frame[HT_DIGEST_DEPTH_MAX + 1];
    unsigned depth; /* of frames; 0: all was read */
    void *links;    /* tree of struct link */
    char path[HT_DIGEST_PATH_BYTES_MAX + 1];
    /* The present file, its bytes or those of a state, and its states that follow. */
    uint64_t ino, size, at;
    const char *state, *states[STATES_MAX]; /* static texts; NULL: the file itself */
    unsigned state_count, state_next;
    char digits[HT_DIGEST_TEXT_MAX]; /* of a step that was read; "" before */
    uint8_t block[HT_DIGEST_BLOCK_BYTES];
    char list[XATTR_LIST_MAX + sizeof(optimizer)], value[HT_XATTR_VALUE_BYTES_MAX];
};

struct failure {
    uint64_t ino; /* of the kept step; 0: free */
    char text[HT_CTL_ERROR_MAX];
};

struct ht_digests {
    struct ht_digest_client client;
    struct walk *walk; /* NULL: no step is read */
    int64_t after_ns;  /* so old is a step that may expire before it is read */
    _Atomic uint64_t done, failed, left_bytes;
    unsigned failures; /* FAILURES_MAX: no other step is tried before the next mount */
    struct failure failure[FAILURES_MAX];
};

/* --------------------------------------------------------------- directories */

static bool is_less(const struct frame *f, size_t a, size_t b)
{
    return strcmp((const char *)f->text.data + f->name[a].at, (const char *)f->text.data + f->name[b].at) < 0;
}

static void swap_names(struct frame *f, size_t a, size_t b)
{
    struct name n = f->name[a];

    f->name[a] = f->name[b];
    f->name[b] = n;
}

static void add_name(struct frame *f, struct name n)
{
    size_t i = f->count++;

    f->name[i] = n;
    for (; i && is_less(f, i, (i - 1) / 2); i = (i - 1) / 2)
        swap_names(f, i, (i - 1) / 2);
}

static struct name take_least(struct frame *f)
{
    struct name least = f->name[0];
    size_t i = 0, child;

    f->name[0] = f->name[--f->count];
    while ((child = 2 * i + 1) < f->count) {
        child += child + 1 < f->count && is_less(f, child + 1, child);
        if (!is_less(f, child, i))
            break;
        swap_names(f, i, child);
        i = child;
    }
    return least;
}

static int note_name(void *ctx, const struct ht_ns_dirent *e)
{
    struct frame *f = ctx;
    size_t at = f->text.len;

    if (f->part == NAMES_IN_PART)
        return 1;
    if (ht_array_grow((void **)&f->name, &f->cap, f->count + 1, sizeof(*f->name)))
        return f->text.err = -ENOMEM;
    ht_buf_put(&f->text, e->name, strlen(e->name) + 1);
    if (f->text.err)
        return f->text.err;
    add_name(f, (struct name){.ino = e->ino, .at = at});
    f->cookie = e->cookie;
    f->part++;
    return 0;
}

static int read_part(struct walk *k, struct frame *f)
{
    f->part = 0;
    int rc = ht_ns_readdir(k->c->ns, f->ino, f->cookie, note_name, f);

    f->whole = f->part < NAMES_IN_PART;
    return rc ? rc : f->text.err;
}

static void pop(struct walk *k)
{
    struct frame *f = &k->frame[--k->depth];

    ht_buf_free(&f->text);
    free(f->name);
}

/* The directory at k->path. */
static int push(struct walk *k, uint64_t ino)
{
    if (k->depth == HT_ARRAY_SIZE(k->frame))
        return -ENAMETOOLONG;
    k->frame[k->depth++] = (struct frame){.ino = ino, .text = HT_BUF_INIT, .path_len = strlen(k->path)};
    return 0;
}

/* --------------------------------------------------------------- attributes */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int put_attribute(struct walk *k, uint64_t ino, const char *name)
{
    ssize_t n = ht_ns_getxattr(k->c->ns, ino, name, k->value, sizeof(k->value));

    if (n >= 0)
        ht_digest_put_attribute(&k->digest, name, strlen(name), k->value, (size_t)n);
    return n < 0 && n != -ENODATA ? (int)n : 0;
}

/* In the order of their names. The setting of the optimizer is not in the list. */
static int put_attributes(struct walk *k, uint64_t ino)
{
    ssize_t len = ht_ns_listxattr(k->c->ns, ino, false, k->list, XATTR_LIST_MAX);
    size_t count = 0, cap = 1;
    char **names;
    int rc = 0;

    if (len < 0)
        return (int)len;
    memcpy(k->list + len, optimizer, sizeof(optimizer));
    len += (ssize_t)sizeof(optimizer);
    for (const char *p = k->list; p < k->list + len; p += strlen(p) + 1)
        cap++;
    names = malloc(cap * sizeof(*names));
    if (!names)
        return -ENOMEM;
    for (char *p = k->list; p < k->list + len; p += strlen(p) + 1)
        names[count++] = p;
    qsort(names, count, sizeof(*names), by_text);
    for (size_t i = 0; rc == 0 && i < count; i++)
        rc = put_attribute(k, ino, names[i]);
    ht_digest_put_attributes_end(&k->digest);
    free(names);
    return rc;
}

/* ------------------------------------------------------------------ content */

/* Past a hole, to the block with the next data. */
static int skip_hole(struct walk *k, struct ht_obj *obj)
{
    int64_t data = ht_obj_seek(obj, k->at, false);

    if (data < 0 && data != -ENXIO)
        return (int)data;
    if (data < 0)
        k->at = k->size;
    else
        k->at = ht_max_u64(k->at, (uint64_t)data / HT_DIGEST_BLOCK_BYTES * HT_DIGEST_BLOCK_BYTES);
    return 0;
}

static size_t block_bytes(const struct walk *k)
{
    return ht_min_u64(HT_DIGEST_BLOCK_BYTES, k->size - k->at);
}

static ssize_t read_file(struct walk *k)
{
    struct ht_obj *obj;
    ssize_t n = ht_ns_open(k->c->ns, k->ino, &obj);

    if (n < 0)
        return n;
    n = skip_hole(k, obj);
    if (n == 0)
        n = ht_obj_read(obj, k->at, k->block, block_bytes(k));
    ht_ns_close(k->c->ns, k->ino);
    return n;
}

static ssize_t read_state(struct walk *k)
{
    struct ht_param_desc desc;
    ssize_t n = ht_ctl_describe(k->c, k->ino, &desc);

    if (n < 0)
        return n;
    n = ht_optim_state_read(k->c->optim, &desc, k->state, k->at, k->block, block_bytes(k));
    ht_ns_close(k->c->ns, k->ino);
    return n;
}

/* The next block of the present file or state. */
static int read_block(struct walk *k, struct ht_budget *b)
{
    ssize_t n = k->state ? read_state(k) : read_file(k);
    size_t len = block_bytes(k);

    if (n < 0)
        return (int)n;
    b->bytes += len;
    k->c->digests->left_bytes -= ht_min_u64(len, k->c->digests->left_bytes);
    if ((size_t)n != len)
        return -ESTALE;
    if (!ht_is_zero(k->block, len)) {
        struct ht_hash128 sum = ht_hash128(k->block, len);
        ht_digest_put_block(&k->digest, k->at / HT_DIGEST_BLOCK_BYTES, &sum);
    }
    k->at += len;
    return 0;
}

/* Its state has files with names of their own: those that have bytes are parts of the step. */
static int list_states(struct walk *k)
{
    struct ht_param_desc desc;
    const char *name;
    int rc = ht_ctl_describe(k->c, k->ino, &desc);

    k->state_count = k->state_next = 0;
    if (rc)
        return rc == -EINVAL ? 0 : rc;
    for (unsigned i = 0; rc == 0 && ht_optim_state_name(k->c->optim, &desc, i, &name) == 0; i++) {
        if (k->state_count == STATES_MAX)
            rc = -E2BIG;
        else if (ht_optim_state_size(k->c->optim, &desc, name) > 0)
            k->states[k->state_count++] = name;
    }
    ht_ns_close(k->c->ns, k->ino);
    qsort(k->states, k->state_count, sizeof(*k->states), by_text);
    return rc;
}

static int begin_state(struct walk *k)
{
    struct ht_param_desc desc;
    int rc = ht_ctl_describe(k->c, k->ino, &desc);

    if (rc)
        return rc;
    k->state = k->states[k->state_next++];
    int64_t size = ht_optim_state_size(k->c->optim, &desc, k->state);
    ht_ns_close(k->c->ns, k->ino);
    if (size < 0)
        return (int)size;
    k->size = (uint64_t)size;
    k->at = 0;
    ht_digest_put_state(&k->digest, k->size, k->state);
    return 0;
}

/* ------------------------------------------------------------------ entries */

/* Is there a file with several names whose first one was met? Its path goes to first, until the last one is met. */
static bool find_first(struct walk *k, uint64_t ino, char *first)
{
    const struct link want = {.ino = ino};
    struct link **there = tfind(&want, &k->links, ht_compare_numbers), *l = there ? *there : NULL;

    if (!l)
        return false;
    memcpy(first, l->path, strlen(l->path) + 1);
    if (--l->left == 0) {
        (void)tdelete(&want, &k->links, ht_compare_numbers);
        free(l);
    }
    return true;
}

static int note_first(struct walk *k, const struct stat *st)
{
    size_t len = strlen(k->path) + 1;
    struct link *l = malloc(sizeof(*l) + len);

    if (!l)
        return -ENOMEM;
    l->ino = st->st_ino;
    l->left = st->st_nlink - 1;
    memcpy(l->path, k->path, len);
    if (tsearch(l, &k->links, ht_compare_numbers))
        return 0;
    free(l);
    return -ENOMEM;
}

static int put_content(struct walk *k, const struct stat *st)
{
    ht_digest_put_entry(&k->digest, HT_DIGEST_FILE, (uint64_t)st->st_size, k->path, "");
    int rc = put_attributes(k, st->st_ino);
    k->ino = st->st_ino;
    k->size = (uint64_t)st->st_size;
    k->at = 0;
    k->state = NULL;
    return rc ? rc : list_states(k);
}

static int put_file(struct walk *k, const struct stat *st)
{
    char first[HT_DIGEST_PATH_BYTES_MAX + 1];

    if (st->st_nlink > 1 && find_first(k, st->st_ino, first)) {
        ht_digest_put_entry(&k->digest, HT_DIGEST_LINK, 0, k->path, first);
        ht_digest_put_attributes_end(&k->digest);
        return 0;
    }
    int rc = st->st_nlink > 1 ? note_first(k, st) : 0;
    return rc ? rc : put_content(k, st);
}

static int put_symlink(struct walk *k, uint64_t ino)
{
    char target[HT_SYMLINK_BYTES_MAX + 1];
    ssize_t n = ht_ns_readlink(k->c->ns, ino, target, sizeof(target) - 1);

    if (n < 0)
        return (int)n;
    target[n] = '\0';
    ht_digest_put_entry(&k->digest, HT_DIGEST_SYMLINK, 0, k->path, target);
    ht_digest_put_attributes_end(&k->digest);
    return 0;
}

/* The inode is held during the call alone. */
static int put_inode(struct walk *k, uint64_t ino)
{
    struct stat st;
    int rc = ht_ns_lookup_ino(k->c->ns, ino, false, &st);

    if (rc)
        return rc;
    if (S_ISDIR(st.st_mode)) {
        ht_digest_put_entry(&k->digest, HT_DIGEST_DIRECTORY, 0, k->path, "");
        rc = put_attributes(k, ino);
        rc = rc ? rc : push(k, ino);
    } else if (S_ISREG(st.st_mode)) {
        rc = put_file(k, &st);
    } else if (S_ISLNK(st.st_mode)) {
        rc = put_symlink(k, ino);
    } else {
        rc = -EOPNOTSUPP;
    }
    ht_ns_forget(k->c->ns, ino, 1);
    return rc;
}

/* The next name of the deepest directory, or the end of that. */
static int next_name(struct walk *k)
{
    struct frame *f = &k->frame[k->depth - 1];

    k->path[f->path_len] = '\0';
    if (!f->whole)
        return read_part(k, f);
    if (f->count == 0) {
        pop(k);
        return 0;
    }
    struct name n = take_least(f);
    int len = snprintf(k->path + f->path_len, sizeof(k->path) - f->path_len, "%s%s", f->path_len ? "/" : "",
                       (const char *)f->text.data + n.at);
    return (size_t)len >= sizeof(k->path) - f->path_len ? -ENAMETOOLONG : put_inode(k, n.ino);
}

/* ------------------------------------------------------------------ the walk */

static int walk_begin(struct ht_ctl *c, const struct ht_ns_kept *about)
{
    struct walk *k = calloc(1, sizeof(*k));
    int rc = k ? ht_digest_begin(&k->digest, about->step) : -ENOMEM;
    uint64_t stored_bytes, own_bytes;

    if (rc) {
        free(k);
        return rc;
    }
    k->c = c;
    k->about = *about;
    c->digests->walk = k;
    if (ht_store_scope_space(c->store, about->ino, &stored_bytes, &own_bytes) == 0)
        c->digests->left_bytes = stored_bytes; /* shared with others or not: they will be read */
    return put_inode(k, about->ino);
}

static void walk_end(struct ht_ctl *c)
{
    struct walk *k = c->digests->walk;

    while (k->depth)
        pop(k);
    tdestroy(k->links, free);
    ht_digest_end(&k->digest);
    free(k);
    c->digests->walk = NULL;
    c->digests->left_bytes = 0;
}

/* One piece: a block, or a name. */
static int advance(struct walk *k, struct ht_budget *b)
{
    if (k->at < k->size)
        return read_block(k, b);
    if (k->state_next < k->state_count)
        return begin_state(k);
    return next_name(k);
}

static int go_on(struct walk *k, struct ht_budget *b)
{
    int rc = 0;

    while (rc == 0 && k->depth && b->bytes < b->most_bytes && ht_now_ns() < b->until_ns)
        rc = advance(k, b);
    if (rc == 0 && !k->depth && !k->digits[0]) {
        struct ht_hash128 sum = ht_digest_get(&k->digest);
        (void)ht_digest_text(&sum, k->digits);
    }
    return rc;
}

/* ----------------------------------------------------------------- failures */

bool ht_digest_error(struct ht_ctl *c, uint64_t kept, char out[HT_CTL_ERROR_MAX])
{
    struct ht_digests *d = c->digests;
    bool found = false;

    ht_mutex_lock(ht_ctl_lock(c));
    for (unsigned i = 0; d && i < FAILURES_MAX && !found; i++) {
        found = d->failure[i].ino == kept;
        if (found)
            memcpy(out, d->failure[i].text, HT_CTL_ERROR_MAX);
    }
    ht_mutex_unlock(ht_ctl_lock(c));
    return found;
}

static void fail(struct ht_ctl *c, const struct walk *k, int error)
{
    const struct ht_event_about about = {.id = k->about.ino, .error = error};
    struct ht_digests *d = c->digests;
    struct failure f = {.ino = k->about.ino};

    snprintf(f.text, sizeof(f.text), "%.180s%s%s: %s", k->path[0] ? k->path : "the model", k->state ? ", " : "",
             k->state ? k->state : "",
             error == -EOPNOTSUPP ? "a device, a socket or a FIFO has no digest" : strerror(-error));
    for (char *p = f.text; *p; p++)
        *p = *p >= ' ' && *p != 127 ? *p : '?'; /* names may have line breaks */
    ht_mutex_lock(ht_ctl_lock(c));
    if (d->failures < FAILURES_MAX)
        d->failure[d->failures++] = f;
    ht_mutex_unlock(ht_ctl_lock(c));
    d->failed++;
    ht_event(HT_EVENT_DIGEST_FAILED, &about, "kept step %s has no digest: %s", k->about.name, f.text);
}

/* -------------------------------------------------------------------- which */

static bool is_number(const char *name)
{
    return strspn(name, "0123456789") == strlen(name);
}

/* a before b? Names that do not expire, then the newest. */
static bool comes_before(const struct ht_ns_kept *a, const struct ht_ns_kept *b)
{
    bool x = is_number(a->name), y = is_number(b->name);

    return x != y ? !x : a->ino > b->ino;
}

static bool wants_digest(struct ht_ctl *c, const struct ht_ns_kept *about)
{
    char digits[HT_NS_DIGEST_MAX], why[HT_CTL_ERROR_MAX];

    return c->digests->failures < FAILURES_MAX && ht_ns_kept_digest(c->ns, about->ino, digits) != 0 &&
        !ht_digest_error(c, about->ino, why) &&
        !ht_scope_cold_bytes(c->store, about->ino); /* no engine waits for a vault */
}

/* 1: out is next; 0: none, and *out_at_ns says when there is one (0: not known). -ENOMEM */
static int choose(struct ht_ctl *c, struct ht_ns_kept *out, uint64_t *out_at_ns)
{
    struct ht_ns_kept *all, *best = NULL;
    int64_t now_ns = (int64_t)ht_wall_ns(), wait_ns = 0;
    size_t count;
    int rc = ht_ns_kept_list(c->ns, 0, &all, &count);

    if (rc)
        return rc;
    for (size_t i = 0; i < count; i++) {
        /* A clock that was set back makes nothing wait longer than that. */
        int64_t age_ns = now_ns - all[i].time_ns,
                left_ns = (is_number(all[i].name) ? c->digests->after_ns : AFTER_NS) - age_ns;
        if (!wants_digest(c, &all[i]))
            continue;
        if (age_ns >= 0 && left_ns > 0)
            wait_ns = wait_ns && wait_ns < left_ns ? wait_ns : left_ns;
        else if (!best || comes_before(&all[i], best))
            best = &all[i];
    }
    *out_at_ns = wait_ns ? ht_now_ns() + (uint64_t)wait_ns : 0;
    if (best)
        *out = *best;
    free(all);
    return best != NULL;
}

static bool is_there(struct ht_ctl *c, const struct ht_ns_kept *about)
{
    struct ht_ns_kept now;

    return ht_ns_kept_find(c->ns, about->root, about->name, &now) == 0 && now.ino == about->ino;
}

/* ------------------------------------------------------------------- engine */

static int note(struct ht_ctl *c, const struct walk *k)
{
    int rc = ht_ns_kept_note(c->ns, k->about.ino, NULL, k->digits);

    c->digests->done += rc == 0;
    if (rc == 0)
        c->digests->after_ns = AFTER_NS;
    return rc == -EEXIST ? 0 : rc;
}

/* What may pass: the walk stays as it is, or begins anew. */
static bool is_passing(int rc)
{
    return rc == -ENOMEM || rc == -ENOSPC || rc == -EROFS || rc == -EAGAIN;
}

/* Ends the walk after an error, which is the step's if it stays. */
static enum ht_step give_up(struct ht_ctl *c, const struct ht_ns_kept *about, int rc)
{
    if (c->digests->walk && !is_passing(rc) && is_there(c, about))
        fail(c, c->digests->walk, rc);
    if (c->digests->walk)
        walk_end(c);
    return is_passing(rc) ? HT_STEP_BLOCKED : HT_STEP_WORKED;
}

static enum ht_step begin_next(struct ht_ctl *c, struct ht_budget *b)
{
    struct ht_ns_kept about;
    int rc = choose(c, &about, &b->at_ns);

    if (rc == 0)
        return HT_STEP_IDLE;
    if (rc > 0)
        rc = walk_begin(c, &about);
    return rc ? give_up(c, &about, rc) : HT_STEP_WORKED;
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_ctl *c = ctx;
    struct walk *k = c->digests->walk;

    if (!k)
        return begin_next(c, b);
    if (!is_there(c, &k->about)) {
        c->digests->after_ns = (int64_t)ht_min_u64(2 * (uint64_t)c->digests->after_ns, AFTER_NS_MAX);
        walk_end(c);
        return HT_STEP_WORKED;
    }
    int rc = go_on(k, b);
    if (rc == 0 && !k->digits[0])
        return HT_STEP_WORKED;
    if (rc == 0)
        rc = note(c, k);
    if (rc && is_passing(rc) && k->digits[0])
        return HT_STEP_BLOCKED; /* noted later */
    if (rc)
        return give_up(c, &k->about, rc);
    walk_end(c);
    return HT_STEP_WORKED;
}

static void values(void *ctx, uint64_t out[HT_DIGEST_FIGURES])
{
    const struct ht_digests *d = ((const struct ht_ctl *)ctx)->digests;

    out[HT_DIGEST_DONE] = d->done;
    out[HT_DIGEST_FAILED] = d->failed;
    out[HT_DIGEST_LEFT_BYTES] = d->left_bytes;
}

int ht_digests_begin(struct ht_ctl *c)
{
    c->digests = calloc(1, sizeof(*c->digests));
    if (!c->digests)
        return -ENOMEM;
    c->digests->after_ns = AFTER_NS;
    c->digests->client = (struct ht_digest_client){.ctx = c, .step = step, .values = values};
    ht_store_begin_digest(c->store, &c->digests->client);
    return 0;
}

void ht_digests_end(struct ht_ctl *c)
{
    if (!c->digests)
        return;
    ht_store_end_digest(c->store);
    if (c->digests->walk)
        walk_end(c);
}
