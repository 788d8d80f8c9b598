/* SPDX-License-Identifier: Apache-2.0 */
/* scrub.c - `hitrainctl scrub`: start and stop one, and how far it is. */
#include "mount-helpers/ctl/figures.h"

#include <stdio.h>

#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

static const char *const states[] = {"never", "running", "complete", "stopped", "failed"};

struct figures {
    uint64_t state, bytes, total_bytes, ns, found, repaired;
};

static int ask(const char *point, struct figures *out)
{
    struct ht_figures f;
    int rc = ht_figures_read(point, &f);

    if (rc < 0)
        return rc;
    *out = (struct figures){ht_figure(&f, "scrub_state"),           ht_figure(&f, "scrub_run_bytes"),
                            ht_figure(&f, "scrub_run_total_bytes"), ht_figure(&f, "scrub_run_ns"),
                            ht_figure(&f, "scrub_run_found"),       ht_figure(&f, "scrub_run_repaired")};
    ht_figures_free(&f);
    return 0;
}

static const char *state_word(const struct figures *f)
{
    return f->state < HT_ARRAY_SIZE(states) ? states[f->state] : "unknown";
}

static bool is_running(const struct figures *f)
{
    return f->state == 1;
}

static uint64_t rate(const struct figures *f)
{
    return f->ns != 0 ? (uint64_t)((double)f->bytes * 1e9 / (double)f->ns) : 0;
}

/* 0: not known. */
static uint64_t seconds_left(const struct figures *f)
{
    uint64_t left = f->total_bytes > f->bytes ? f->total_bytes - f->bytes : 0;

    return is_running(f) && rate(f) != 0 ? left / rate(f) : 0;
}

static void put_text(const char *point, const struct figures *f)
{
    if (f->state == 0) {
        printf("%s: no scrub since the mount\n", point);
        return;
    }
    printf("%s: scrub %s: %s of %s", point, state_word(f), ht_size_text(f->bytes), ht_size_text(f->total_bytes));
    if (f->total_bytes != 0)
        printf(" (%u %%)", (unsigned)((double)f->bytes * 100 / (double)f->total_bytes));
    printf(" in %.0f s, %s/s", (double)f->ns / 1e9, ht_size_text(rate(f)));
    if (is_running(f) && rate(f) != 0)
        printf(", %llu:%02llu min left", (unsigned long long)seconds_left(f) / 60,
               (unsigned long long)seconds_left(f) % 60);
    printf("; %llu bad, %llu repaired%s\n", (unsigned long long)f->found, (unsigned long long)f->repaired,
           f->found > f->repaired ? "; see hitrainctl events" : "");
}

static void put_json(const char *point, const struct figures *f)
{
    struct ht_json j;
    char seconds[32];

    snprintf(seconds, sizeof(seconds), "%.3f", (double)f->ns / 1e9);
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "mount", point);
    ht_json_str(&j, "state", state_word(f));
    ht_json_u64(&j, "bytes", f->bytes);
    ht_json_u64(&j, "total_bytes", f->total_bytes);
    ht_json_word(&j, "seconds", seconds);
    ht_json_u64(&j, "bytes_per_second", rate(f));
    ht_json_u64(&j, "seconds_left", seconds_left(f));
    ht_json_u64(&j, "found", f->found);
    ht_json_u64(&j, "repaired", f->repaired);
    ht_json_end(&j);
}

int ht_cmd_scrub(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX], line[32];
    struct figures f = {0};

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    snprintf(line, sizeof(line), "scrub %s", o->verb);
    if (strcmp(o->verb, "status") != 0 && ht_cmd_command(path, point, line) < 0)
        return HT_CMD_FAILED;
    if (ask(point, &f) < 0)
        return HT_CMD_FAILED;
    if (o->json)
        put_json(point, &f);
    else
        put_text(point, &f);
    return HT_CMD_OK;
}
