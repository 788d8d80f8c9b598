/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top.c - `hitrainctl top`: samples of the figures, the terminal, the keys and the clock. See top.h.
 *
 * A thread reads the mount, because a mount may not answer and the keys must work all the same. It fills a sample when
 * a byte comes through one pipe, and says so through another. So each sample has one owner at a time, without a lock.
 */
#include "mount-helpers/look/top.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

/* ----------------------------------------------------------------- a sample */

#define WORD(name, word, ...) word,
static const char *const store_words[] = {HT_TOP_STORE(WORD)};
static const char *const device_words[] = {HT_TOP_DEVICE(WORD)};
static const char *const root_words[] = {HT_TOP_ROOT(WORD)};
#undef WORD
static const char *const engine_words[] = {[HT_TOP_READ] = "bytes"};

/* Keys of the lines of devices, models and engines. */
static const struct part_keys {
    const char *name, *state;
    const char *const *words;
    unsigned count;
} device_keys = {"path", "health", device_words, HT_TOP_DEVICE_FIGURES},
  root_keys = {"path", "", root_words, HT_TOP_ROOT_FIGURES},
  engine_keys = {"engine", "state", engine_words, HT_ARRAY_SIZE(engine_words)};

/* A part for each line, as far as there is room. Lines that are no JSON are passed over. */
static unsigned take_parts(char *text, const struct part_keys *keys, struct ht_top_part *list, unsigned max)
{
    struct ht_cmd_line l;
    unsigned count = 0;
    char *save;

    for (char *line = strtok_r(text, "\n", &save); line && count < max; line = strtok_r(NULL, "\n", &save)) {
        struct ht_top_part *p = &list[count];
        if (ht_cmd_parse_json(line, &l) < 0)
            continue;
        *p = (struct ht_top_part){.value = {0}};
        snprintf(p->name, sizeof(p->name), "%s", ht_cmd_value(&l, keys->name));
        snprintf(p->state, sizeof(p->state), "%s", ht_cmd_value(&l, keys->state));
        for (unsigned i = 0; i < keys->count; i++)
            p->value[i] = ht_cmd_number(&l, keys->words[i]);
        count++;
    }
    return count;
}

void ht_top_parse(const struct ht_top_texts *t, uint64_t at_ns, struct ht_top_sample *out)
{
    out->at_ns = at_ns;
    for (unsigned i = 0; i < HT_TOP_STORE_FIGURES; i++)
        out->store[i] = ht_figure(t->stats, store_words[i]);
    out->devices = take_parts(t->devices, &device_keys, out->device, HT_DEVICES_MAX);
    out->roots = take_parts(t->roots, &root_keys, out->root, HT_TOP_ROOTS_MAX);
    out->engines = take_parts(t->background, &engine_keys, out->engine, HT_TOP_ENGINES_MAX);
}

/* Reads and parses the texts of the mount at point. */
static int read_sample(const char *point, struct ht_top_sample *out)
{
    struct ht_top_texts t = {0};
    int rc = ht_cmd_attribute(point, "stats", true, &t.stats);

    if (rc == 0)
        rc = ht_hidden_text(point, "devices", &t.devices);
    if (rc == 0)
        rc = ht_hidden_text(point, "roots", &t.roots);
    if (rc == 0)
        rc = ht_hidden_text(point, "background", &t.background);
    if (rc == 0)
        ht_top_parse(&t, ht_now_ns(), out);
    free(t.stats);
    free(t.devices);
    free(t.roots);
    free(t.background);
    return rc;
}

/* --------------------------------------------------------------- the command */

enum { HISTORY = 10, COLUMNS_DEFAULT = 80, COLUMNS_MIN = 1, COLUMNS_MAX = 1000 };
#define INTERVAL_MIN 0.1
#define INTERVAL_MAX 60.0

struct top {
    struct ht_top_view v;
    const struct ht_cmd_options *o;
    struct ht_top_sample ring[HISTORY + 1]; /* the last one is the thread's */
    unsigned taken;                         /* samples so far; the newest is at (taken - 1) % HISTORY */
    int ask[2], answer[2];                  /* pipes to the thread, and from it */
    bool asked;                             /* the thread has ring[HISTORY] */
    uint64_t asked_ns;
    struct termios before;
    bool raw;
    struct ht_buf out;
};

/* ---------------------------------------------------------------- the reader */

static void *read_mount(void *arg)
{
    struct top *t = arg;
    char byte;

    while (read(t->ask[0], &byte, 1) == 1) {
        int rc = read_sample(t->v.point, &t->ring[HISTORY]);
        if (write(t->answer[1], &rc, sizeof(rc)) != (ssize_t)sizeof(rc))
            break;
    }
    return NULL;
}

/* It lives as long as the process. */
static int start_reader(struct top *t)
{
    pthread_t thread;

    if (pipe2(t->ask, O_CLOEXEC) != 0 || pipe2(t->answer, O_CLOEXEC) != 0 ||
        pthread_create(&thread, NULL, read_mount, t) != 0)
        return -ENOMEM;
    (void)pthread_detach(thread);
    return 0;
}

/* --------------------------------------------------------------- the terminal */

static volatile sig_atomic_t ended;

static void on_end(int signal_number)
{
    ended = signal_number;
}

static void on_resize(int signal_number)
{
    (void)signal_number; /* poll ends, and the next frame asks for the size */
}

static void catch_signals(void)
{
    struct sigaction end = {.sa_handler = on_end}, resize = {.sa_handler = on_resize};

    sigaction(SIGINT, &end, NULL);
    sigaction(SIGTERM, &end, NULL);
    sigaction(SIGHUP, &end, NULL);
    sigaction(SIGWINCH, &resize, NULL);
}

static void measure(struct ht_top_view *v)
{
    const char *columns = getenv("COLUMNS");
    struct winsize w;

    v->height = 0;
    v->width = columns ? (unsigned)strtoul(columns, NULL, 10) : COLUMNS_DEFAULT;
    if (v->terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col && w.ws_row) {
        v->width = w.ws_col;
        v->height = w.ws_row;
    }
    if (v->width < COLUMNS_MIN || v->width > COLUMNS_MAX)
        v->width = COLUMNS_DEFAULT;
}

static void put_bytes(const void *text, size_t len)
{
    if (ht_write_all(STDOUT_FILENO, text, len) < 0)
        ended = SIGPIPE;
}

static void begin_terminal(struct top *t)
{
    struct termios raw;
    const char *term = getenv("TERM");

    t->v.terminal = !t->o->once && !t->o->json && isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0;
    if (!t->v.terminal)
        return;
    if (isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &t->before) == 0) {
        raw = t->before;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        raw.c_cc[VMIN] = 0;
        raw.c_cc[VTIME] = 0;
        t->raw = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
    }
    put_bytes("\033[?1049h\033[?25l", 14); /* another screen, no cursor */
}

static void end_terminal(struct top *t)
{
    if (t->v.terminal)
        put_bytes("\033[?25h\033[?1049l", 14);
    if (t->raw)
        tcsetattr(STDIN_FILENO, TCSANOW, &t->before);
}

/* ------------------------------------------------------------------- frames */

/* n 0: the newest; an older one as far as there is one. */
static const struct ht_top_sample *sample(const struct top *t, unsigned n)
{
    unsigned most = t->taken < HISTORY ? t->taken : HISTORY;

    return &t->ring[(t->taken - 1 - (n < most ? n : most - 1)) % HISTORY];
}

static void show_frame(struct top *t)
{
    if (t->taken == 0)
        return;
    if (t->o->json) {
        ht_top_json(&t->v, sample(t, 0), sample(t, 1), sample(t, HISTORY), !t->o->once);
        if (fflush(stdout) != 0)
            ended = SIGPIPE;
        return;
    }
    measure(&t->v);
    ht_buf_reset(&t->out);
    if (t->v.terminal)
        ht_buf_printf(&t->out, "\033[H");
    ht_top_frame(&t->v, sample(t, 0), sample(t, 1), sample(t, HISTORY), &t->out);
    ht_buf_printf(&t->out, "%s", t->v.terminal ? "\033[0m\033[J" : t->o->once ? "" : "\n");
    if (!t->out.err)
        put_bytes(t->out.data, t->out.len);
}

/* Nothing to do more where a key means nothing. */
static void take_key(struct top *t, char key)
{
    struct ht_top_view *v = &t->v;

    if (key == 'q')
        ended = SIGINT;
    else if (key == 'p' || key == ' ')
        v->paused = !v->paused;
    else if (key == 's')
        v->order = (v->order + 1) % HT_TOP_ORDERS;
    else if (key == '+' && v->interval_s > INTERVAL_MIN)
        v->interval_s /= 2;
    else if (key == '-' && v->interval_s < INTERVAL_MAX)
        v->interval_s *= 2;
    else
        return;
    show_frame(t);
}

/* --------------------------------------------------------------------- loop */

/* An answer has come: 0, or the error. */
static int take_answer(struct top *t)
{
    int rc;

    if (read(t->answer[0], &rc, sizeof(rc)) != (ssize_t)sizeof(rc))
        return -EIO;
    t->asked = false;
    t->v.silent_s = 0;
    if (rc < 0 || (t->v.paused && t->taken))
        return rc;
    t->ring[t->taken++ % HISTORY] = t->ring[HISTORY];
    return 0;
}

/* True: an answer has come. */
static bool wait_for_something(struct top *t, uint64_t until_ns)
{
    struct pollfd p[2] = {{.fd = t->answer[0], .events = POLLIN}, {.fd = t->raw ? STDIN_FILENO : -1, .events = POLLIN}};
    uint64_t now = ht_now_ns();
    char key;

    int n = poll(p, 2, until_ns > now ? (int)((until_ns - now) / 1000000 + 1) : 0);
    if (n < 0)
        return false;
    if (t->v.terminal && (p[1].revents & (POLLHUP | POLLERR)))
        ended = SIGHUP;
    else if (t->v.terminal && p[1].revents && read(STDIN_FILENO, &key, 1) == 1)
        take_key(t, key);
    return t->asked && p[0].revents;
}

static int run_top(struct top *t)
{
    uint64_t next_ns = 0;
    int rc = 0;

    while (!ended && rc == 0 && !(t->o->once && t->taken >= 2)) { /* the first picture needs two samples */
        uint64_t now = ht_now_ns(), interval = (uint64_t)(t->v.interval_s * 1e9);
        if (now >= next_ns && !t->asked) {
            t->asked = write(t->ask[1], "", 1) == 1;
            t->asked_ns = ht_now_ns();
            next_ns = now + interval;
        } else if (now >= next_ns) {
            t->v.silent_s = (now - t->asked_ns) / 1000000000;
            next_ns = now + interval;
            if (t->v.terminal)
                show_frame(t);
        }
        if (!wait_for_something(t, next_ns))
            continue;
        rc = take_answer(t);
        if (rc == 0 && !t->v.paused && (t->taken >= 2 || t->v.terminal))
            show_frame(t);
    }
    return rc;
}

int ht_cmd_top(const char *path, const struct ht_cmd_options *o)
{
    static struct top t;

    t.o = o;
    t.v.point = o->point;
    t.v.interval_s = o->watch_s > 0 ? o->watch_s : 1;
    int rc = start_reader(&t);
    if (rc == 0) {
        catch_signals();
        begin_terminal(&t);
        rc = run_top(&t);
        end_terminal(&t);
    }
    if (rc < 0)
        ht_cmd_explain(o->point, rc);
    ht_buf_free(&t.out);
    /* The thread may still fill its sample: it ends with the process, and so does the rest. */
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}
