/* SPDX-License-Identifier: Apache-2.0 */
/* follow_send.c - the sender of `hitrainctl follow`: each logged step, as soon as it is durable. */
#include "mount-helpers/copy/follow.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "mount-helpers/copy/kept_base.h"
#include "mount-helpers/copy/sink.h"
#include "mount-helpers/stream/logged.h"
#include <hitrain/words.h>

enum { POLL_NS = 5000000, PIPE_BYTES = 1 << 20, WHY_MAX = 300 };

/* A logged step that is open. */
struct logged {
    int fd;
    struct ht_logged l;
};

struct sender {
    const char *root;
    struct ht_sink sink;
    struct ht_follow_writer w;
    struct ht_follow_files files;
    uint64_t lineage, next, sent; /* steps */
    bool terminal;
    uint8_t *block;
};

/* -------------------------------------------------------------- logged step */

static int read_all(int fd, void *to, size_t len, uint64_t at)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = pread(fd, (uint8_t *)to + done, len - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EPROTO;
        done += (size_t)n;
    }
    return 0;
}

static int read_logged(struct logged *o, uint64_t step)
{
    struct ht_redo_file h;
    uint64_t len = 0;
    int rc = read_all(o->fd, &h, sizeof(h), 0);

    if (rc == 0)
        rc = ht_logged_take_header(&o->l, &h, step, &len);
    if (rc < 0)
        return rc;
    uint8_t *summary = malloc(len);
    if (!summary)
        return -ENOMEM;
    rc = read_all(o->fd, summary, len, sizeof(h));
    if (rc == 0)
        return ht_logged_take_summary(&o->l, summary, len);
    free(summary);
    return rc;
}

static void close_logged(struct logged *o)
{
    if (o->fd >= 0)
        close(o->fd);
    ht_logged_free(&o->l);
}

static int refuse_logged(const char *path, const struct logged *o, int err)
{
    char why[WHY_MAX];

    if (err != -EPROTO && err != -EPROTONOSUPPORT)
        return ht_cmd_explain(path, err);
    ht_logged_explain(&o->l, err, why, sizeof(why));
    ht_error("%s: %s", path, why);
    return err;
}

/* -ENOENT: it is not there any more. Other errors are printed. */
static int open_logged(const char *root, uint64_t step, struct logged *o)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/redo/%llu", root, (unsigned long long)step), rc;

    *o = (struct logged){.fd = -1};
    if (n < 0 || (size_t)n >= sizeof(path))
        return ht_cmd_explain(root, -ENAMETOOLONG);
    o->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (o->fd < 0)
        return errno == ENOENT ? -ENOENT : ht_cmd_explain(path, -errno);
    rc = read_logged(o, step);
    if (rc < 0) {
        (void)refuse_logged(path, o, rc);
        close_logged(o);
    }
    return rc;
}

/* --------------------------------------------------------------------- step */

static int put_sparse(struct sender *s, const struct logged *o, const struct ht_logged_piece *p)
{
    const struct ht_follow_sparse block = {p->offset, (uint32_t)p->len, s->block, p->bytes};
    int rc = read_all(o->fd, s->block, p->bytes, o->l.gradients_at + p->at);

    return rc < 0 ? refuse_logged(s->root, o, rc) : ht_follow_put_sparse(&s->w, &block);
}

static int put_piece(struct sender *s, const struct logged *o, const struct ht_logged_piece *p)
{
    uint64_t done = 0;
    int rc = 0;

    if (p->sparse)
        return put_sparse(s, o, p);
    while (rc == 0 && done < p->len) {
        size_t len = ht_min_u64(HT_FOLLOW_BLOCK_BYTES_MAX, p->len - done);
        rc = read_all(o->fd, s->block, len, o->l.gradients_at + p->at + done);
        if (rc < 0)
            return refuse_logged(s->root, o, rc);
        rc = ht_follow_put_block(&s->w, p->offset + done, s->block, len);
        done += len;
    }
    return rc;
}

static int put_params(struct sender *s, const struct logged *o)
{
    const struct ht_logged *l = &o->l;
    uint64_t at = 0;
    int rc = 0;

    for (uint64_t i = 0; rc == 0 && i < l->params; i++) {
        uint8_t numbers[HT_FOLLOW_NUMBERS_BYTES];
        memcpy(numbers, ht_logged_param(l, i), sizeof(numbers));
        const char *path = ht_follow_param_path(&s->files, ht_le64_load(numbers));
        const char *why = path ? ht_follow_path_refused(path) : "a parameter of the step has no name any more";
        if (why) {
            ht_error("%s/%s: %s", s->root, path ? path : "", why);
            return -EINVAL;
        }
        memset(numbers, 0, 8);
        struct ht_follow_param p = {.numbers = numbers, .path = path};
        rc = ht_follow_put_param(&s->w, &p);
        if (i + 1 < l->params && ht_logged_is_section(l, i + 1)) /* sections come before all blocks */
            continue;
        for (; rc == 0 && at < l->pieces && l->piece[at].param <= i; at++)
            rc = put_piece(s, o, &l->piece[at]);
    }
    return rc;
}

/* files: with those that changed, if the step is the newest one. */
static int put_step(struct sender *s, const struct logged *o, uint64_t newest, bool files, struct ht_hash128 *out)
{
    const struct ht_logged *l = &o->l;
    const struct ht_follow_step step = {l->step, l->params, l->bytes, newest};
    bool sent = false;
    int rc = ht_follow_put_step(&s->w, &step);

    if (rc == 0)
        rc = put_params(s, o);
    if (rc == 0 && files && newest == l->step)
        rc = ht_follow_files_send(&s->files, l->step, &s->w, &sent);
    return rc == 0 ? ht_follow_put_done(&s->w, sent, out) : rc;
}

/* ------------------------------------------------------------------- begin */

static int refuse(const char *root, const char *why)
{
    ht_error("%s: %s", root, why);
    return -ESTALE;
}

static const char another[] =
    "its history is another one now: a change that is no logged step, a rollback, or a new mount came in between. Send "
    "a newer kept step (hitrainctl send --from sends what differs), and follow from that one";

/* Steps are logged, and stay readable for a while. */
static int check_words(const char *root)
{
    char *text;
    int rc = ht_cmd_attribute(root, "optimizer", false, &text);

    if (rc == -ENODATA)
        ht_error("%s is no model root", root);
    if (rc < 0)
        return rc;
    bool kept = ht_follow_number(text, "redo_keep") > 0, logged = false;
    for (const char *p = text; *p != '\0'; p += strcspn(p, " \n"), p += strspn(p, " \n"))
        logged |= strncmp(p, "redo=on", 7) == 0 && (p[7] == '\0' || strchr(" \n", p[7]));
    free(text);
    if (logged && kept)
        return 0;
    ht_error("%s: its steps are not logged for readers: set redo=on and redo_keep=N in " HT_XATTR_PREFIX "optimizer",
             root);
    return -EINVAL;
}

/* The lineage of a kept step is in its own attribute. */
static int check_kept(const char *root, const char *name, uint64_t lineage)
{
    char path[PATH_MAX];
    struct ht_follow_state kept;
    int n = snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/snap/%s", root, name), rc;

    if (n < 0 || (size_t)n >= sizeof(path))
        return ht_cmd_explain(root, -ENAMETOOLONG);
    rc = ht_follow_state(path, &kept);
    if (rc < 0)
        return rc;
    return kept.lineage == lineage ? 0 : refuse(root, another);
}

/* The receiver is a copy of this kept step. */
static int begin_from_kept(struct sender *s, const struct ht_cmd_options *o, struct ht_follow_head *h)
{
    int dir = ht_kept_open(s->root, o->from), rc;

    if (dir < 0)
        return dir;
    rc = check_kept(s->root, o->from, s->lineage);
    if (rc == 0) {
        rc = ht_kept_step(dir, &h->step);
        if (rc < 0)
            ht_error("%s: %s has no number of a step: %s", s->root, o->from, strerror(-rc));
    }
    if (rc == 0)
        rc = o->digest ? ht_digest_parse(o->digest, &h->sum)
                       : ht_kept_digest(s->root, o->from, dir, ht_follow_stopped, &h->sum);
    h->proof = HT_FOLLOW_DIGEST;
    if (rc == 0)
        rc = ht_follow_files_begin(&s->files, s->root, dir);
    close(dir);
    return rc;
}

/* The receiver has this step, or all that are readable are sent; it leaves out those that it has. */
static int begin_from_logged(struct sender *s, uint64_t since, const struct ht_follow_state *now,
                             struct ht_follow_head *h)
{
    struct logged o;
    int rc = ht_follow_files_begin(&s->files, s->root, -1);

    h->step = since ? since : now->first ? now->first - 1 : 0;
    if (rc == 0 && !since && !now->first) {
        char *text;
        rc = ht_cmd_attribute(s->root, "durable_step", false, &text);
        if (rc < 0)
            return rc;
        h->step = strtoull(text, NULL, 10);
        free(text);
    }
    if (rc < 0 || !since)
        return rc;
    rc = open_logged(s->root, since, &o);
    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;           /* the lineage may prove it */
    rc = put_step(s, &o, since, false, &h->sum); /* nothing is written yet */
    h->proof = o.l.lineage == s->lineage ? HT_FOLLOW_SUM : HT_FOLLOW_NO_PROOF;
    close_logged(&o);
    return rc;
}

static int begin(struct sender *s, const struct ht_cmd_options *o)
{
    struct ht_follow_head h = {.proof = HT_FOLLOW_NO_PROOF};
    struct ht_follow_state now;
    int rc = check_words(s->root);

    if (rc == 0)
        rc = ht_follow_state(s->root, &now);
    if (rc < 0)
        return rc;
    s->lineage = h.lineage = now.lineage;
    rc = o->from ? begin_from_kept(s, o, &h) : begin_from_logged(s, o->since, &now, &h);
    if (rc < 0)
        return rc;
    ht_follow_writer_free(&s->w);
    s->next = h.step + 1;
    s->sink.began_ns = ht_now_ns();
    return ht_follow_writer_begin(&s->w, &h, ht_sink_put, &s->sink);
}

/* -------------------------------------------------------------------- loop */

static void show(const struct sender *s, uint64_t newest)
{
    if (s->terminal)
        fprintf(stderr, "\r\033[Ksent step %llu, %llu behind, %s", (unsigned long long)(s->next - 1),
                (unsigned long long)(newest - (s->next - 1)), ht_size_text(s->sink.written));
}

/* Steps that the receiver needs are gone. */
static int behind(const struct sender *s, const struct ht_follow_state *now)
{
    ht_error("%s: step %llu is not readable any more, the oldest one is %llu: send a newer kept step, and follow from "
             "that one; a larger redo_keep leaves more time",
             s->root, (unsigned long long)s->next, (unsigned long long)now->first);
    return -ESTALE;
}

static void pause_shortly(void)
{
    const struct timespec pause = {0, POLL_NS};

    (void)nanosleep(&pause, NULL);
}

static int send_next(struct sender *s, const struct ht_follow_state *now)
{
    struct logged o;
    struct ht_hash128 sum;
    int rc = open_logged(s->root, s->next, &o);

    if (rc == -ENOENT) { /* the next look says why */
        pause_shortly();
        return 0;
    }
    if (rc < 0)
        return rc;
    rc = o.l.lineage == s->lineage ? put_step(s, &o, now->last, true, &sum) : refuse(s->root, another);
    close_logged(&o);
    if (rc == 0) {
        s->next++;
        s->sent++;
        show(s, now->last);
    }
    return rc;
}

/* 1: there is nothing to send now. */
static int look(struct sender *s)
{
    struct ht_follow_state now;
    int rc = ht_follow_state(s->root, &now);

    if (rc < 0)
        return rc;
    if (now.lineage != s->lineage)
        return refuse(s->root, another);
    if (now.last && s->next < now.first)
        return behind(s, &now);
    return now.last && s->next <= now.last ? send_next(s, &now) : 1;
}

static int run(struct sender *s, bool once)
{
    int rc = 0;

    while (rc >= 0 && !ht_follow_stopped()) {
        rc = look(s);
        if (rc == 1 && once)
            break;
        if (rc == 1)
            pause_shortly();
    }
    return rc < 0 ? rc : ht_follow_put_end(&s->w);
}

int ht_follow_send(const char *path, const struct ht_cmd_options *o)
{
    struct sender s = {.sink = {.rate = o->rate, .stopped = ht_follow_stopped}, .terminal = isatty(STDERR_FILENO)};
    char *root = realpath(path, NULL);
    int rc;

    if (!root)
        return ht_cmd_explain(path, -errno), HT_CMD_FAILED;
    s.root = root;
    s.block = malloc(HT_FOLLOW_BLOCK_BYTES_MAX);
    (void)fcntl(STDOUT_FILENO, F_SETPIPE_SZ, PIPE_BYTES); /* if it is one */
    rc = s.block ? ht_cmd_check_mount(root) : ht_cmd_explain(path, -ENOMEM);
    if (rc == 0)
        rc = begin(&s, o);
    if (rc == 0)
        rc = run(&s, o->once);
    if (s.terminal && s.sent)
        fputc('\n', stderr);
    if (rc == 0)
        ht_info("%s: sent %llu %s, up to step %llu, %s", path, (unsigned long long)s.sent, ht_plural(s.sent, "step"),
                (unsigned long long)(s.next - 1), ht_size_text(s.sink.written));
    else if (s.sink.error)
        ht_sink_explain(s.sink.error, "follower (hitrainctl follow --receive)", "its copy goes on from its last step");
    ht_follow_writer_free(&s.w);
    ht_follow_files_free(&s.files);
    free(s.block);
    free(root);
    return rc == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
