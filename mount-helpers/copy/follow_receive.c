/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow_receive.c - the receiver of `hitrainctl follow`: computes each step of a stream in a copy of the model. A step
 * and the place in the stream, an attribute of the root, are in one commit. An abort takes back a step that did
 * not end. A feeder reads the stream on while a step is committed.
 */
#include "mount-helpers/copy/follow.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "mount-helpers/copy/feeder.h"
#include "mount-helpers/copy/kept_base.h"
#include "tiering/base/json.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum { AT_TEXT_MAX = 256, PIPE_BYTES = 1 << 20 };
#define SNAPSHOT "hitrain-follow"

/* Where the copy is: the step that it has, and how that is known. files: the step of its other files; 0: the copy's. */
struct place {
    uint64_t step, lineage, files;
    enum ht_follow_proof proof;
    struct ht_hash128 sum;
};

struct receiver {
    const char *path, *root; /* as given; resolved */
    int dir, ctl;
    struct ht_follow_reader r;
    struct place at;
    uint64_t step;   /* the root's own */
    int to;          /* the gradient or the file that blocks go to, or -1 */
    bool apply;      /* the step of the stream is a new one for this copy */
    bool open;       /* changes are not committed yet */
    bool ahead;      /* the attribute is that of a step that was not committed */
    bool late;       /* the copy has the step, but not its other files */
    bool missed;     /* files of an older step were left out: later ones are not complete */
    uint64_t params; /* of the step */
    uint64_t received, bytes, from, newest;
    bool json, terminal, ended;
    struct ht_follow_file file; /* that is being written */
    struct ht_feeder *feeder;
};

/* ----------------------------------------------------------------- commands */

/* One line, and its answer. */
static int command(struct receiver *q, const char *line, size_t len)
{
    char answer[1024];
    int err = write(q->ctl, line, len) == (ssize_t)len ? 0 : errno;
    ssize_t n = read(q->ctl, answer, sizeof(answer) - 1);

    if (!err)
        return 0;
    answer[n > 0 ? n : 0] = '\0';
    answer[strcspn(answer, "\n")] = '\0';
    ht_error("%s: step %llu: %s", q->path, (unsigned long long)q->r.step, answer[0] != '\0' ? answer : strerror(err));
    return -err;
}

static int simple(struct receiver *q, const char *verb)
{
    char line[64];
    int n = snprintf(line, sizeof(line), "%s\n", verb);

    return command(q, line, (size_t)n);
}

static int decide(struct receiver *q, const struct ht_follow_param *p)
{
    char line[2 * HT_FOLLOW_NUMBERS_BYTES + HT_STREAM_PATH_BYTES_MAX + 16];
    int n = snprintf(line, sizeof(line), "decide ");

    for (size_t i = 0; i < HT_FOLLOW_NUMBERS_BYTES; i++)
        n += snprintf(line + n, sizeof(line) - (size_t)n, "%02x", p->numbers[i]);
    n += snprintf(line + n, sizeof(line) - (size_t)n, " %s\n", p->path);
    return command(q, line, (size_t)n);
}

static int number_of_root(struct receiver *q, const char *word, uint64_t *out)
{
    char name[64], text[32];
    ssize_t n;

    snprintf(name, sizeof(name), HT_XATTR_PREFIX "%s", word);
    n = fgetxattr(q->dir, name, text, sizeof(text) - 1);
    if (n < 0 && errno == ENODATA)
        ht_error("%s is no model root", q->path);
    if (n < 0)
        return errno == ENODATA ? -ENODATA : ht_cmd_explain(q->path, -errno);
    text[n] = '\0';
    *out = strtoull(text, NULL, 10);
    return 0;
}

/* -------------------------------------------------------------------- place */

static void put_text(const struct place *at, char text[AT_TEXT_MAX])
{
    char sum[HT_DIGEST_TEXT_MAX];

    snprintf(text, AT_TEXT_MAX, "step=%" PRIu64 " lineage=%" PRIu64 " %s=%s files=%" PRIu64, at->step, at->lineage,
             at->proof == HT_FOLLOW_SUM ? "sum" : "digest", ht_digest_text(&at->sum, sum), at->files);
}

static int set_place(struct receiver *q)
{
    char text[AT_TEXT_MAX];

    put_text(&q->at, text);
    return fsetxattr(q->dir, HT_FOLLOW_ATTRIBUTE, text, strlen(text), 0) < 0 ? ht_cmd_explain(q->path, -errno) : 0;
}

/* The 32 digits after KEY=. */
static bool sum_of(const char *text, const char *key, struct ht_hash128 *out)
{
    char digits[HT_DIGEST_TEXT_MAX];
    const char *p = strstr(text, key);

    if (!p)
        return false;
    snprintf(digits, sizeof(digits), "%s", p + strlen(key));
    return ht_digest_parse(digits, out) == 0;
}

/* False: it followed no model, or took steps of its own since. */
static bool get_place(struct receiver *q)
{
    char text[AT_TEXT_MAX];
    ssize_t n = fgetxattr(q->dir, HT_FOLLOW_ATTRIBUTE, text, sizeof(text) - 1);

    q->at = (struct place){.step = q->step};
    q->ahead = false;
    if (n <= 0)
        return false;
    text[n] = '\0';
    q->at.lineage = ht_follow_number(text, "lineage");
    q->at.files = ht_follow_number(text, "files");
    q->at.proof = sum_of(text, " sum=", &q->at.sum) ? HT_FOLLOW_SUM
        : sum_of(text, " digest=", &q->at.sum)      ? HT_FOLLOW_DIGEST
                                                    : HT_FOLLOW_NO_PROOF;
    q->ahead = ht_follow_number(text, "step") == q->step + 1;
    if (ht_follow_number(text, "step") != q->step)
        q->at.proof = HT_FOLLOW_NO_PROOF;
    return q->at.proof != HT_FOLLOW_NO_PROOF;
}

/* -------------------------------------------------------------------- begin */

static int refuse(const struct receiver *q, const char *why)
{
    ht_error("%s: the stream does not continue step %llu of this copy: %s. Nothing has changed; `hitrainctl send` and "
             "`receive` make a new copy",
             q->path, (unsigned long long)q->step, why);
    return -ESTALE;
}

static int open_root(struct receiver *q)
{
    uint64_t open_step;
    int rc;

    q->dir = open(q->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (q->dir < 0)
        return ht_cmd_explain(q->path, -errno);
    if (flock(q->dir, LOCK_EX | LOCK_NB) < 0) {
        ht_error("%s: another program receives steps here", q->path);
        return -EBUSY;
    }
    rc = number_of_root(q, "step_open", &open_step);
    if (rc < 0)
        return rc;
    q->ctl = openat(q->dir, HT_CTL_DIR "/ctl", O_RDWR | O_CLOEXEC);
    if (q->ctl < 0)
        return ht_cmd_explain(q->path, -errno);
    rc = number_of_root(q, "step", &q->step);
    if (rc == 0 && (get_place(q) || q->ahead)) { /* a receiver that ended in the middle may have left an open step */
        rc = simple(q, "abort");
        if (rc == 0)
            (void)get_place(q);
        return rc;
    }
    if (rc == 0 && open_step) {
        ht_error("%s: a step is open: commit or abort it first", q->path);
        rc = -EBUSY;
    }
    return rc;
}

/* The digest of the present step, which is kept for as long as it is read. */
static int own_digest(struct receiver *q, struct ht_hash128 *out)
{
    bool left = faccessat(q->dir, HT_CTL_DIR "/snap/" SNAPSHOT, F_OK, 0) == 0; /* by a receiver that was killed */
    int rc = left ? simple(q, "forget " SNAPSHOT) : 0, dir;

    if (rc == 0)
        rc = simple(q, "snapshot " SNAPSHOT);
    if (rc < 0)
        return rc;
    dir = ht_kept_open(q->root, SNAPSHOT);
    rc = dir < 0 ? dir : ht_kept_digest(q->root, SNAPSHOT, dir, ht_follow_stopped, out);
    if (dir >= 0)
        close(dir);
    return simple(q, "forget " SNAPSHOT) < 0 && rc == 0 ? -EIO : rc;
}

/* A copy that has not followed yet. */
static int begin_new(struct receiver *q)
{
    const struct ht_follow_head *h = &q->r.head;
    struct ht_hash128 own;
    int rc;

    if (h->proof != HT_FOLLOW_DIGEST || h->step != q->step)
        return refuse(q,
                      h->proof == HT_FOLLOW_DIGEST ? "it continues another step"
                                                   : "the sender must name the kept step that was copied, with --from");
    rc = own_digest(q, &own);
    if (rc < 0)
        return rc;
    if (memcmp(own.byte, h->sum.byte, sizeof(own.byte)) != 0)
        return refuse(q, "it continues a step with another digest");
    q->at = (struct place){.step = q->step, .lineage = h->lineage, .proof = HT_FOLLOW_DIGEST, .sum = own};
    rc = set_place(q);
    return rc < 0 ? rc : simple(q, "commit");
}

/* Of the same history, or the same gradients led to this step. Else a step of the stream shows it. */
static int begin_again(struct receiver *q)
{
    const struct ht_follow_head *h = &q->r.head;

    if (h->step > q->step)
        return refuse(q, "steps are missing in between");
    if (h->step < q->step) /* a step of the stream is this one, and has its sum */
        return 0;
    if (h->proof && h->proof == q->at.proof) {
        if (memcmp(h->sum.byte, q->at.sum.byte, sizeof(h->sum.byte)) == 0)
            return 0;
    } else if (h->lineage == q->at.lineage) {
        return 0;
    }
    return refuse(q, "it continues another step of this number, or does not prove that it is the same");
}

static int begin(struct receiver *q)
{
    int rc = open_root(q);

    if (rc < 0)
        return rc;
    rc = ht_feeder_begin(ht_follow_stopped, &q->feeder);
    if (rc < 0)
        return ht_cmd_explain(q->path, rc);
    rc = ht_follow_reader_begin(&q->r, ht_feeder_get, q->feeder);
    if (rc < 0) {
        ht_error("%s: nothing is received: %s", q->path, q->r.in.why);
        return rc;
    }
    q->from = q->step;
    return q->at.proof ? begin_again(q) : begin_new(q);
}

/* ------------------------------------------------------------------- content */

static int write_block(struct receiver *q, const struct ht_follow_block *b)
{
    size_t done = 0;

    while (done < b->len) {
        ssize_t n = pwrite(q->to, b->data + done, b->len - done, (off_t)(b->at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            ht_error("%s/%s: %s", q->path, q->r.path, strerror(n < 0 ? errno : EIO));
            return n < 0 ? -errno : -EIO;
        }
        done += (size_t)n;
    }
    q->bytes += b->len;
    return 0;
}

/* The close of a gradient hands it over. A file gets its mode and time. */
static int end_content(struct receiver *q)
{
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = q->file.mtime_ns / 1000000000}};
    int fd = q->to, rc = 0;

    if (fd < 0)
        return 0;
    q->to = -1;
    t[1].tv_nsec = q->file.mtime_ns % 1000000000;
    if (t[1].tv_nsec < 0) {
        t[1].tv_nsec += 1000000000;
        t[1].tv_sec--;
    }
    if (q->file.path && (fchmod(fd, q->file.mode) < 0 || futimens(fd, t) < 0))
        rc = -errno;
    if (close(fd) < 0 && rc == 0)
        rc = -errno;
    q->file.path = NULL;
    if (rc < 0)
        ht_error("%s: step %llu: the last gradient or file: %s", q->path, (unsigned long long)q->r.step, strerror(-rc));
    return rc;
}

/* The last name of a path. A file that may not be written becomes writable; end_content sets the mode. */
static int open_last(int dir, const char *name, bool make)
{
    const int flags = (make ? O_RDWR | O_CREAT : O_WRONLY) | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    struct stat st;
    int fd = openat(dir, name, flags, 0600);

    if (fd >= 0 || errno != EACCES || !make)
        return fd;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) || fchmodat(dir, name, 0600, 0) < 0) {
        errno = EACCES;
        return -1;
    }
    return openat(dir, name, flags, 0600);
}

/*
 * Opens a path name by name, and follows no symlink. With make it makes directories and the file. A descriptor, or a
 * negative errno.
 */
static int open_below(int root, const char *path, bool make)
{
    char name[HT_NAME_BYTES_MAX + 1];
    int fd = openat(root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), next;

    for (const char *p = path; fd >= 0; p += strcspn(p, "/") + 1) {
        size_t len = strcspn(p, "/");
        bool last = p[len] == '\0';
        memcpy(name, p, len);
        name[len] = '\0';
        if (make && !last && mkdirat(fd, name, 0777) < 0 && errno != EEXIST)
            next = -1;
        else
            next = last ? open_last(fd, name, make) : openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        int err = errno;
        close(fd);
        errno = err;
        fd = next;
        if (last)
            break;
    }
    return fd < 0 ? -errno : fd;
}

static int take_param(struct receiver *q, const struct ht_follow_param *p)
{
    int grads, rc = p->section ? 0 : end_content(q);

    if (rc == 0)
        rc = decide(q, p);
    if (rc < 0 || p->section)
        return rc;
    q->open = true;
    grads = openat(q->dir, HT_CTL_DIR "/grad", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (grads < 0)
        return ht_cmd_explain(q->path, -errno);
    q->to = open_below(grads, p->path, false);
    close(grads);
    if (q->to >= 0)
        return 0;
    ht_error("%s/" HT_CTL_DIR "/grad/%s: %s", q->path, p->path, strerror(-q->to));
    return q->to;
}

static int take_file(struct receiver *q, const struct ht_follow_file *f)
{
    struct stat st;
    int rc = end_content(q);

    if (rc < 0)
        return rc;
    q->open = true;
    q->to = rc = open_below(q->dir, f->path, true);
    if (rc >= 0)
        rc = fstat(q->to, &st) < 0 ? -errno : S_ISREG(st.st_mode) ? 0 : -EINVAL;
    if (rc == 0 && (ftruncate(q->to, 0) < 0 || ftruncate(q->to, (off_t)f->size) < 0))
        rc = -errno;
    if (rc < 0)
        ht_error("%s/%s: %s", q->path, f->path, strerror(-rc));
    else
        q->file = *f;
    return rc;
}

static int take_words(struct receiver *q, const char *text)
{
    q->open = true;
    if (fsetxattr(q->dir, HT_XATTR_PREFIX "optimizer", text, strlen(text), 0) == 0)
        return 0;
    ht_error("%s: cannot set the settings %.200s: %s", q->path, text, strerror(errno));
    return -errno;
}

/* --------------------------------------------------------------------- step */

static void report_step(struct receiver *q)
{
    struct ht_json j;

    if (q->terminal)
        fprintf(stderr, "\r\033[Kstep %llu, %llu behind", (unsigned long long)q->step,
                (unsigned long long)(q->newest > q->step ? q->newest - q->step : 0));
    if (!q->json)
        return;
    ht_json_init_lines(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", q->path);
    ht_json_u64(&j, "step", q->step);
    ht_json_u64(&j, "newest", q->newest);
    ht_json_u64(&j, "files", q->at.files);
    ht_json_end(&j);
    (void)fflush(stdout);
}

/* A step that was skipped has no updates: its number alone says that it was. */
static int end_step(struct receiver *q)
{
    char text[32];
    uint64_t open = 1;
    int n = snprintf(text, sizeof(text), "%llu", (unsigned long long)q->r.step);
    int rc = q->params ? number_of_root(q, "step_open", &open) : 0;

    if (rc == 0 && !open) {
        ht_error("%s: step %s of the stream has no gradient", q->path, text);
        rc = -EPROTO;
    }
    if (rc == 0)
        rc = set_place(q);
    if (rc == 0 && !q->params && fsetxattr(q->dir, HT_XATTR_PREFIX "step", text, (size_t)n, 0) < 0)
        rc = ht_cmd_explain(q->path, -errno);
    if (rc == 0)
        rc = simple(q, "commit");
    if (rc < 0)
        return rc;
    q->open = false;
    rc = number_of_root(q, "step", &q->step);
    if (rc == 0 && q->step != q->r.step) {
        ht_error("%s: this copy is at step %llu, and the stream at step %llu: another program changes the copy",
                 q->path, (unsigned long long)q->step, (unsigned long long)q->r.step);
        rc = -ESTALE;
    }
    return rc;
}

/* The step of the copy, once more. The sum has the names of parameters, too: one history may rename them. */
static bool is_another(const struct receiver *q, const struct ht_follow_done *d)
{
    if (q->r.step != q->step)
        return false;
    return q->at.proof == HT_FOLLOW_SUM ? memcmp(d->sum.byte, q->at.sum.byte, sizeof(d->sum.byte)) != 0
                                        : q->r.head.lineage != q->at.lineage;
}

/* Files and settings of the step that the copy has: it came without them. */
static int end_late(struct receiver *q, bool files)
{
    int rc = 0;

    if (files) {
        q->at.files = q->r.step;
        rc = set_place(q);
    } else if (!q->open) {
        return 0;
    }
    if (rc == 0)
        rc = simple(q, files ? "commit" : "abort");
    if (rc < 0)
        return rc;
    q->open = false;
    if (files)
        report_step(q);
    return 0;
}

static int take_done(struct receiver *q, const struct ht_follow_done *d)
{
    int rc = end_content(q);

    if (rc < 0)
        return rc;
    if (!q->apply && is_another(q, d))
        return refuse(q, "its step of this number is another one");
    if (!q->apply)
        return q->late ? end_late(q, d->files) : 0;
    q->at = (struct place){q->r.step, q->r.head.lineage, d->files && !q->missed ? q->r.step : q->at.files,
                           HT_FOLLOW_SUM, d->sum};
    q->open = true;
    rc = end_step(q);
    if (rc == 0) {
        q->received++;
        report_step(q);
    }
    return rc;
}

/* Is a file, or are the settings, to be written? */
static bool wants_files(struct receiver *q)
{
    q->missed |= q->r.step < q->step && q->r.step > q->at.files;
    return q->apply || q->late;
}

static int take(struct receiver *q, const struct ht_follow_record *x)
{
    switch (x->type) {
    case HT_FOLLOW_STEP:
        q->apply = x->step.step > q->step;
        q->late = x->step.step == q->step && q->at.files != q->step;
        q->params = x->step.params;
        q->newest = x->step.newest;
        return 0;
    case HT_FOLLOW_PARAM:
        return q->apply ? take_param(q, &x->param) : 0;
    case HT_FOLLOW_WORDS:
        return wants_files(q) ? take_words(q, x->words.text) : 0;
    case HT_FOLLOW_FILE:
        return wants_files(q) ? take_file(q, &x->file) : 0;
    case HT_FOLLOW_BLOCK:
    case HT_FOLLOW_SPARSE:
        return q->apply ? write_block(q, &x->block) : 0;
    case HT_FOLLOW_PART:
        return wants_files(q) ? write_block(q, &x->block) : 0;
    case HT_FOLLOW_DONE:
        return take_done(q, &x->done);
    default:
        q->ended = true;
        return 0;
    }
}

/* The open step goes; the copy stays at its last whole one. */
static void take_back(struct receiver *q)
{
    if (q->to >= 0)
        close(q->to);
    q->to = -1;
    if (q->open && simple(q, "abort") < 0)
        ht_error("%s: what came of step %llu is still there: abort it", q->path, (unsigned long long)q->r.step);
}

static int run(struct receiver *q)
{
    struct ht_follow_record x;
    int rc = 0;

    while (rc == 0 && !q->ended) {
        rc = ht_follow_next(&q->r, &x);
        if (rc < 0 && !ht_follow_stopped())
            ht_error("%s: %s", q->path, q->r.in.why);
        if (rc == 0)
            rc = take(q, &x);
    }
    if (rc < 0)
        take_back(q);
    return rc;
}

int ht_follow_receive(const char *path, const struct ht_cmd_options *o)
{
    struct receiver q = {
        .path = path, .dir = -1, .ctl = -1, .to = -1, .json = o->json, .terminal = isatty(STDERR_FILENO)};
    char *root = realpath(path, NULL);
    int rc;

    if (!root)
        return ht_cmd_explain(path, -errno), HT_CMD_FAILED;
    q.root = root;
    (void)fcntl(STDIN_FILENO, F_SETPIPE_SZ, PIPE_BYTES); /* if it is one */
    rc = ht_cmd_check_mount(root);
    if (rc == 0)
        rc = begin(&q);
    bool begun = rc == 0;
    if (begun)
        rc = run(&q);
    if (q.terminal && q.received)
        fputc('\n', stderr);
    if (begun)
        ht_info("%s: received %llu %s, from step %llu to step %llu", path, (unsigned long long)q.received,
                ht_plural(q.received, "step"), (unsigned long long)q.from, (unsigned long long)q.step);
    ht_feeder_end(q.feeder);
    ht_follow_reader_free(&q.r);
    if (q.ctl >= 0)
        close(q.ctl);
    if (q.dir >= 0)
        close(q.dir);
    free(root);
    return rc == 0 && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
