/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - `hitrainctl plan`: the lines of .hitrain/plan, as a table, as they are (--json), or drawn (--svg).
 *
 * The drawing has the time of one step from left to right: above, the content that the plan has in memory; below, what
 * devices read because something had no room. Both are sums over the lines, in as many columns as the drawing has.
 */
#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/ctl.h"
#include "mount-helpers/ctl/event_line.h"
#include "mount-helpers/ctl/lines.h"
#include "mount-helpers/ctl/plan_columns.h"
#include <hitrain/words.h>

enum { COLUMNS = HT_PLAN_COLUMNS, SCALE = 2, PANEL = 160, GAP = 60, MARGIN = 50 };

/* The lines of a file are neighbours. */
struct file {
    uint64_t id, offset, bytes, leaving_bytes, next_in_ns;
    unsigned uses; /* of its parts */
    char path[PATH_MAX];
};

struct reader {
    const struct ht_cmd_options *o;
    uint64_t lines;
    struct file file;
    struct ht_plan_columns columns;
};

/* -------------------------------------------------------------------- table */

static double seconds(uint64_t ns)
{
    return (double)ns * 1e-9;
}

static void put_head(struct reader *r, const struct ht_cmd_line *l)
{
    printf("plans made: %llu, dropped: %llu\n", (unsigned long long)ht_cmd_number(l, "made"),
           (unsigned long long)ht_cmd_number(l, "dropped"));
    if (!r->columns.active) {
        puts("no plan is followed");
        return;
    }
    printf("a step takes %.3f s and uses %s; %s have room in the whole step, %s are read in each\n",
           seconds(r->columns.step_ns), ht_size_text(ht_cmd_number(l, "bytes")),
           ht_size_text(ht_cmd_number(l, "stay_bytes")), ht_size_text(ht_cmd_number(l, "read_bytes")));
    printf("%llu of %llu steps matched, with %llu accesses as planned and %llu others\n\n",
           (unsigned long long)ht_cmd_number(l, "matched_steps"), (unsigned long long)ht_cmd_number(l, "steps"),
           (unsigned long long)ht_cmd_number(l, "hits"), (unsigned long long)ht_cmd_number(l, "strangers"));
    puts("next use, s       size     leaves  uses  path");
}

static void put_file(const struct file *f)
{
    if (!f->uses)
        return;
    printf("%11.3f %10s %10s %5u  ", seconds(f->next_in_ns), ht_size_text(f->bytes), ht_size_text(f->leaving_bytes),
           f->uses);
    if (f->path[0] == '\0')
        printf("(%llu)\n", (unsigned long long)f->id);
    else {
        ht_put_printable(f->path, stdout);
        putchar('\n');
    }
}

static void add_to_file(struct reader *r, const struct ht_cmd_line *l)
{
    struct file *f = &r->file;
    uint64_t id = ht_cmd_number(l, "id"), bytes = ht_cmd_number(l, "bytes"), used = ht_cmd_number(l, "used_ns");
    uint64_t in = used >= r->columns.now_ns ? used - r->columns.now_ns : used + r->columns.step_ns - r->columns.now_ns;

    if (f->id != id) {
        put_file(f);
        *f = (struct file){.id = id, .next_in_ns = UINT64_MAX};
        snprintf(f->path, sizeof(f->path), "%s", ht_cmd_value(l, "path"));
    }
    if (!f->uses++ || f->offset != ht_cmd_number(l, "offset")) /* the uses of a part are neighbours, too */
        f->bytes += bytes;
    f->offset = ht_cmd_number(l, "offset");
    f->leaving_bytes += ht_plan_line_leaves(l) ? bytes : 0;
    f->next_in_ns = ht_min_u64(f->next_in_ns, in);
}

/* ------------------------------------------------------------------ drawing */

/* One panel: bars, the largest value and what they are. Returns where the next one begins. */
static int draw_panel(FILE *to, int top, const char *what, const char *colour, const double column[COLUMNS])
{
    double most = 1;

    for (int i = 0; i < COLUMNS; i++)
        most = column[i] > most ? column[i] : most;
    fprintf(to, "<text x=\"%d\" y=\"%d\">%s: at most %s</text>\n<path fill=\"%s\" d=\"M%d %d", MARGIN, top - 8, what,
            ht_size_text((uint64_t)most), colour, MARGIN, top + PANEL);
    for (int i = 0; i < COLUMNS; i++)
        fprintf(to, "V%.1fh%d", top + PANEL - PANEL * column[i] / most, SCALE);
    fprintf(to, "V%dZ\"/>\n", top + PANEL);
    fprintf(to, "<path stroke=\"#333\" fill=\"none\" d=\"M%d %dv%dh%d\"/>\n", MARGIN, top, PANEL, COLUMNS * SCALE);
    return top + PANEL + GAP;
}

static int draw(const struct reader *r)
{
    int width = COLUMNS * SCALE + 2 * MARGIN, height = 2 * (PANEL + GAP) + GAP, x;
    FILE *to = fopen(r->o->svg, "we");

    if (!to) {
        ht_error("%s: %s", r->o->svg, strerror(errno));
        return HT_CMD_FAILED;
    }
    fprintf(to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
            "font-size=\"14\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height);
    int top = draw_panel(to, GAP, "content in memory", "#7a9cc6", r->columns.in_memory);
    top = draw_panel(to, top, "read in 1/480 of a step, because it had no room", "#c67a7a", r->columns.read);
    x = MARGIN + (int)((double)r->columns.now_ns / (double)r->columns.step_ns * COLUMNS * SCALE);
    fprintf(to, "<path stroke=\"#888\" stroke-dasharray=\"4\" d=\"M%d %dV%d\"/>\n", x, GAP, top - GAP);
    fprintf(to, "<text x=\"%d\" y=\"%d\">0</text><text x=\"%d\" y=\"%d\" text-anchor=\"end\">%.3f s</text>\n</svg>\n",
            MARGIN, top - GAP + 20, MARGIN + COLUMNS * SCALE, top - GAP + 20, seconds(r->columns.step_ns));
    bool failed = ferror(to);
    if (fclose(to) || failed) {
        ht_error("%s: could not be written", r->o->svg);
        return HT_CMD_FAILED;
    }
    return HT_CMD_OK;
}

/* -------------------------------------------------------------------- lines */

static int take_line(struct ht_cmd_line *l, void *ctx)
{
    struct reader *r = ctx;

    if (r->o->json)
        ht_event_line_put_json(l);
    if (r->lines++ == 0) {
        int rc = ht_plan_columns_begin(&r->columns, l);
        if (rc < 0)
            return rc;
        if (!r->o->json)
            put_head(r, l);
        return 0;
    }
    int rc = ht_plan_columns_add(&r->columns, l);
    if (rc == 0 && !r->o->json)
        add_to_file(r, l);
    return rc;
}

static int read_all(struct reader *r, const char *point)
{
    int rc = ht_lines_read(point, "plan", UINT64_MAX, take_line, r);

    if (rc == 0 && r->lines == 0)
        return -EPROTO;
    if (rc == 0)
        put_file(&r->file);
    return rc == 0 && fflush(stdout) != 0 ? -EPIPE : rc;
}

static int report(const char *point, int err)
{
    if (err == -EACCES || err == -EPERM)
        ht_error("%s: only root and the owner of the mount's root may read " HT_CTL_DIR "/plan", point);
    else if (err == -ENOENT)
        ht_error("%s: there is no " HT_CTL_DIR "/plan: is it the root of the store that is mounted there?", point);
    else if (err == -EPROTO)
        ht_error("%s: " HT_CTL_DIR "/plan has no plan: its daemon is of another version", point);
    else
        (void)ht_cmd_explain(point, err);
    return HT_CMD_FAILED;
}

int ht_cmd_plan(const char *path, const struct ht_cmd_options *o)
{
    struct reader *r = calloc(1, sizeof(*r));
    char point[PATH_MAX];
    int status = HT_CMD_FAILED;

    if (!r) {
        ht_error("%s: %s", path, strerror(ENOMEM));
        return HT_CMD_FAILED;
    }
    r->o = o;
    if (ht_cmd_mount_point(path, point) >= 0) {
        int rc = read_all(r, point);
        status = rc < 0 ? report(point, rc) : HT_CMD_OK;
        if (status == HT_CMD_OK && o->svg && !r->columns.active) {
            ht_error("%s: no plan is followed, so there is nothing to draw", point);
            status = HT_CMD_FAILED;
        } else if (status == HT_CMD_OK && o->svg) {
            status = draw(r);
        }
    }
    free(r);
    return status;
}
