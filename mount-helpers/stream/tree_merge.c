/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tree_merge.c - see tree.h: blocks of a stream for a rank go into a model that is there. Paths of the stream are
 * resolved below the model, and no symlink is followed. Times of files stay: what a rank gets is of the same step.
 */
#include "mount-helpers/stream/tree.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mount-helpers/stream/base.h"

struct merge {
    struct ht_stream_reader *r;
    const struct ht_tree_progress *progress;
    int dir;
    bool zeros;
    struct ht_moves moves; /* of the present file or state; that of the reader may be one further */
    int to;                /* where blocks go: a parameter, or a state; -1: nowhere */
    uint64_t size, passed; /* of the present file or state: all bytes, and those that were dealt with */
    uint64_t next;         /* the first block that nothing was said about */
    struct timespec times[2];
    uint8_t *zero; /* a block */
    char *why;
};

static int fail(struct merge *m, int rc, const char *what)
{
    const char *state = m->r->state;

    if (m->why[0] == '\0')
        snprintf(m->why, HT_TREE_WHY_MAX, "%.160s%s%s: %s", m->r->path, state[0] != '\0' ? ", " : "", state, what);
    return rc;
}

static int fail_errno(struct merge *m, int err)
{
    char text[128];

    snprintf(text, sizeof(text), "cannot write its blocks: %s", strerror(err));
    return fail(m, -err, text);
}

/* The content up to end is there. */
static void pass(struct merge *m, uint64_t end)
{
    if (end > m->passed && m->progress && m->progress->add)
        m->progress->add(m->progress->ctx, end - m->passed);
    m->passed = end;
}

static int write_at(struct merge *m, const uint8_t *data, size_t len, uint64_t at)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = pwrite(m->to, data + done, len - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail_errno(m, n < 0 ? errno : EIO);
        done += (size_t)n;
    }
    pass(m, at + len);
    return 0;
}

static bool is_stopped(const struct merge *m)
{
    return m->progress && m->progress->stopped && m->progress->stopped();
}

/* Blocks of zeros are left out: those of the rank before the given one. Nothing is read for them. */
static int put_zeros(struct merge *m, uint64_t end)
{
    uint64_t index = ht_moves_next(&m->moves, m->next, end);
    int rc = 0;

    while (rc == 0 && m->zeros && index < end) {
        uint64_t at = index * HT_STREAM_BLOCK_BYTES;
        rc = is_stopped(m) ? fail_errno(m, EINTR)
                           : write_at(m, m->zero, (size_t)ht_min_u64(HT_STREAM_BLOCK_BYTES, m->size - at), at);
        index = ht_moves_next(&m->moves, index + 1, end);
    }
    return rc;
}

/* Nothing more comes for the present file or state. */
static int end_content(struct merge *m)
{
    int rc = 0;

    if (m->to < 0) {
        pass(m, m->size);
        return 0;
    }
    rc = put_zeros(m, ht_div_up(m->size, HT_STREAM_BLOCK_BYTES));
    if (rc == 0 && futimens(m->to, m->times) < 0 && errno != EROFS && errno != EPERM && errno != EINVAL)
        rc = fail_errno(m, errno);
    if (close(m->to) < 0 && rc == 0)
        rc = fail_errno(m, errno);
    m->to = -1;
    pass(m, m->size);
    return rc;
}

static int begin_content(struct merge *m, int fd, uint64_t size)
{
    struct stat st;

    m->to = fd;
    m->next = 0;
    if (fd < 0)
        return fail(m, fd, fd == -ENOENT ? "the model here has none" : strerror(-fd));
    if (fstat(fd, &st) < 0)
        return fail_errno(m, errno);
    m->times[0].tv_nsec = UTIME_OMIT;
    m->times[1] = st.st_mtim;
    return (uint64_t)st.st_size == size ? 0 : fail(m, -ESTALE, "that of the model here has another size");
}

/* Does the present file or state have blocks that the rank gets of the others? The number "step" is here already. */
static bool has_blocks(const struct merge *m, uint64_t size)
{
    uint64_t blocks = ht_div_up(size, HT_STREAM_BLOCK_BYTES);

    return m->moves.width && ht_moves_next(&m->moves, 0, blocks) < blocks;
}

static int take_entry(struct merge *m, const struct ht_stream_entry *e)
{
    int rc;

    m->size = e->size;
    m->passed = 0;
    rc = ht_moves_file(&m->moves, ht_stream_parameter(e) != NULL, e->size);
    if (rc < 0)
        return fail_errno(m, -rc);
    return has_blocks(m, e->size) ? begin_content(m, ht_base_open_to_write(m->dir, e->path, NULL), e->size) : 0;
}

static int take_state(struct merge *m, const struct ht_stream_state *s)
{
    int rc;

    m->size = s->size;
    m->passed = 0;
    rc = ht_moves_state(&m->moves, s->name, s->size);
    if (rc < 0)
        return fail_errno(m, -rc);
    return has_blocks(m, s->size) ? begin_content(m, ht_base_open_to_write(m->dir, m->r->path, s->name), s->size) : 0;
}

static int take_block(struct merge *m, const struct ht_stream_block *b)
{
    int rc = m->to < 0 ? 0 : put_zeros(m, b->index);

    if (rc < 0 || m->to < 0)
        return rc;
    m->next = b->index + 1;
    return write_at(m, b->data, b->len, b->index * HT_STREAM_BLOCK_BYTES);
}

static int take(struct merge *m, const struct ht_stream_record *x)
{
    int rc = x->type == HT_STREAM_BLOCK ? take_block(m, &x->block) : end_content(m);

    if (rc == 0 && x->type == HT_STREAM_ENTRY)
        rc = take_entry(m, &x->entry);
    if (rc == 0 && x->type == HT_STREAM_STATE)
        rc = take_state(m, &x->state);
    return rc;
}

int ht_tree_merge(int dir, struct ht_stream_reader *r, bool zeros, const struct ht_tree_progress *p,
                  char why[HT_TREE_WHY_MAX])
{
    struct merge m = {.r = r, .progress = p, .dir = dir, .zeros = zeros, .to = -1, .why = why};
    struct ht_stream_record x = {.type = HT_STREAM_ENTRY};
    int rc;

    why[0] = '\0';
    ht_moves_begin(&m.moves, &r->head.shard);
    m.zero = calloc(1, HT_STREAM_BLOCK_BYTES);
    rc = m.zero ? 0 : fail_errno(&m, ENOMEM);
    while (rc == 0 && x.type != HT_STREAM_END) {
        rc = ht_stream_next(r, &x);
        if (rc == 0)
            rc = take(&m, &x);
        else
            snprintf(why, HT_TREE_WHY_MAX, "%s", r->in.why);
    }
    if (m.to >= 0)
        close(m.to);
    free(m.zero);
    ht_moves_end(&m.moves);
    return rc;
}
