/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remote.c - see remote.h. Only the thread of the client talks to the program and reads its memory; callers touch the
 * list of gets, under the lock. The handle and the thread share the client: the last one frees it, because the kernel
 * may hold the thread while it starts a program.
 */
#include "tiering/remote/remote.h"
#include "tiering/base/lock.h"
#include "tiering/remote/program.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MS 1000000ull
#define SECOND (1000 * MS)

enum {
    LEFT_ALONE_MAX = 2,
    RESTART_S_MAX = 60,
    PROBE_S = 5,
    AGAIN_MS_MIN = 50,
    AGAIN_MS_MAX = 2000,
    LOOK_MS = 20, /* at a killed process that stands in the way of a new one */
    END_MS = 1000,
    FREE_MS = 2000,
    LEASES = 1 << 20,
    SEGMENTS_OF_LEASE = 1 << 15,
    SEGMENT_BYTES_MAX = 32 << 20,
    KEY_BYTES = 40,
};
#define PROBE_KEY "vault/0000000000000001"
enum { HEADER_BYTES = 64, UUID_AT = 24, UUID_BYTES = 16 };

enum lack { LACKS_NOTHING, IS_GONE, IS_ANOTHER, IS_OLDER, NO_PROGRAM };
enum get_state { QUEUED, SENT, COPIED, DONE };

struct slot {
    bool is_taken;             /* until the answer, or the end of the program */
    struct ht_remote_get *get; /* NULL: nobody waits any more, or it is a probe */
    uint32_t number;
    uint64_t sent_ns;
};

struct ht_remote {
    struct ht_remote_config config;
    char url[HT_REMOTE_URL_BYTES];
    char *path; /* of the program */
    uint8_t uuid[UUID_BYTES];
    int wake; /* eventfd: something changed for the thread */
    struct ht_mutex lock;
    pthread_cond_t changed;
    HT_GUARDED_BY(HT_LOCK_REMOTE) struct {
        unsigned users; /* the handle and the thread */
        bool has_thread, is_ending, has_ended;
        bool is_looked_at, is_to_look; /* the vault showed that it is the right one; it is to show that without a get */
        enum lack lack;                /* as far as anybody knows */
        int start_error;               /* of the last start */
        struct ht_list gets;           /* begun and not ended, oldest first */
        struct slot slots[HT_REMOTE_SLOTS_MAX + 1]; /* the one after those of the configuration is for probes */
        uint64_t answered_ns, not_before_ns, restart_ns, probe_at_ns;
        struct ht_remote_state state;
    };
    /* The thread's own. */
    struct ht_remote_program program;
    uint32_t number;
    pid_t left_alone[LEFT_ALONE_MAX];
};

HT_MUTEX_OF(remote_lock, struct ht_remote, lock, HT_LOCK_REMOTE)

/* ---- silence ---- */

static void set_silent(struct ht_remote *r, bool silent) HT_REQUIRES(HT_LOCK_REMOTE)
{
    if (r->state.is_silent == silent)
        return;
    r->state.is_silent = silent;
    r->probe_at_ns = ht_now_ns();
    if (r->config.changed)
        r->config.changed(r->config.ctx, silent);
}

static uint64_t timeout_ns(const struct ht_remote *r)
{
    return r->config.timeout_ms * MS;
}

static void finish(struct ht_remote *r, struct ht_remote_get *g, int rc) HT_REQUIRES(HT_LOCK_REMOTE)
{
    g->state = DONE;
    g->rc = rc;
    r->state.gets += rc == 0;
    r->state.get_bytes += rc == 0 ? g->bytes : 0;
    r->state.timeouts += rc == -ETIMEDOUT;
    r->state.failures += rc && rc != -ETIMEDOUT && rc != -EINTR;
    pthread_cond_broadcast(&r->changed);
}

static void finish_queued(struct ht_remote *r, int rc) HT_REQUIRES(HT_LOCK_REMOTE)
{
    ht_list_for_each_entry(g, &r->gets, struct ht_remote_get, link)
        if (g->state == QUEUED)
            finish(r, g, rc);
}

/* The slot stays taken until the program answers or ends. */
static void give_up(struct ht_remote *r, struct ht_remote_get *g, int rc) HT_REQUIRES(HT_LOCK_REMOTE)
{
    if (g->state == SENT)
        r->slots[g->slot].get = NULL;
    finish(r, g, rc);
    if (rc == -ETIMEDOUT)
        set_silent(r, true);
}

/* ---- the thread: is it the right vault? ---- */

static void report(struct ht_remote *r, enum lack lack) HT_REQUIRES(HT_LOCK_REMOTE)
{
    static const char *const why[] = {
        [IS_GONE] = "there is no vault",
        [IS_ANOTHER] = "another vault is there",
        [IS_OLDER] = "it lacks segments of the store: is it an older copy?",
        [NO_PROGRAM] = "its program does not start",
    };

    if (lack && lack != r->lack && r->config.missing)
        r->config.missing(r->config.ctx, r->url, why[lack]);
    r->lack = lack;
}

/* The answer to a probe. The program may write to this memory at any time, which does no harm. */
static void look(struct ht_remote *r, const struct ht_remote_answer *a) HT_REQUIRES(HT_LOCK_REMOTE)
{
    const uint8_t *header = r->program.memory + (size_t)r->config.slots * r->config.slot_bytes;
    bool is_another =
        a->result == HT_REMOTE_OK && (a->bytes < HEADER_BYTES || memcmp(header + UUID_AT, r->uuid, UUID_BYTES) != 0);

    if (!r->config.uuid)
        return;
    if (!r->state.is_silent)
        r->probe_at_ns = a->result == HT_REMOTE_AGAIN ? ht_now_ns() + AGAIN_MS_MAX * MS : 0;
    if (a->result == HT_REMOTE_AGAIN)
        return;
    bool is_seen = a->result == HT_REMOTE_OK || a->result == HT_REMOTE_MISSING;
    r->is_looked_at = is_seen && !is_another;
    r->is_to_look = false;
    if (is_another || a->result == HT_REMOTE_MISSING)
        report(r, is_another ? IS_ANOTHER : IS_GONE);
    else if (a->result == HT_REMOTE_OK && r->lack != IS_OLDER)
        report(r, LACKS_NOTHING);
    if (!r->is_looked_at)
        finish_queued(r, is_another ? -ENXIO : -EIO);
}

/* A segment is missing. It is asked for once more, after a look at the vault. */
static void doubt(struct ht_remote *r, struct ht_remote_get *g) HT_REQUIRES(HT_LOCK_REMOTE)
{
    if (r->config.uuid && !g->is_doubted) {
        g->is_doubted = true;
        g->state = QUEUED;
        r->is_looked_at = false;
        r->probe_at_ns = 0;
        return;
    }
    if (r->lack != IS_GONE)
        report(r, IS_OLDER);
    finish(r, g, r->lack == IS_GONE ? -ENXIO : -ENOENT);
}

/* ---- the thread: its program ---- */

static void say_why(struct ht_remote *r, const char *text) HT_REQUIRES(HT_LOCK_REMOTE)
{
    snprintf(r->state.why, sizeof(r->state.why), "%.*s", HT_REMOTE_WHY_BYTES - 1, text);
}

static bool left_alone_has_room(struct ht_remote *r, unsigned *out_free)
{
    bool has_room = false;

    for (unsigned i = 0; i < LEFT_ALONE_MAX; i++) {
        if (r->left_alone[i] && ht_remote_program_reap(r->left_alone[i]))
            r->left_alone[i] = 0;
        if (!r->left_alone[i]) {
            *out_free = i;
            has_room = true;
        }
    }
    return has_room;
}

/* Requests under way are sent again, and so is the probe. */
static void end_program(struct ht_remote *r, const char *why) HT_REQUIRES(HT_LOCK_REMOTE)
{
    unsigned i = 0;

    say_why(r, why);
    r->probe_at_ns = 0;
    kill(r->program.pid, SIGKILL);
    if (left_alone_has_room(r, &i)) /* start_program saw to it */
        r->left_alone[i] = r->program.pid;
    ht_remote_program_leave(&r->program);
    for (i = 0; i <= r->config.slots; i++) {
        if (r->slots[i].get)
            r->slots[i].get->state = QUEUED;
        r->slots[i] = (struct slot){0};
    }
}

/* Also when none of the two places for killed processes is free: later. */
static void start_program(struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    struct ht_remote_program made;
    unsigned i;

    if (!left_alone_has_room(r, &i)) {
        say_why(r, "two of its programs were killed, and the kernel does not let them end");
        return;
    }
    r->not_before_ns = now + r->restart_ns;
    r->restart_ns = ht_min_u64(2 * r->restart_ns, RESTART_S_MAX * SECOND);
    ht_mutex_unlock(remote_lock(r));
    int rc = ht_remote_program_start(&made, r->path, r->url, r->config.slots + 1, r->config.slot_bytes);
    ht_mutex_lock(remote_lock(r));
    r->start_error = rc;
    if (!rc) {
        r->program = made;
        r->state.starts++;
        r->is_looked_at = !r->config.uuid;
        return;
    }
    char why[HT_REMOTE_WHY_BYTES];
    snprintf(why, sizeof(why), "%s: %s", r->path, strerror(-rc));
    say_why(r, why);
    r->is_to_look = false;
    report(r, NO_PROGRAM);
    finish_queued(r, -EIO);
}

/* ---- the thread: requests and answers ---- */

static int ask(struct ht_remote *r, uint32_t slot, struct ht_remote_get *g, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    uint64_t end_ns = (g ? g->begun_ns : now) + timeout_ns(r), left_ms = end_ns > now ? (end_ns - now) / MS + 1 : 1;
    char key[KEY_BYTES] = PROBE_KEY;

    if (g)
        snprintf(key, sizeof(key), "seg/%08x/%04x", g->lease, g->n);
    r->slots[slot] = (struct slot){.is_taken = true, .get = g, .number = ++r->number, .sent_ns = now};
    if (g) {
        g->state = SENT;
        g->slot = slot;
    }
    return ht_remote_program_ask(&r->program, r->number, slot, left_ms, key, g ? g->offset : 0,
                                 g ? g->bytes : HEADER_BYTES);
}

static bool slot_is_free(const struct ht_remote *r, uint32_t *out_slot) HT_REQUIRES(HT_LOCK_REMOTE)
{
    for (uint32_t i = 0; i < r->config.slots; i++)
        if (!r->slots[i].is_taken) {
            *out_slot = i;
            return true;
        }
    return false;
}

static bool has_queued(const struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    ht_list_for_each_entry(g, &r->gets, const struct ht_remote_get, link)
        if (g->state == QUEUED)
            return true;
    return false;
}

static bool has_to_look(const struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    return r->state.is_silent || (!r->is_looked_at && (r->is_to_look || has_queued(r)));
}

/* 0, or an error that ends the program. Those that somebody waits for go first. */
static int ask_what_is_due(struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    uint32_t slot;
    int rc = 0;

    for (int ahead = 0; ahead < 2 && r->is_looked_at; ahead++)
        ht_list_for_each_entry(g, &r->gets, struct ht_remote_get, link) {
            if (rc || !slot_is_free(r, &slot))
                break;
            if (g->state == QUEUED && g->is_ahead == (ahead == 1) && g->not_before_ns <= now)
                rc = ask(r, slot, g, now);
        }
    if (!rc && has_to_look(r) && r->probe_at_ns <= now && !r->slots[r->config.slots].is_taken) {
        r->probe_at_ns = now + PROBE_S * SECOND;
        rc = ask(r, r->config.slots, NULL, now);
    }
    return rc;
}

/* The caller's memory is filled without the lock: its owner waits for the end of this. */
static void copy(struct ht_remote *r, uint32_t slot, struct ht_remote_get *g) HT_REQUIRES(HT_LOCK_REMOTE)
{
    g->state = COPIED;
    ht_mutex_unlock(remote_lock(r));
    memcpy(g->to, r->program.memory + (size_t)slot * r->config.slot_bytes, g->bytes);
    ht_mutex_lock(remote_lock(r));
    finish(r, g, 0);
}

static void take_again(struct ht_remote_get *g, uint64_t now)
{
    uint64_t wait = ht_min_u64(AGAIN_MS_MAX * MS, AGAIN_MS_MIN * MS + (now - g->begun_ns));

    g->state = QUEUED;
    g->not_before_ns = now + wait;
}

static void take(struct ht_remote *r, uint32_t slot, const struct ht_remote_answer *a, uint64_t now)
    HT_REQUIRES(HT_LOCK_REMOTE)
{
    struct slot was = r->slots[slot];
    struct ht_remote_get *g = was.get;

    r->slots[slot] = (struct slot){0};
    if (a->result != HT_REMOTE_OK)
        say_why(r, a->text);
    if (g && a->result == HT_REMOTE_AGAIN) {
        take_again(g, now);
        return;
    }
    if (a->result != HT_REMOTE_AGAIN && now - was.sent_ns < timeout_ns(r)) {
        r->answered_ns = now;
        r->restart_ns = SECOND;
        set_silent(r, false);
    }
    if (!g) {
        look(r, a);
        return;
    }
    if (a->result == HT_REMOTE_MISSING)
        doubt(r, g);
    else if (a->result != HT_REMOTE_OK)
        finish(r, g, -EIO);
    else if (a->bytes < g->bytes)
        finish(r, g, -ENODATA);
    else
        copy(r, slot, g);
}

/* 0, or an error that ends the program. */
static int take_answers(struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    struct ht_remote_answer a;
    int rc = 0;

    while (!rc && !(rc = ht_remote_program_answer(&r->program, &a))) {
        uint32_t slot = 0;
        if (a.result == HT_REMOTE_NO_VAULT && r->config.uuid)
            a.result = HT_REMOTE_MISSING;
        while (slot <= r->config.slots && !(r->slots[slot].is_taken && r->slots[slot].number == a.number))
            slot++;
        const struct ht_remote_get *g = slot <= r->config.slots ? r->slots[slot].get : NULL;
        if (slot > r->config.slots || (g && a.result == HT_REMOTE_OK && a.bytes > g->bytes))
            rc = -EPROTO;
        else
            take(r, slot, &a, now);
    }
    return rc == -EAGAIN ? 0 : rc;
}

static bool has_overdue_slot(const struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    for (uint32_t i = 0; i <= r->config.slots; i++)
        if (r->slots[i].is_taken && r->slots[i].sent_ns + 2 * timeout_ns(r) <= now)
            return true;
    return false;
}

static void serve(struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    int rc = take_answers(r, now);

    rc = rc ? rc : ask_what_is_due(r, now);
    if (rc)
        end_program(r, rc == -EPROTO ? "its program broke the protocol, and was killed" : "its program ended");
    else if (has_overdue_slot(r, now))
        end_program(r, "its program did not answer, and was killed");
}

/* ---- the thread: its rounds ---- */

static bool is_needed(const struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    return has_queued(r) || r->is_to_look || (r->state.is_silent && r->probe_at_ns <= ht_now_ns());
}

/* When something happens that neither an answer nor a caller brings. */
static uint64_t next_ns(const struct ht_remote *r, uint64_t now) HT_REQUIRES(HT_LOCK_REMOTE)
{
    uint64_t at = UINT64_MAX;

    ht_list_for_each_entry(g, &r->gets, const struct ht_remote_get, link)
        if (g->state != DONE) {
            at = ht_min_u64(at, g->begun_ns + timeout_ns(r));
            if (g->state == QUEUED && g->not_before_ns > now)
                at = ht_min_u64(at, g->not_before_ns);
        }
    for (uint32_t i = 0; i <= r->config.slots; i++)
        if (r->slots[i].is_taken)
            at = ht_min_u64(at, r->slots[i].sent_ns + 2 * timeout_ns(r));
    if (has_to_look(r) && !r->slots[r->config.slots].is_taken && r->probe_at_ns > now)
        at = ht_min_u64(at, r->probe_at_ns);
    if (!r->program.pid && is_needed(r))
        at = ht_min_u64(at, ht_max_u64(r->not_before_ns, now + LOOK_MS * MS));
    return r->left_alone[0] || r->left_alone[1] ? ht_min_u64(at, now + SECOND) : at;
}

static void wait_for_more(struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    struct pollfd fds[] = {{.fd = r->wake, .events = POLLIN}, {.fd = r->program.socket, .events = POLLIN}};
    uint64_t now = ht_now_ns(), at = next_ns(r, now), count;
    struct timespec left = {0};

    if (at > now)
        left = (struct timespec){(time_t)((at - now) / SECOND), (long)((at - now) % SECOND)};
    ht_mutex_unlock(remote_lock(r));
    int ready = ppoll(fds, r->program.pid ? 2 : 1, at == UINT64_MAX ? NULL : &left, NULL);
    if (ready > 0 && fds[0].revents && read(r->wake, &count, sizeof(count)) < 0)
        count = 0; /* another round looks again */
    ht_mutex_lock(remote_lock(r));
}

static void unref(struct ht_remote *r) HT_EXCLUDES(HT_LOCK_REMOTE)
{
    if (ht_locked(remote_lock(r), --r->users))
        return;
    close(r->wake);
    free(r->path);
    pthread_cond_destroy(&r->changed);
    ht_mutex_destroy(&r->lock);
    free(r);
}

/* The program ends with its socket; one that does not is killed. */
static void end_all(struct ht_remote *r)
{
    pid_t pid = r->program.pid;

    if (!pid)
        return;
    ht_remote_program_leave(&r->program);
    for (unsigned ms = 0; !ht_remote_program_reap(pid); ms += LOOK_MS) {
        if (ms >= END_MS)
            kill(pid, SIGKILL);
        if (ms >= END_MS + END_MS / 2)
            break; /* the kernel keeps it */
        usleep(LOOK_MS * 1000);
    }
}

static void *remote_main(void *arg)
{
    struct ht_remote *r = arg;

    ht_mutex_lock(remote_lock(r));
    while (!r->is_ending) {
        uint64_t now = ht_now_ns();
        unsigned unused;
        left_alone_has_room(r, &unused);
        if (r->program.pid)
            serve(r, now);
        if (!r->program.pid && r->not_before_ns <= now && is_needed(r)) {
            start_program(r, now);
            if (r->program.pid)
                continue;
        }
        ht_list_for_each_entry(g, &r->gets, struct ht_remote_get, link)
            if ((g->state == QUEUED || g->state == SENT) && g->begun_ns + timeout_ns(r) <= now)
                give_up(r, g, -ETIMEDOUT);
        wait_for_more(r);
    }
    ht_mutex_unlock(remote_lock(r));
    end_all(r);
    ht_mutex_lock(remote_lock(r));
    r->has_ended = true;
    pthread_cond_broadcast(&r->changed);
    ht_mutex_unlock(remote_lock(r));
    unref(r);
    return NULL;
}

/* ---- callers ---- */

static void wake_thread(struct ht_remote *r)
{
    uint64_t one = 1;

    while (write(r->wake, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

static int start_thread(struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    pthread_t thread;

    if (r->has_thread)
        return 0;
    if (pthread_create(&thread, NULL, remote_main, r))
        return -ENOMEM;
    pthread_detach(thread);
    r->has_thread = true;
    r->users++;
    return 0;
}

static bool ahead_is_full(const struct ht_remote *r) HT_REQUIRES(HT_LOCK_REMOTE)
{
    unsigned busy = 0;

    ht_list_for_each_entry(g, &r->gets, const struct ht_remote_get, link)
        busy += g->state != DONE;
    return busy >= (r->config.slots + 1) / 2;
}

static bool is_range(const struct ht_remote *r, const struct ht_remote_get *g)
{
    return g->lease < LEASES && g->n < SEGMENTS_OF_LEASE && g->bytes > 0 && g->bytes <= r->config.slot_bytes &&
        g->offset <= SEGMENT_BYTES_MAX - g->bytes;
}

int ht_remote_begin(struct ht_remote *r, struct ht_remote_get *g)
{
    uint64_t now = ht_now_ns();
    int rc = 0;

    if (!is_range(r, g))
        return -EINVAL;
    ht_mutex_lock(remote_lock(r));
    if (r->state.is_silent)
        rc = -ETIMEDOUT;
    else if (r->start_error && now < r->not_before_ns)
        rc = -EIO;
    else if (g->is_ahead && ahead_is_full(r))
        rc = -EAGAIN;
    else
        rc = start_thread(r);
    if (!rc) {
        g->rc = 0;
        g->state = QUEUED;
        g->is_doubted = false;
        g->slot = 0;
        g->begun_ns = now;
        g->not_before_ns = 0;
        ht_list_add_tail(&r->gets, &g->link);
    }
    ht_mutex_unlock(remote_lock(r));
    if (!rc)
        wake_thread(r);
    return rc;
}

int ht_remote_end(struct ht_remote *r, struct ht_remote_get *g, ht_remote_stop *stop, void *ctx)
{
    ht_mutex_lock(remote_lock(r));
    uint64_t end_ns = g->begun_ns + timeout_ns(r);
    while (g->state != DONE) {
        uint64_t now = ht_now_ns();
        if (g->state == COPIED)
            ht_cond_wait(&r->changed, remote_lock(r));
        else if (stop && stop(ctx))
            give_up(r, g, -EINTR);
        else if (now < end_ns)
            ht_cond_wait_until(&r->changed, remote_lock(r), stop ? ht_min_u64(end_ns, now + LOOK_MS * MS) : end_ns);
        else {
            give_up(r, g, -ETIMEDOUT);
            wake_thread(r); /* for the probe */
        }
    }
    ht_list_del(&g->link);
    int rc = g->rc;
    ht_mutex_unlock(remote_lock(r));
    return rc;
}

void ht_remote_look(struct ht_remote *r)
{
    ht_mutex_lock(remote_lock(r));
    r->is_to_look = start_thread(r) == 0;
    ht_mutex_unlock(remote_lock(r));
    wake_thread(r);
}

void ht_remote_state(struct ht_remote *r, struct ht_remote_state *out_state)
{
    ht_mutex_lock(remote_lock(r));
    *out_state = r->state;
    out_state->answer_age_ns = r->answered_ns ? ht_now_ns() - r->answered_ns : UINT64_MAX;
    ht_mutex_unlock(remote_lock(r));
}

/* ---- life ---- */

static int find_program(const struct ht_remote_config *config, const char *url, char **out_path)
{
    int scheme = (int)strcspn(url, ":");
    char here[HT_REMOTE_URL_BYTES];
    const char *folder = config->programs;

    if (!folder) {
        ssize_t len = readlink("/proc/self/exe", here, sizeof(here) - 1);
        if (len < 0)
            return -errno;
        here[len] = 0;
        *strrchr(here, '/') = 0;
        folder = here;
    }
    return asprintf(out_path, "%s/hitrain-vault-%.*s", folder, scheme, url) < 0 ? -ENOMEM : 0;
}

int ht_remote_new(const struct ht_remote_config *config, struct ht_remote **out_remote)
{
    struct ht_remote *r = calloc(1, sizeof(*r));

    HT_UNSHARED(HT_LOCK_REMOTE);
    if (!r)
        return -ENOMEM;
    r->config = *config;
    r->config.timeout_ms = config->timeout_ms ? config->timeout_ms : HT_REMOTE_TIMEOUT_MS;
    r->config.slots = config->slots ? config->slots : HT_REMOTE_SLOTS;
    r->config.slot_bytes = config->slot_bytes ? config->slot_bytes : HT_REMOTE_SLOT_BYTES;
    r->wake = -1;
    if (config->uuid)
        r->config.uuid = memcpy(r->uuid, config->uuid, sizeof(r->uuid));
    int rc = r->config.slots > HT_REMOTE_SLOTS_MAX || r->config.slot_bytes > SEGMENT_BYTES_MAX ? -EINVAL : 0;
    rc = rc ? rc : ht_remote_url(config->url, r->url);
    rc = rc ? rc : find_program(config, r->url, &r->path);
    if (!rc && (r->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        rc = -errno;
    if (rc) {
        free(r->path);
        free(r);
        return rc;
    }
    ht_mutex_init(&r->lock, HT_LOCK_REMOTE);
    ht_cond_init(&r->changed);
    r->users = 1;
    ht_list_init(&r->gets);
    r->restart_ns = SECOND;
    *out_remote = r;
    return 0;
}

void ht_remote_free(struct ht_remote *r)
{
    uint64_t end_ns = ht_now_ns() + FREE_MS * MS;

    if (!r)
        return;
    ht_mutex_lock(remote_lock(r));
    assert(ht_list_empty(&r->gets));
    r->is_ending = true;
    wake_thread(r);
    while (r->has_thread && !r->has_ended && ht_now_ns() < end_ns)
        ht_cond_wait_until(&r->changed, remote_lock(r), end_ns);
    ht_mutex_unlock(remote_lock(r));
    unref(r);
}
