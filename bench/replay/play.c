/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/replay/play.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { TRANSFER = 1 << 20, DEPTH = 8, PATH_BYTES = 4096, ANSWER_BYTES = 4096, STATS_BYTES = 1 << 16, DEPTH_MAX = 16 };
enum { NAPS = 32, NAP_US = 200, SPIN_NS = 100000 };
/* AdamW's state of an f32 parameter is twice its bytes, of a bf16 one five times. */
enum { F32_STATE = 2, BF16_STATE = 5 };

struct player {
    const struct replay_trace *t;
    const struct play_config *c;
    struct play_result result;
    uint8_t *buf; /* DEPTH transfers */
    aio_context_t aio;
    bool model;
    int ctl; /* the mount's; -1: the folder is not the root of a store */
    uint64_t oversleep_ns, random;
    uint64_t *until_us; /* with names_next_uses: of each entry, computing until its tensor is read next; 0: never */
    struct named {
        uint64_t until_us, at_us;    /* of its last access in this step */
    } * named;                       /* by tensor */
    uint64_t step_us, step_began_ns; /* computing of this step so far, and when it began */
    double slower;                   /* the step before took so many times its computing */
};

static int complain(const char *form, ...)
{
    char text[PATH_BYTES];
    int error = errno;
    va_list args;

    va_start(args, form);
    vsnprintf(text, sizeof(text), form, args);
    va_end(args);
    fprintf(stderr, "replay: %s: %s\n", text, strerror(error));
    return error ? -error : -EIO;
}

static bool is_param(const struct player *p, uint32_t tensor)
{
    return p->t->tensor[tensor].state_bytes;
}

/* kind: "" for the content, else a folder of .hitrain. */
static void path_of(const struct player *p, uint32_t tensor, const char *kind, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "%s/%s%st%u", p->c->folder, is_param(p, tensor) ? "model/" : "", kind, tensor);
}

/* --------------------------------------------------------------- transfers */

static int submit(struct player *p, struct iocb *iocb, unsigned i, int fd, bool writing, uint64_t at, uint64_t bytes)
{
    *iocb = (struct iocb){
        .aio_data = i,
        .aio_lio_opcode = writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
        .aio_fildes = (uint32_t)fd,
        .aio_buf = (uintptr_t)p->buf + (uint64_t)i * TRANSFER,
        .aio_nbytes = bytes,
        .aio_offset = (int64_t)at,
    };
    if (syscall(SYS_io_submit, p->aio, 1L, &iocb) != 1)
        return complain("io_submit");
    return 0;
}

/* Returns the number of a transfer that has ended. */
static int await(struct player *p, const struct iocb *iocb, unsigned *out_i)
{
    struct io_event event;

    if (syscall(SYS_io_getevents, p->aio, 1L, 1L, &event, NULL) != 1)
        return complain("io_getevents");
    *out_i = (unsigned)event.data;
    if (event.res == (int64_t)iocb[event.data].aio_nbytes)
        return 0;
    errno = event.res < 0 ? (int)-event.res : EIO;
    return complain("a transfer");
}

/* [at, end) in multiples of a block. */
static int transfer(struct player *p, int fd, bool writing, uint64_t at, uint64_t end)
{
    struct iocb iocb[DEPTH];
    unsigned free_list[DEPTH], free_count = DEPTH, i;
    int rc = 0;

    for (i = 0; i < DEPTH; i++)
        free_list[i] = i;
    while (!rc && (at < end || free_count < DEPTH)) {
        while (!rc && at < end && free_count > 0) {
            uint64_t n = ht_min_u64(end - at, TRANSFER - at % TRANSFER);
            i = free_list[--free_count];
            rc = submit(p, &iocb[i], i, fd, writing, at, n);
            at += n;
        }
        if (!rc)
            rc = await(p, iocb, &i);
        if (!rc)
            free_list[free_count++] = i;
    }
    return rc;
}

static int open_tensor(const struct player *p, uint32_t tensor, const char *kind, int flags)
{
    char path[PATH_BYTES];

    path_of(p, tensor, kind, path);
    int fd = open(path, flags | O_DIRECT | O_CLOEXEC, 0600);
    return fd < 0 ? complain("%s", path) : fd;
}

/* Opened and closed for each access, as swapping does. */
static int access_file(struct player *p, const struct replay_entry *e, const char *kind, bool writing)
{
    int fd = open_tensor(p, e->tensor, kind, writing ? O_WRONLY : O_RDONLY);

    if (fd < 0)
        return fd;
    int rc = transfer(p, fd, writing, e->offset & ~(uint64_t)4095, ht_round_up(e->offset + e->bytes, 4096));
    if (close(fd) && !rc)
        rc = complain("close of %s", p->t->tensor[e->tensor].name);
    return rc;
}

/* ------------------------------------------------------------------ making */

static int set(const char *path, const char *name, const char *value)
{
    if (setxattr(path, name, value, strlen(value), 0))
        return complain("%s: %s=%s", path, name, value);
    return 0;
}

static int make_tensor(struct player *p, uint32_t tensor)
{
    const struct replay_tensor *n = &p->t->tensor[tensor];
    char path[PATH_BYTES];
    int fd = open_tensor(p, tensor, "", O_WRONLY | O_CREAT | O_TRUNC), rc = 0;

    if (fd < 0)
        return fd;
    path_of(p, tensor, "", path);
    if (is_param(p, tensor))
        rc = set(path, "user.hitrain.dtype", n->state_bytes > (F32_STATE + 1) * n->bytes ? "bf16" : "f32");
    if (!rc)
        rc = transfer(p, fd, true, 0, ht_round_up(n->bytes, 4096));
    if (!rc && fsync(fd))
        rc = complain("%s", path);
    close(fd);
    return rc;
}

/* The player's model has the state that AdamW makes, whatever the trace says. */
static void note_states(const struct player *p)
{
    for (uint32_t i = 0; i < p->t->tensors; i++) {
        const struct replay_tensor *n = &p->t->tensor[i];
        uint64_t times = n->state_bytes / n->bytes;
        if (!is_param(p, i) || times == F32_STATE || times == BF16_STATE)
            continue;
        fprintf(stderr,
                "replay: %s, and maybe others: the state is played as AdamW's, %d (f32) or %d (bf16) times the "
                "parameter\n",
                n->name, F32_STATE, BF16_STATE);
        return;
    }
}

static int begin(struct player *p, const struct replay_trace *t, const struct play_config *c)
{
    *p = (struct player){.t = t, .c = c, .ctl = -1, .random = (c->seed + 1) * 0x9e3779b97f4a7c15ull};
    for (uint32_t i = 0; i < t->tensors; i++)
        p->model |= is_param(p, i);
    p->buf = mmap(NULL, DEPTH * TRANSFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p->buf == MAP_FAILED)
        return complain("memory");
    /* Small numbers in f32 and in bf16; as gradients, too. */
    for (size_t i = 0; i < DEPTH * TRANSFER / sizeof(uint32_t); i++)
        ((uint32_t *)(void *)p->buf)[i] = 0x3c003c00u + (uint32_t)(i % 64) * 0x10001u;
    if (syscall(SYS_io_setup, (long)DEPTH, &p->aio))
        return complain("io_setup");
    note_states(p);
    return 0;
}

static void end(struct player *p)
{
    if (p->aio)
        syscall(SYS_io_destroy, p->aio);
    if (p->buf != MAP_FAILED)
        munmap(p->buf, DEPTH * TRANSFER);
    if (p->ctl >= 0)
        close(p->ctl);
    free(p->until_us);
    free(p->named);
}

int play_make(const struct replay_trace *t, const struct play_config *c)
{
    struct player p;
    char model[PATH_BYTES];
    int rc = begin(&p, t, c);

    snprintf(model, sizeof(model), "%s/model", c->folder);
    if (!rc && p.model && mkdir(model, 0700))
        rc = complain("%s", model);
    for (uint32_t i = 0; !rc && i < t->tensors; i++)
        rc = make_tensor(&p, i);
    if (!rc && p.model)
        rc = set(model, "user.hitrain.optimizer", "adamw lr=1e-4 durable_every=1000000 partial=1");
    end(&p);
    return rc;
}

/* ----------------------------------------------------------------- playing */

/* One line to a control file, and its answer. */
static int command(int fd, const char *line)
{
    char answer[ANSWER_BYTES];

    if (write(fd, line, strlen(line)) != (ssize_t)strlen(line))
        return complain("%s", line);
    ssize_t n = read(fd, answer, sizeof(answer) - 1);
    if (n < 0)
        return complain("%s", line);
    answer[n] = '\0';
    if (strncmp(answer, "ok", 2) == 0)
        return 0;
    fprintf(stderr, "replay: %s: %s", line, answer);
    return -EIO;
}

/*
 * A boundary of the model, which is not durable at a step. Without a model a commit makes the folder durable, and a
 * step is only a mark.
 */
static int boundary(const struct player *p, bool commit)
{
    char path[PATH_BYTES];
    int fd, rc = 0;

    if (!p->model && !commit)
        return 0;
    snprintf(path, sizeof(path), "%s%s", p->c->folder, p->model ? "/model/.hitrain/ctl" : "");
    fd = open(path, (p->model ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (fd < 0)
        return complain("%s", path);
    if (p->model)
        rc = command(fd, commit ? "commit\n" : "step\n");
    else if (fsync(fd))
        rc = complain("%s", path);
    close(fd);
    return rc;
}

/* Hints are for the store: without one nothing takes them. */
static int hint(const struct player *p, const struct replay_entry *e)
{
    char line[64];

    snprintf(line, sizeof(line), "%s %st%u\n", e->op == REPLAY_PREFETCH ? "prefetch" : "evict",
             is_param(p, e->tensor) ? "model/" : "", e->tensor);
    return p->ctl < 0 ? 0 : command(p->ctl, line);
}

static bool has_hints(const struct replay_trace *t)
{
    for (uint64_t i = 0; i < t->entries; i++)
        if (t->entry[i].op == REPLAY_PREFETCH || t->entry[i].op == REPLAY_EVICT)
            return true;
    return false;
}

/* --------------------------------------------------------------- next uses */

/* What a program knows of itself: after each access, how much it computes until it reads the tensor again. */
static int find_next_uses(struct player *p)
{
    uint64_t *at_us = calloc(p->t->tensors + 1, sizeof(*at_us)), now_us = 0;

    p->until_us = calloc(p->t->entries + 1, sizeof(*p->until_us));
    p->named = calloc(p->t->tensors + 1, sizeof(*p->named));
    if (!at_us || !p->until_us || !p->named) {
        free(at_us);
        return complain("memory");
    }
    for (uint64_t i = p->t->entries; i-- > 0;) {
        const struct replay_entry *e = &p->t->entry[i];
        now_us += e->op == REPLAY_COMPUTE ? e->offset : 0;
        if (e->op != REPLAY_READ && e->op != REPLAY_WRITE && e->op != REPLAY_GRADIENT)
            continue;
        p->until_us[i] = at_us[e->tensor] ? now_us + 1 - at_us[e->tensor] : 0;
        if (e->op == REPLAY_READ)
            at_us[e->tensor] = now_us + 1;
    }
    free(at_us);
    return 0;
}

/* A program takes the time from the step before. */
static int name_next_use(const struct player *p, uint32_t tensor)
{
    const struct named *n = &p->named[tensor];
    uint64_t passed = p->step_us - n->at_us;
    char path[PATH_BYTES], value[32];

    if (n->until_us <= passed || p->slower <= 0)
        return 0;
    path_of(p, tensor, "", path);
    snprintf(value, sizeof(value), "%.3f", 1e-6 * (double)(n->until_us - passed) * p->slower + 1e-3);
    return set(path, "user.hitrain.next_use", value);
}

/* Updates that a step waits for end the hints of their parameters: they come again. */
static int name_at_boundary(struct player *p)
{
    uint64_t now = ht_now_ns();
    int rc = 0;

    for (uint32_t i = 0; !rc && i < p->t->tensors; i++)
        rc = is_param(p, i) ? name_next_use(p, i) : 0;
    memset(p->named, 0, p->t->tensors * sizeof(*p->named));
    p->slower = p->step_us ? (double)(now - p->step_began_ns) / 1000 / (double)p->step_us : 0;
    p->step_us = 0;
    p->step_began_ns = now;
    return rc;
}

static int name_next_uses(struct player *p, uint64_t entry)
{
    const struct replay_entry *e = &p->t->entry[entry];

    if (!p->c->names_next_uses)
        return 0;
    if (e->op == REPLAY_COMPUTE)
        p->step_us += e->offset;
    if (e->op == REPLAY_STEP || e->op == REPLAY_COMMIT)
        return name_at_boundary(p);
    if (e->op != REPLAY_READ && e->op != REPLAY_WRITE && e->op != REPLAY_GRADIENT)
        return 0;
    p->named[e->tensor] = (struct named){p->until_us[entry], p->step_us};
    return name_next_use(p, e->tensor);
}

static void sleep_ns(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

    while (nanosleep(&t, &t) && errno == EINTR)
        ;
}

/* How much longer than asked a sleep takes here: the median. */
static uint64_t calibrate(void)
{
    uint64_t over[NAPS];

    for (unsigned i = 0; i < NAPS; i++) {
        uint64_t began = ht_now_ns();
        sleep_ns(NAP_US * 1000);
        uint64_t late = ht_now_ns() - began - NAP_US * 1000;
        unsigned k = i;
        for (; k && over[k - 1] > late; k--)
            over[k] = over[k - 1];
        over[k] = late;
    }
    return over[NAPS / 2];
}

/* Sleeps for most of the time, and waits for the rest without sleep. */
static void compute(struct player *p, uint64_t us)
{
    p->random ^= p->random << 13;
    p->random ^= p->random >> 7;
    p->random ^= p->random << 17;
    double part = 1 + p->c->noise * (2 * ((double)(p->random >> 11) / (double)(UINT64_C(1) << 53)) - 1);
    uint64_t ns = (uint64_t)((double)us * 1000 * part), end = ht_now_ns() + ns;

    p->result.compute_ns += ns;
    if (ns > p->oversleep_ns + SPIN_NS)
        sleep_ns(ns - p->oversleep_ns - SPIN_NS / 2);
    while (ht_now_ns() < end)
        ;
}

static int play_entry(struct player *p, const struct replay_entry *e)
{
    uint64_t bytes = e->bytes;

    switch ((enum replay_op)e->op) {
    case REPLAY_COMPUTE:
        compute(p, e->offset);
        return 0;
    case REPLAY_READ:
        p->result.asked_bytes += bytes;
        return access_file(p, e, "", false);
    case REPLAY_WRITE:
        p->result.given_bytes += bytes;
        return access_file(p, e, "", true);
    case REPLAY_GRADIENT:
        p->result.given_bytes += bytes;
        return access_file(p, e, ".hitrain/grad/", true);
    case REPLAY_PREFETCH:
    case REPLAY_EVICT:
        return hint(p, e);
    case REPLAY_STEP:
    case REPLAY_COMMIT:
        return boundary(p, e->op == REPLAY_COMMIT);
    case REPLAY_OPS:
        break;
    }
    return -EINVAL;
}

/* ----------------------------------------------------------------- figures */

static uint64_t figure(const char *stats, const char *name)
{
    char key[64];
    int len = snprintf(key, sizeof(key), "\n%s=", name);
    const char *at = strstr(stats, key);

    return at ? strtoull(at + len, NULL, 10) : 0;
}

/* The store's counters, where the folder is on one: its root has them. */
static bool read_figures(const struct player *p, struct play_result *out)
{
    static char stats[STATS_BYTES];
    char path[PATH_BYTES];
    ssize_t n = -1;

    snprintf(path, sizeof(path), "%s", p->c->folder);
    for (unsigned i = 0; i < DEPTH_MAX && n < 0; i++) {
        n = getxattr(path, "user.hitrain.stats", stats + 1, sizeof(stats) - 2);
        strncat(path, "/..", sizeof(path) - strlen(path) - 1);
    }
    if (n < 0)
        return false;
    stats[0] = '\n';
    stats[1 + n] = '\0';
    out->device_read_bytes = figure(stats, "device_read_bytes");
    out->device_written_bytes = figure(stats, "device_written_bytes");
    out->hits = figure(stats, "hits");
    out->misses = figure(stats, "misses");
    return true;
}

static void subtract_figures(struct play_result *r, const struct play_result *before)
{
    r->device_read_bytes -= before->device_read_bytes;
    r->device_written_bytes -= before->device_written_bytes;
    r->hits -= before->hits;
    r->misses -= before->misses;
}

static int play_all(struct player *p)
{
    uint64_t steps = replay_trace_steps(p->t), warm = p->c->warm_steps, seen = 0, began;
    struct play_result before = {0};
    int rc = 0;

    if (warm >= steps)
        warm = steps ? steps - 1 : 0;
    (void)read_figures(p, &before);
    began = ht_now_ns();
    for (uint64_t i = 0; !rc && i < p->t->entries; i++) {
        rc = play_entry(p, &p->t->entry[i]);
        if (!rc)
            rc = name_next_uses(p, i);
        if (!replay_ends_step(p->t, i) || ++seen != warm)
            continue;
        p->result = (struct play_result){0};
        (void)read_figures(p, &before);
        began = ht_now_ns();
    }
    p->result.time_ns = ht_now_ns() - began;
    p->result.steps = ht_max_u64(steps - warm, 1);
    p->result.stall_ns = p->result.time_ns - ht_min_u64(p->result.compute_ns, p->result.time_ns);
    p->result.counted = read_figures(p, &p->result);
    if (p->result.counted)
        subtract_figures(&p->result, &before);
    return rc;
}

int play_trace(const struct replay_trace *t, const struct play_config *c, struct play_result *out)
{
    char path[PATH_BYTES];
    struct player p;
    int rc = begin(&p, t, c);

    snprintf(path, sizeof(path), "%s/.hitrain/ctl", c->folder);
    if (!rc) {
        p.ctl = open(path, O_RDWR | O_CLOEXEC);
        if (p.ctl < 0 && has_hints(t))
            fprintf(stderr, "replay: %s is not the root of a mounted store: hints have no effect\n", c->folder);
        p.oversleep_ns = calibrate();
        p.step_began_ns = ht_now_ns();
        rc = c->names_next_uses ? find_next_uses(&p) : 0;
        if (!rc)
            rc = play_all(&p);
    }
    end(&p);
    if (!rc)
        *out = p.result;
    return rc;
}
