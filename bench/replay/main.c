/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - replay: makes traces, plays them, and predicts how long that takes. bench/replay/README.md describes traces.
 *
 * See usage() for the words. TRACE - is standard input.
 */
#include <stdlib.h>

#include "bench/no_memory.h"
#include "bench/replay/generate.h"
#include "bench/replay/play.h"
#include "bench/replay/sim.h"

enum { POLICIES_MAX = 8, USAGE = 2 };

static const struct sim_policy *const policies[] = {&sim_ideal, &sim_belady, &sim_lru, &sim_today};

static int usage(void)
{
    fputs(
        "usage: replay generate KIND [shape=SHAPE] [steps=4] [compute=SECONDS] [scale=PERCENT%] [activations=BYTES]\n"
        "                       [durable=STEPS] [optimizer=20%]\n"
        "       replay generate scan [tensors=64] [bytes=8M] [steps=4] [compute=SECONDS] [durable=STEPS]\n"
        "       replay simulate TRACE [dram=BYTES|PERCENT%] [read=300M] [write=300M] [latency=MICROSECONDS] [copy=4G]\n"
        "                       [buffer=64M] [noise=PERCENT%] [seed=1] [warm=2] [policy=NAME] [json=1]\n"
        "       replay make TRACE FOLDER\n"
        "       replay play TRACE FOLDER [noise=PERCENT%] [seed=1] [warm=2] [next_use=1]\n"
        "KIND: gpt, llama, gpt-swap, llama-swap. compute= is of one step, rates are bytes a second. SHAPE:\n",
        stderr);
    generate_put_shapes(stderr);
    return USAGE;
}

/* ------------------------------------------------------------------- words */

struct words {
    struct generate_config generate;
    struct sim_config sim;
    struct play_config play;
    double dram_share; /* of the trace's bytes; 0: sim.dram_bytes counts */
    const char *policy;
    uint64_t json;
};

/* A number with K, M, G, T or % after it; max: of the result. */
static bool parse_double(const char *text, bool percent, double max, double *out)
{
    static const char letters[] = "KMGT";
    char *end;
    double n = strtod(text, &end);

    if (end == text || !(n >= 0))
        return false;
    const char *letter = *end ? strchr(letters, *end) : NULL;
    if (percent && strcmp(end, "%") == 0)
        n /= 100;
    else if (letter && !end[1] && !percent)
        n *= (double)(UINT64_C(1) << (10 * (letter - letters + 1)));
    else if (*end)
        return false;
    *out = n;
    return n <= max;
}

/* word is NAME=VALUE. */
static bool take_number(const char *word, const char *name, double unit, uint64_t least, uint64_t *out)
{
    size_t len = strlen(name);
    double n;

    if (strncmp(word, name, len) != 0 || word[len] != '=' || !parse_double(word + len + 1, false, 1e15, &n))
        return false;
    if (n * unit >= 0x1p63)
        return false;
    *out = (uint64_t)(n * unit);
    return *out >= least;
}

static bool take_dram(struct words *w, const char *word)
{
    const char *text = word + strlen("dram=");

    if (strncmp(word, "dram=", 5) != 0)
        return false;
    if (text[0] && text[strlen(text) - 1] == '%')
        return parse_double(text, true, 10, &w->dram_share) && w->dram_share > 0;
    w->dram_share = 0;
    return take_number(word, "dram", 1, 1, &w->sim.dram_bytes);
}

static bool take_share(const char *word, const char *name, double *out)
{
    size_t len = strlen(name);

    return strncmp(word, name, len) == 0 && word[len] == '=' && parse_double(word + len + 1, true, 1, out);
}

static bool take_generate_word(struct words *w, const char *word)
{
    struct generate_config *g = &w->generate;

    if (strncmp(word, "shape=", 6) == 0) {
        g->shape = word + 6;
        return true;
    }
    return take_number(word, "steps", 1, 1, &g->steps) || take_number(word, "compute", 1e6, 0, &g->compute_us) ||
        take_share(word, "scale", &g->scale) || take_share(word, "optimizer", &g->optimizer_share) ||
        take_number(word, "activations", 1, 0, &g->activation_bytes) ||
        take_number(word, "tensors", 1, 1, &g->tensors) || take_number(word, "bytes", 1, 1, &g->bytes) ||
        take_number(word, "durable", 1, 0, &g->durable_every);
}

static bool take_play_word(struct words *w, const char *word)
{
    struct sim_config *s = &w->sim;

    return take_share(word, "noise", &s->noise) || take_number(word, "seed", 1, 0, &s->seed) ||
        take_number(word, "warm", 1, 0, &s->warm_steps) ||
        take_number(word, "next_use", 1, 0, &w->play.names_next_uses);
}

/* A device of rate 0 would never answer: it is refused. */
static bool take_simulate_word(struct words *w, const char *word)
{
    struct sim_config *s = &w->sim;

    if (strncmp(word, "policy=", 7) == 0) {
        w->policy = word + 7;
        return true;
    }
    return take_dram(w, word) || take_number(word, "read", 1, 1, &s->read_rate) ||
        take_number(word, "write", 1, 1, &s->write_rate) || take_number(word, "latency", 1e3, 0, &s->latency_ns) ||
        take_number(word, "copy", 1, 0, &s->copy_rate) || take_number(word, "buffer", 1, 1, &s->buffer_bytes) ||
        take_number(word, "json", 1, 0, &w->json) || take_play_word(w, word);
}

static bool take_words(struct words *w, char **word, int count, bool (*take)(struct words *w, const char *word))
{
    *w = (struct words){
        .generate = {.shape = "", .scale = 1, .optimizer_share = 0.2, .steps = 4, .tensors = 64, .bytes = 8 << 20},
        .sim = {.read_rate = 300 << 20,
                .write_rate = 300 << 20,
                .copy_rate = UINT64_C(4) << 30,
                .buffer_bytes = 64 << 20,
                .seed = 1,
                .warm_steps = 2},
        .dram_share = 0.5,
    };
    for (int i = 0; i < count; i++)
        if (!take(w, word[i])) {
            fprintf(stderr, "replay: %s: no such word, or not a value of it\n", word[i]);
            return false;
        }
    w->play.noise = w->sim.noise;
    w->play.seed = w->sim.seed;
    w->play.warm_steps = w->sim.warm_steps;
    return true;
}

static int read_trace(const char *path, struct replay_trace *out)
{
    char err[REPLAY_ERROR_MAX];
    FILE *from = strcmp(path, "-") == 0 ? stdin : fopen(path, "r");

    if (!from) {
        fprintf(stderr, "replay: %s: %s\n", path, strerror(errno));
        return -errno;
    }
    int rc = replay_trace_read(from, out, err);
    if (from != stdin)
        fclose(from);
    if (rc)
        fprintf(stderr, "replay: %s: %s\n", path, err);
    return rc;
}

/* ---------------------------------------------------------------- commands */

static int generate(const char *kind, char **word, int count)
{
    struct replay_trace t;
    struct words w;

    if (!take_words(&w, word, count, take_generate_word))
        return USAGE;
    w.generate.kind = kind;
    int rc = generate_trace(&w.generate, &t);
    if (rc == -EINVAL)
        return usage();
    if (!rc) {
        rc = replay_trace_write(&t, stdout);
        replay_trace_free(&t);
    }
    if (rc)
        fprintf(stderr, "replay: %s\n", strerror(-rc));
    return rc ? 1 : 0;
}

struct row {
    const struct sim_policy *policy;
    struct sim_result r;
    int rc;
};

static double per_step(const struct sim_result *r, uint64_t n)
{
    return (double)n / (double)r->steps;
}

static void put_row(const struct words *w, const struct row *row, const struct row *ideal, const struct row *belady)
{
    const struct sim_result *r = &row->r;
    double of_ideal = r->time_ns ? (double)ideal->r.time_ns / (double)r->time_ns : 1; /* of equally many steps */
    double of_belady = belady->r.hits ? (double)r->hits / (double)belady->r.hits : 1;
    const char *form = w->json
        ? "{\"policy\": \"%s\", \"step_s\": %.6f, \"compute_s\": %.6f, \"stall_s\": %.6f, \"read_bytes\": %.0f, "
          "\"written_bytes\": %.0f, \"hits\": %.1f, \"prefetched\": %.1f, \"accesses\": %.1f, \"of_ideal\": %.4f, \"of_belady_hits\": %.4f}\n"
        : "  %-10s %11.4f %11.4f %11.4f %15.0f %15.0f %9.0f %10.0f %9.0f %8.3f %8.3f\n";

    printf(form, row->policy->name, per_step(r, r->time_ns) / 1e9, per_step(r, r->compute_ns) / 1e9,
           per_step(r, r->stall_ns) / 1e9, per_step(r, r->read_bytes), per_step(r, r->written_bytes),
           per_step(r, r->hits), per_step(r, r->prefetched), per_step(r, r->accesses), of_ideal, of_belady);
}

static int simulate_all(struct words *w, const struct sim_string *s)
{
    struct row row[POLICIES_MAX];

    if (w->dram_share > 0)
        w->sim.dram_bytes = (uint64_t)(w->dram_share * (double)s->trace->bytes);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(policies); i++) {
        row[i] = (struct row){policies[i]};
        int rc = sim_run(s, &w->sim, policies[i], &row[i].r);
        if (rc)
            return rc;
    }
    if (!w->json)
        printf(
            "DRAM %llu of %llu bytes, units of %llu; figures are of a step\n  %-10s %11s %11s %11s %15s %15s %9s %10s "
            "%9s %8s %8s\n",
            (unsigned long long)w->sim.dram_bytes, (unsigned long long)s->trace->bytes,
            (unsigned long long)s->unit_bytes, "policy", "seconds", "computes", "waits", "bytes in", "bytes out",
            "hits", "prefetched", "accesses", "of ideal", "Belady");
    for (unsigned i = 0; i < HT_ARRAY_SIZE(policies); i++)
        if (!w->policy || strcmp(w->policy, policies[i]->name) == 0)
            put_row(w, &row[i], &row[0], &row[1]);
    return 0;
}

static int simulate(const char *path, char **word, int count)
{
    struct sim_string s;
    struct replay_trace t;
    struct words w;

    if (!take_words(&w, word, count, take_simulate_word))
        return USAGE;
    if (read_trace(path, &t))
        return 1;
    int rc = sim_string_make(&t, &s);
    if (!rc) {
        rc = simulate_all(&w, &s);
        sim_string_free(&s);
    }
    replay_trace_free(&t);
    if (rc)
        fprintf(stderr, "replay: %s: %s\n", path, rc == -ERANGE ? "this may take a hundred years" : strerror(-rc));
    return rc ? 1 : 0;
}

static void put_play(const struct play_result *r)
{
    double steps = (double)r->steps;

    printf("{\"steps\": %llu, \"step_s\": %.6f, \"compute_s\": %.6f, \"stall_s\": %.6f, \"read_bytes\": %.0f, "
           "\"written_bytes\": %.0f",
           (unsigned long long)r->steps, (double)r->time_ns / 1e9 / steps, (double)r->compute_ns / 1e9 / steps,
           (double)r->stall_ns / 1e9 / steps, (double)r->asked_bytes / steps, (double)r->given_bytes / steps);
    if (r->counted)
        printf(", \"device_read_bytes\": %.0f, \"device_written_bytes\": %.0f, \"hits\": %.0f, \"misses\": %.0f",
               (double)r->device_read_bytes / steps, (double)r->device_written_bytes / steps, (double)r->hits / steps,
               (double)r->misses / steps);
    printf("}\n");
}

static int play(bool make, const char *path, const char *folder, char **word, int count)
{
    struct replay_trace t;
    struct play_result result;
    struct words w;

    if (!take_words(&w, word, make ? 0 : count, take_play_word) || (make && count))
        return usage();
    if (read_trace(path, &t))
        return 1;
    w.play.folder = folder;
    int rc = make ? play_make(&t, &w.play) : play_trace(&t, &w.play, &result);
    if (!rc && !make)
        put_play(&result);
    replay_trace_free(&t);
    return rc ? 1 : 0;
}

int main(int argc, char **argv)
{
    const char *command = argc > 2 ? argv[1] : "";

    if (strcmp(command, "generate") == 0)
        return generate(argv[2], argv + 3, argc - 3);
    if (strcmp(command, "simulate") == 0)
        return simulate(argv[2], argv + 3, argc - 3);
    if (argc > 3 && (strcmp(command, "play") == 0 || strcmp(command, "make") == 0))
        return play(command[0] == 'm', argv[2], argv[3], argv + 4, argc - 4);
    return usage();
}
