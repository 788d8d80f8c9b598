/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client of a vault's program, with the real programs of the schemes file and test, and with this test's own
 * program, which breaks the protocol (hitrain-vault-hostile: the constructor at the end).
 */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "tests/support/suite.h"
#include "tiering/base/buf.h"
#include "tiering/remote/remote.h"

enum { SEGMENT = 40000, PATIENT_MS = 60000, IMPATIENT_MS = 300 };

static char folder[] = "/tmp/hitrain-remote-XXXXXX";
static _Atomic unsigned silences, answers_again;

static struct ht_remote *opened; /* by the test, which need not free it */

static void end_remote(void)
{
    ht_remote_free(opened);
    opened = NULL;
}

static void make_folder(void)
{
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void remove_folder(void)
{
    char command[80];

    end_remote();
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

static const char *in_folder(const char *name)
{
    char *path = test_alloc(256);

    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    FILE *f = fopen(in_folder(name), "w");

    ck_assert(f && fwrite(data, 1, bytes, f) == bytes);
    ck_assert_int_eq(fclose(f), 0);
}

static long number_in(const char *name)
{
    FILE *f = fopen(in_folder(name), "r");
    long number = -1;

    if (f) {
        if (fscanf(f, "%ld", &number) != 1)
            number = -1;
        fclose(f);
    }
    return number;
}

static uint8_t byte_of(uint32_t n, uint64_t offset)
{
    return (uint8_t)(n * 31 + offset * 7 + offset / 251);
}

static void write_segments(unsigned count)
{
    uint8_t *data = test_alloc(SEGMENT);
    char name[32];

    ck_assert_int_eq(mkdir(in_folder("seg"), 0700), 0);
    ck_assert_int_eq(mkdir(in_folder("seg/00000007"), 0700), 0);
    for (uint32_t n = 0; n < count; n++) {
        for (unsigned i = 0; i < SEGMENT; i++)
            data[i] = byte_of(n, i);
        snprintf(name, sizeof(name), "seg/00000007/%04x", n);
        write_file(name, data, SEGMENT);
    }
}

static void note_change(void *ctx, bool silent)
{
    if (silent)
        silences++;
    else
        answers_again++;
}

static struct ht_remote *open_remote(const char *scheme, const char *path, uint32_t timeout_ms, uint32_t slots)
{
    const char *programs = strcmp(scheme, "hostile") == 0 ? folder : "mount-helpers/vault";
    char url[256];
    struct ht_remote_config config = {
        .url = url, .programs = programs, .timeout_ms = timeout_ms, .slots = slots, .changed = note_change};

    snprintf(url, sizeof(url), "%s:%s", scheme, path);
    ck_assert_int_eq(ht_remote_new(&config, &opened), 0);
    return opened;
}

/* This program, under another name. */
static struct ht_remote *open_hostile(const char *kind, uint32_t timeout_ms, uint32_t slots)
{
    char self[256];
    ssize_t len = readlink("/proc/self/exe", self, sizeof(self) - 1);

    ck_assert_int_gt(len, 0);
    self[len] = 0;
    ck_assert_int_eq(symlink(self, in_folder("hitrain-vault-hostile")), 0);
    return open_remote("hostile", in_folder(kind), timeout_ms, slots);
}

static struct ht_remote_get range(uint32_t n, uint32_t offset, uint32_t bytes)
{
    return (struct ht_remote_get){.lease = 7, .n = n, .offset = offset, .bytes = bytes, .to = test_alloc(bytes)};
}

static int fetch(struct ht_remote *r, struct ht_remote_get *g)
{
    int rc = ht_remote_begin(r, g);

    return rc ? rc : ht_remote_end(r, g, NULL, NULL);
}

static void expect_bytes(const struct ht_remote_get *g)
{
    const uint8_t *data = g->to;

    for (uint32_t i = 0; i < g->bytes; i++)
        ck_assert_uint_eq(data[i], byte_of(g->n, g->offset + i));
}

static void expect_fetched(struct ht_remote *r, uint32_t n, uint32_t offset, uint32_t bytes)
{
    struct ht_remote_get g = range(n, offset, bytes);

    ck_assert_int_eq(fetch(r, &g), 0);
    expect_bytes(&g);
}

static struct ht_remote_state state_of(struct ht_remote *r)
{
    struct ht_remote_state s;

    ht_remote_state(r, &s);
    return s;
}

/* ---- the real programs ---- */

TEST(ranges_of_segments_come_into_memory)
{
    struct ht_remote *r = open_remote("file", folder, PATIENT_MS, 0);
    struct ht_remote_get gone = range(9, 0, 10), cut = range(1, SEGMENT - 10, 11);

    write_segments(2);
    ck_assert_uint_eq(state_of(r).starts, 0);
    ck_assert(state_of(r).answer_age_ns == UINT64_MAX);
    expect_fetched(r, 0, 0, SEGMENT);
    expect_fetched(r, 1, 4096, 1);
    expect_fetched(r, 1, SEGMENT - 10, 10);
    ck_assert_int_eq(fetch(r, &gone), -ENOENT);
    ck_assert_int_eq(fetch(r, &cut), -ENODATA);
    struct ht_remote_state s = state_of(r);
    ck_assert_uint_eq(s.starts, 1);
    ck_assert_uint_eq(s.gets, 3);
    ck_assert_uint_eq(s.get_bytes, SEGMENT + 11);
    ck_assert_uint_eq(s.failures, 2);
    ck_assert(!s.is_silent && s.answer_age_ns < UINT64_MAX);
}

TEST(a_range_outside_a_segment_is_refused)
{
    struct ht_remote *r = open_remote("file", folder, PATIENT_MS, 0);
    struct ht_remote_get bad[] = {
        {.lease = 1 << 20, .bytes = 1},      {.n = 1 << 15, .bytes = 1},       {.bytes = 0},
        {.bytes = HT_REMOTE_SLOT_BYTES + 1}, {.offset = 32 << 20, .bytes = 1}, {.offset = UINT32_MAX, .bytes = 2},
    };

    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(ht_remote_begin(r, &bad[i]), -EINVAL);
    ck_assert_uint_eq(state_of(r).starts, 0);
}

enum { THREADS = 4, ROUNDS = 8, HELD = 6 };

/* Each begins more than the slots that are left to it, before it ends the first one. */
static void *fetch_many(void *arg)
{
    struct ht_remote_get g[HELD];

    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < HELD; i++) {
            g[i] = range((i + round) % 3, i * 4096 + round, 3000);
            ck_assert_int_eq(ht_remote_begin(arg, &g[i]), 0);
        }
        for (uint32_t i = HELD; i-- > 0;) {
            ck_assert_int_eq(ht_remote_end(arg, &g[i], NULL, NULL), 0);
            expect_bytes(&g[i]);
        }
    }
    return NULL;
}

TEST(threads_that_hold_gets_never_wait_for_each_other)
{
    struct ht_remote *r = open_remote("file", folder, PATIENT_MS, 3);
    pthread_t thread[THREADS];

    write_segments(3);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, fetch_many, r), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    ck_assert_uint_eq(state_of(r).gets, THREADS * ROUNDS * HELD);
    ck_assert_uint_eq(silences, 0);
}

/* The client asks again after a late answer, "again", and an end before or after the deed. */
TEST(trouble_that_passes_is_no_error)
{
    struct ht_remote *r = open_remote("test", folder, PATIENT_MS, 0);
    const char *faults = "delay=0.2 get\n2*again get\nend-before get\nend-after get\n";

    write_segments(1);
    write_file("~faults", faults, strlen(faults));
    for (uint32_t i = 0; i < 4; i++)
        expect_fetched(r, 0, i, 1000);
    ck_assert_uint_eq(state_of(r).starts, 3);
    ck_assert_uint_eq(silences, 0);
}

TEST(an_error_of_the_engine_names_its_cause)
{
    struct ht_remote *r = open_remote("test", folder, PATIENT_MS, 0);
    const char *faults = "failed get\nno-vault get\nmissing get\n";
    struct ht_remote_get g = range(0, 0, 100);

    write_segments(1);
    write_file("~faults", faults, strlen(faults));
    ck_assert_int_eq(fetch(r, &g), -EIO);
    ck_assert_str_eq(state_of(r).why, "the script says failed");
    ck_assert_int_eq(fetch(r, &g), -EIO);
    ck_assert_int_eq(fetch(r, &g), -ENOENT);
    ck_assert_int_eq(fetch(r, &g), 0);
    ck_assert_uint_eq(silences, 0);
}

static char told[2 * HT_REMOTE_URL_BYTES];
static _Atomic unsigned told_count;

static void note_missing(void *ctx, const char *url, const char *why)
{
    snprintf(told, sizeof(told), "%s %s", url, why);
    told_count++;
}

static void write_header(uint8_t first)
{
    uint8_t header[100] = {0};

    header[24] = first;
    header[24 + 15] = 9;
    write_file("vault/0000000000000001", header, sizeof(header));
}

/* Of the vault that write_header(5) makes. */
static struct ht_remote *open_known(const char *scheme)
{
    static const uint8_t uuid[16] = {5, [15] = 9};
    char url[256];
    struct ht_remote_config config = {
        .url = url, .programs = "mount-helpers/vault", .timeout_ms = PATIENT_MS, .uuid = uuid, .missing = note_missing};

    snprintf(url, sizeof(url), "%s%s", scheme, folder);
    ck_assert_int_eq(ht_remote_new(&config, &opened), 0);
    return opened;
}

/* Each change is told once, and no get of another vault is sent. */
TEST(a_vault_that_is_gone_or_another_or_lacks_segments_is_told)
{
    struct ht_remote_get g = range(0, 0, 100), gone = range(9, 0, 100);

    write_segments(1);
    ck_assert_int_eq(mkdir(in_folder("vault"), 0700), 0);
    struct ht_remote *r = open_known("file://");
    ck_assert_int_eq(fetch(r, &gone), -ENXIO);
    ck_assert_int_eq(fetch(r, &gone), -ENXIO);
    ck_assert(told_count == 1 && strstr(told, folder) && strstr(told, "no vault"));
    write_header(6);
    ck_assert_int_eq(fetch(r, &gone), -ENXIO);
    ck_assert_int_eq(fetch(r, &g), -ENXIO);
    ck_assert_int_eq(fetch(r, &g), -ENXIO);
    ck_assert(told_count == 2 && strstr(told, "another"));
    write_header(5);
    ck_assert_int_eq(fetch(r, &g), 0);
    expect_bytes(&g);
    ck_assert_uint_eq(told_count, 2);
    ck_assert_int_eq(fetch(r, &gone), -ENOENT);
    ck_assert_int_eq(fetch(r, &gone), -ENOENT);
    ck_assert(told_count == 3 && strstr(told, "segments"));
    ck_assert_uint_eq(silences, 0);
}

/* No get goes to a vault that has not shown itself, whatever the looks end in. */
TEST(a_look_that_fails_opens_no_vault)
{
    const char *faults = "again get vault\nfailed get vault\nfailed get vault\n";
    struct ht_remote_get g = range(0, 0, 100);

    write_segments(1);
    write_file("~faults", faults, strlen(faults));
    ck_assert_int_eq(mkdir(in_folder("vault"), 0700), 0);
    write_header(6);
    struct ht_remote *r = open_known("test:");
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(fetch(r, &g), -EIO);
        ck_assert_str_eq(state_of(r).why, "the script says failed");
    }
    ck_assert_uint_eq(told_count, 0);
    ck_assert_int_eq(fetch(r, &g), -ENXIO);
    ck_assert(told_count == 1 && strstr(told, "another"));
    ck_assert_uint_eq(silences + state_of(r).gets, 0);
    ck_assert_uint_eq(state_of(r).starts, 1);
    write_header(5);
    ck_assert_int_eq(fetch(r, &g), 0);
    expect_bytes(&g);
}

static bool stops(void *ctx)
{
    _Atomic unsigned *asked = ctx;

    return ++*asked > 3;
}

TEST(a_wait_that_is_stopped_ends_at_once_and_is_no_silence)
{
    struct ht_remote *r = open_remote("test", folder, PATIENT_MS, 0);
    struct ht_remote_get g = range(0, 0, 100);
    _Atomic unsigned asked = 0;

    write_segments(1);
    write_file("~faults", "**lost-before any\n", 18);
    ck_assert_int_eq(ht_remote_begin(r, &g), 0);
    ck_assert_int_eq(ht_remote_end(r, &g, stops, &asked), -EINTR);
    ck_assert_uint_eq(asked, 4);
    ck_assert_uint_eq(silences + state_of(r).failures + state_of(r).timeouts, 0);
}

/* SIGSTOP of the whole program: it is killed, and the next one answers the probe. */
TEST(a_stopped_program_is_replaced)
{
    struct ht_remote *r = open_remote("test", folder, 2000, 0);
    struct ht_remote_get g = range(0, 0, 100);

    write_segments(1);
    write_file("~faults", "hang get seg\n", 13);
    ck_assert_int_eq(fetch(r, &g), -ETIMEDOUT);
    WAIT_FOR(!state_of(r).is_silent);
    ck_assert_uint_ge(state_of(r).starts, 2);
    ck_assert_uint_eq(silences, 1);
    ck_assert_uint_eq(answers_again, 1);
}

/* ---- a program that breaks the protocol ---- */

/* Each kind of the hostile program breaks it once, at its first start. */
static const char *const broken[] = {
    "wrong-number", "wrong-result", "result-exists", "flags",     "too-long",
    "short-packet", "long-packet",  "twice",         "end-first",
};

TEST_LOOP(a_program_that_breaks_the_protocol_is_replaced, (int)HT_ARRAY_SIZE(broken))
{
    struct ht_remote *r = open_hostile(broken[_i], PATIENT_MS, 2);

    expect_fetched(r, 0, 5, 1000);
    expect_fetched(r, 1, 6, 1000);
    WAIT_FOR(number_in("starts") == 2);
    expect_fetched(r, 2, 7, 1000);
    ck_assert_uint_eq(state_of(r).starts, 2);
    ck_assert_uint_eq(silences, 0);
}

TEST(silence_is_refused_at_once_and_killed)
{
    struct ht_remote *r = open_hostile("always-silent", IMPATIENT_MS, 2);
    struct ht_remote_get g = range(0, 0, 100), other = range(1, 0, 100);

    ck_assert_int_eq(ht_remote_begin(r, &g), 0);
    ck_assert_int_eq(ht_remote_end(r, &g, NULL, NULL), -ETIMEDOUT);
    ck_assert_int_eq(ht_remote_begin(r, &other), -ETIMEDOUT);
    ck_assert(state_of(r).is_silent);
    ck_assert_uint_eq(state_of(r).timeouts, 1);
    WAIT_FOR(number_in("starts") >= 2);
    ck_assert_uint_eq(silences, 1);
    ck_assert_uint_eq(answers_again, 0);
}

TEST(gets_that_wait_for_a_slot_end_at_their_deadline)
{
    struct ht_remote *r = open_hostile("always-silent", IMPATIENT_MS, 2);
    struct ht_remote_get g[8];

    for (uint32_t i = 0; i < 8; i++) {
        g[i] = range(i, 0, 100);
        ck_assert_int_eq(ht_remote_begin(r, &g[i]), 0);
    }
    for (uint32_t i = 0; i < 8; i++)
        ck_assert_int_eq(ht_remote_end(r, &g[i], NULL, NULL), -ETIMEDOUT);
}

TEST(the_first_answer_in_time_ends_the_silence)
{
    struct ht_remote *r = open_hostile("silent", IMPATIENT_MS, 2);
    struct ht_remote_get g = range(0, 0, 100);

    ck_assert_int_eq(fetch(r, &g), -ETIMEDOUT);
    WAIT_FOR(!state_of(r).is_silent);
    ck_assert_uint_ge(number_in("starts"), 2);
    ck_assert_uint_eq(answers_again, 1);
}

/* The program keeps the answer until the probe, which proves that the deadline has passed, and gives both. */
TEST(a_late_answer_touches_no_memory)
{
    struct ht_remote *r = open_hostile("late", IMPATIENT_MS, 1);
    struct ht_remote_get g = range(3, 11, 500);
    uint8_t *data = g.to;

    ck_assert_int_eq(fetch(r, &g), -ETIMEDOUT);
    WAIT_FOR(!state_of(r).is_silent);
    ck_assert(ht_is_zero(data, 500));
}

TEST(readahead_leaves_half_of_the_slots)
{
    struct ht_remote *r = open_hostile("always-silent", PATIENT_MS, 4);
    struct ht_remote_get g[4], *ahead = &g[2];

    for (uint32_t i = 0; i < 4; i++) {
        g[i] = range(i, 0, 100);
        g[i].is_ahead = i < 3;
    }
    ck_assert_int_eq(ht_remote_begin(r, &g[0]), 0);
    ck_assert_int_eq(ht_remote_begin(r, &g[1]), 0);
    ck_assert_int_eq(ht_remote_begin(r, ahead), -EAGAIN);
    ck_assert_int_eq(ht_remote_begin(r, &g[3]), 0);
    WAIT_FOR(number_in("asked") == 3);
    kill((pid_t)number_in("pid"), SIGUSR1); /* from now on it answers */
    ck_assert_int_eq(ht_remote_end(r, &g[3], NULL, NULL), 0);
    ck_assert_int_eq(ht_remote_end(r, &g[0], NULL, NULL), 0);
    ck_assert_int_eq(ht_remote_end(r, &g[1], NULL, NULL), 0);
    ck_assert_int_eq(ht_remote_begin(r, ahead), 0);
    ck_assert_int_eq(ht_remote_end(r, ahead, NULL, NULL), 0);
    expect_bytes(ahead);
}

TEST(a_program_that_ignores_the_end_of_its_socket_is_killed)
{
    struct ht_remote *r = open_hostile("stays", PATIENT_MS, 2);

    expect_fetched(r, 0, 0, 100);
    pid_t pid = (pid_t)number_in("pid");
    ck_assert_int_gt(pid, 0);
    end_remote();
    ck_assert(kill(pid, 0) < 0 && errno == ESRCH);
}

/* It has standard descriptors, the socket and the memory, which it cannot cut; its signals are as new. */
TEST(a_program_inherits_what_it_needs_and_no_more)
{
    int held = open("/dev/null", O_RDONLY); /* without O_CLOEXEC */
    sigset_t blocked;

    sigfillset(&blocked);
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
    signal(SIGPIPE, SIG_IGN);
    struct ht_remote *r = open_hostile("looks", PATIENT_MS, 2);
    expect_fetched(r, 0, 0, 100);
    ck_assert_int_eq(number_in("descriptors"), 5);
    ck_assert_int_eq(number_in("blocked"), 0);
    ck_assert_int_eq(number_in("pipe-ignored"), 0);
    ck_assert_int_eq(number_in("cut"), 0);
    close(held);
}

TEST(a_program_that_is_not_there_is_an_error)
{
    struct ht_remote *r = open_remote("nosuch", folder, PATIENT_MS, 2);
    struct ht_remote_get g = range(0, 0, 100);

    ck_assert_int_eq(fetch(r, &g), -EIO);
    ck_assert_str_eq(state_of(r).why, "mount-helpers/vault/hitrain-vault-nosuch: No such file or directory");
    ck_assert_uint_eq(silences, 0);
}

TEST(a_client_that_was_never_used_ends)
{
    (void)open_remote("file", folder, PATIENT_MS, 0);
    end_remote();
    ht_remote_free(NULL);
}

/* ---- URLs ---- */

static const struct {
    const char *text, *url;
    int rc;
} urls[] = {
    {"/srv/my vault", "file:///srv/my%20vault", 0},
    {"/srv/a-b_c.d~e", "file:///srv/a-b_c.d~e", 0},
    {"file:///srv/vault", "file:///srv/vault", 0},
    {"s3://bucket/prefix?region=eu", "s3://bucket/prefix?region=eu", 0},
    {"ssh://me@host/srv", "ssh://me@host/srv", 0},
    {"ssh://me:word@host/srv", NULL, -EPERM},
    {"s3://b/p?x=1&aws_secret=2", NULL, -EPERM},
    {"s3://b/p?X-Amz-Credential=2", NULL, -EPERM},
    {"s3://b/p?%74oken=2", NULL, -EPERM},
    {"vault", NULL, -EINVAL},
    {"", NULL, -EINVAL},
    {"S3://b", NULL, -EINVAL},
    {"../x:y", NULL, -EINVAL},
    {"s3://b/a b", NULL, -EINVAL},
    {"s3://b/a\n", NULL, -EINVAL},
};

TEST_LOOP(urls_hold_no_credentials, (int)HT_ARRAY_SIZE(urls))
{
    char url[HT_REMOTE_URL_BYTES];

    ck_assert_int_eq(ht_remote_url(urls[_i].text, url), urls[_i].rc);
    if (urls[_i].url)
        ck_assert_str_eq(url, urls[_i].url);
}

TEST(urls_have_a_longest_length)
{
    char text[HT_REMOTE_URL_BYTES + 1], url[HT_REMOTE_URL_BYTES];

    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 1] = 0;
    text[0] = '/';
    ck_assert_int_eq(ht_remote_url(text, url), -ENAMETOOLONG);
    memcpy(text, "s3:", 3);
    ck_assert_int_eq(ht_remote_url(text, url), -ENAMETOOLONG);
}

/* ---- the hostile program ---- */

struct hostile {
    const char *kind;
    int socket, memory, asked;
    uint8_t *slots;
    size_t slot_bytes;
    bool is_bad, breaks; /* this process breaks the protocol; it has done so */
    uint8_t first[256];  /* a request that waits */
};

static _Atomic bool answers_now;

static void answer_from_now_on(int signal)
{
    answers_now = true;
}

static void note_number(struct hostile *h, const char *name, long number)
{
    char path[300];
    int len = (int)(strrchr(h->kind, '/') - h->kind);

    snprintf(path, sizeof(path), "%.*s/%s", len, h->kind, name);
    FILE *f = fopen(path, "w");
    fprintf(f, "%ld\n", number);
    fclose(f);
}

static void reply(struct hostile *h, const uint8_t *request, uint32_t result, uint64_t more)
{
    uint8_t packet[1024] = {0};
    uint32_t slot = ht_le32_load(request + 8);
    uint64_t offset = ht_le64_load(request + 16), bytes = ht_le64_load(request + 24);
    unsigned n = 0;

    if (sscanf((const char *)request + 32, "seg/%*8x/%4x", &n) == 1)
        for (uint64_t i = 0; i < bytes; i++)
            h->slots[slot * h->slot_bytes + i] = byte_of(n, offset + i);
    memcpy(packet, request, 4);
    ht_le32_store(packet + 4, result);
    ht_le64_store(packet + 8, bytes + more);
    size_t len = 16;
    if (strstr(h->kind, "long-packet") && h->breaks)
        len = sizeof(packet);
    if (strstr(h->kind, "short-packet") && h->breaks)
        len = 15;
    if (strstr(h->kind, "number") && h->breaks)
        packet[0] ^= 0x55;
    send(h->socket, packet, len, MSG_NOSIGNAL);
    if (strstr(h->kind, "twice") && h->breaks)
        send(h->socket, packet, len, MSG_NOSIGNAL);
}

static void serve_one(struct hostile *h, const uint8_t *request)
{
    bool is_probe = strncmp((const char *)request + 32, "vault/", 6) == 0;

    h->breaks = h->is_bad;
    if (h->breaks && strstr(h->kind, "end-first"))
        _exit(0);
    if (h->is_bad && strstr(h->kind, "late")) {
        if (!is_probe) {
            memcpy(h->first, request, sizeof(h->first));
            return;
        }
        reply(h, h->first, 0, 0);
        h->is_bad = false;
    }
    if (h->is_bad && strstr(h->kind, "silent") && !answers_now)
        return;
    uint32_t result = 0;
    if (h->breaks && strstr(h->kind, "wrong-result"))
        result = 11;
    if (h->breaks && strstr(h->kind, "result-exists"))
        result = 1;
    if (h->breaks && strstr(h->kind, "flags"))
        result = 1u << 16;
    reply(h, request, result, h->breaks && strstr(h->kind, "too-long") ? 1 : 0);
}

static void look_around(struct hostile *h)
{
    struct sigaction action;
    sigset_t blocked;
    DIR *descriptors = opendir("/proc/self/fd");
    long count = -3; /* the folder itself, and two dots */

    while (readdir(descriptors))
        count++;
    closedir(descriptors);
    note_number(h, "descriptors", count);
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    note_number(h, "blocked", sigismember(&blocked, SIGTERM));
    sigaction(SIGPIPE, NULL, &action);
    note_number(h, "pipe-ignored", action.sa_handler == SIG_IGN);
    note_number(h, "cut", ftruncate(h->memory, 0) == 0);
}

/* Requests that it did not answer are answered after the signal. */
static void serve_hostile(struct hostile *h)
{
    static uint8_t waiting[64][256];
    unsigned waiting_count = 0;

    for (;;) {
        uint8_t request[256] = {0};
        struct pollfd fd = {.fd = h->socket, .events = POLLIN};
        if (poll(&fd, 1, 10) <= 0) {
            while (answers_now && waiting_count)
                serve_one(h, waiting[--waiting_count]);
            continue;
        }
        if (recv(h->socket, request, sizeof(request), 0) <= 0) {
            if (!strstr(h->kind, "stays"))
                _exit(0);
            pause();
        }
        if (h->is_bad && strstr(h->kind, "silent") && !answers_now && waiting_count < 64)
            memcpy(waiting[waiting_count++], request, sizeof(request));
        else
            serve_one(h, request);
        note_number(h, "asked", ++h->asked);
    }
}

__attribute__((constructor)) static void be_hostile(int argc, char **argv)
{
    struct hostile h = {0};

    if (argc != 6 || !strstr(argv[0], "hitrain-vault-hostile"))
        return;
    h.kind = strchr(argv[1], ':') + 1;
    h.socket = atoi(argv[2]);
    h.memory = atoi(argv[3]);
    size_t slots = (size_t)atoi(argv[4]);
    h.slot_bytes = (size_t)atoi(argv[5]);
    h.slots = mmap(NULL, slots * h.slot_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, h.memory, 0);
    char path[300];
    snprintf(path, sizeof(path), "%.*s/starts", (int)(strrchr(h.kind, '/') - h.kind), h.kind);
    FILE *f = fopen(path, "r");
    long starts = 0;
    if (f) {
        if (fscanf(f, "%ld", &starts) != 1)
            starts = 0;
        fclose(f);
    }
    h.is_bad = starts == 0 || strstr(h.kind, "always-");
    signal(SIGUSR1, answer_from_now_on);
    note_number(&h, "pid", getpid());
    note_number(&h, "starts", starts + 1);
    if (strstr(h.kind, "looks"))
        look_around(&h);
    serve_hostile(&h);
}

RUN_TESTS("remote", .timeout_s = 120, .quiet = SILENT, .setup = make_folder, .teardown = remove_folder)
