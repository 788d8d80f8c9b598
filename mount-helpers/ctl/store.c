/* SPDX-License-Identifier: Apache-2.0 */
/* store.c - commands for the whole store: `hitrainctl scrub` and `hitrainctl trim`. */
#include "mount-helpers/ctl/figures.h"

#include "mount-helpers/common/text.h"
#include "tiering/base/json.h"

/* ------------------------------------------------------------------- scrub */

static const char *const states[] = {"never", "running", "complete", "stopped", "failed"};

static const char *state_word(const struct ht_figures *f)
{
    uint64_t state = ht_figure(f, "scrub_state");

    return state < HT_ARRAY_SIZE(states) ? states[state] : "unknown";
}

static uint64_t scrub_rate(const struct ht_figures *f)
{
    uint64_t ns = ht_figure(f, "scrub_run_ns");

    return ns != 0 ? (uint64_t)((double)ht_figure(f, "scrub_run_bytes") * 1e9 / (double)ns) : 0;
}

/* 0: not known, or it does not run. */
static uint64_t seconds_left(const struct ht_figures *f)
{
    uint64_t bytes = ht_figure(f, "scrub_run_bytes"), total = ht_figure(f, "scrub_run_total_bytes");
    bool known = ht_figure(f, "scrub_state") == 1 && scrub_rate(f) != 0;

    return known && total > bytes ? (total - bytes) / scrub_rate(f) : 0;
}

static void put_scrub(const char *point, const struct ht_figures *f)
{
    uint64_t bytes = ht_figure(f, "scrub_run_bytes"), total = ht_figure(f, "scrub_run_total_bytes");
    uint64_t found = ht_figure(f, "scrub_run_found"), repaired = ht_figure(f, "scrub_run_repaired");
    uint64_t left = seconds_left(f);

    if (ht_figure(f, "scrub_state") == 0) {
        printf("%s: no scrub since the mount\n", point);
        return;
    }
    printf("%s: scrub %s: %s of %s", point, state_word(f), ht_size_text(bytes), ht_size_text(total));
    if (total != 0)
        printf(" (%u %%)", (unsigned)((double)bytes * 100 / (double)total));
    printf(" in %.0f s, %s/s", (double)ht_figure(f, "scrub_run_ns") / 1e9, ht_size_text(scrub_rate(f)));
    if (ht_figure(f, "scrub_state") == 1 && scrub_rate(f) != 0)
        printf(", %llu:%02llu min left", (unsigned long long)left / 60, (unsigned long long)left % 60);
    printf("; %llu bad, %llu repaired%s\n", (unsigned long long)found, (unsigned long long)repaired,
           found > repaired ? "; see hitrainctl events" : "");
}

static void put_scrub_json(const char *point, const struct ht_figures *f)
{
    struct ht_json j;
    char seconds[32];

    snprintf(seconds, sizeof(seconds), "%.3f", (double)ht_figure(f, "scrub_run_ns") / 1e9);
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "mount", point);
    ht_json_str(&j, "state", state_word(f));
    ht_json_u64(&j, "bytes", ht_figure(f, "scrub_run_bytes"));
    ht_json_u64(&j, "total_bytes", ht_figure(f, "scrub_run_total_bytes"));
    ht_json_word(&j, "seconds", seconds);
    ht_json_u64(&j, "bytes_per_second", scrub_rate(f));
    ht_json_u64(&j, "seconds_left", seconds_left(f));
    ht_json_u64(&j, "found", ht_figure(f, "scrub_run_found"));
    ht_json_u64(&j, "repaired", ht_figure(f, "scrub_run_repaired"));
    ht_json_end(&j);
}

int ht_cmd_scrub(const char *path, const struct ht_cmd_options *o)
{
    char line[32];
    struct ht_figures f;

    snprintf(line, sizeof(line), "scrub %s", o->verb);
    if (strcmp(o->verb, "status") != 0 && ht_cmd_command(path, o->point, line) < 0)
        return HT_CMD_FAILED;
    if (ht_figures_read(o->point, &f) < 0)
        return HT_CMD_FAILED;
    (o->json ? put_scrub_json : put_scrub)(o->point, &f);
    ht_figures_free(&f);
    return HT_CMD_OK;
}

/* -------------------------------------------------------------------- trim */

static int discarded(const char *point, uint64_t *out)
{
    char *text;
    int rc = ht_cmd_attribute(point, "device_discarded_bytes", false, &text);

    if (rc == -ENODATA)
        ht_error("%s: its daemon is of another version and does not discard", point);
    if (rc < 0)
        return rc;
    *out = strtoull(text, NULL, 10);
    free(text);
    return 0;
}

int ht_cmd_trim(const char *path, const struct ht_cmd_options *o)
{
    uint64_t before, after;

    if (discarded(o->point, &before) < 0 || ht_cmd_command(path, o->point, "trim") < 0 ||
        discarded(o->point, &after) < 0)
        return HT_CMD_FAILED;
    if (o->json) {
        struct ht_json j;
        ht_json_init(&j, stdout);
        ht_json_object(&j, NULL);
        ht_json_str(&j, "mount", o->point);
        ht_json_u64(&j, "discarded_bytes", after - before);
        ht_json_end(&j);
    } else {
        printf("%s: %s discarded\n", o->point, ht_size_text(after - before));
    }
    return HT_CMD_OK;
}
