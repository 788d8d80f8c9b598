/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_mount.c - checks of a mounted store by its own figures, devices and events. See doctor.h. */
#include "mount-helpers/look/doctor.h"

#include "mount-helpers/look/show.h"
#include "tiering/sys/holder.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum {
    EVENT_CODES_MAX = 64,
    SPEED_RATIO = 2,
    SPARE_MIB = 64, /* of the daemon beside its figures, by hitrain(8) */
};
#define DAY_NS (UINT64_C(86400) * 1000000000)

/* ------------------------------------------------------------------ figures */

static void check_space(struct ht_doctor *d, const char *f)
{
    uint64_t total = ht_figure(f, "total_bytes"), left = ht_figure(f, "available_bytes");
    enum ht_doctor_level level = left < total / 100 ? HT_DOCTOR_ERROR
        : left < total / 20                         ? HT_DOCTOR_WARN
                                                    : HT_DOCTOR_OK;

    ht_doctor_add(d, level, "space", "%s of %s are available", ht_size_text(left), ht_size_text(total));
    if (level != HT_DOCTOR_OK)
        ht_doctor_remedy(d, "delete files; du shows the large ones; a store that is almost full is slow");
}

static void check_log(struct ht_doctor *d, const char *f)
{
    uint64_t needed = ht_figure(f, "log_reserved_bytes"), limit = ht_figure(f, "log_reserve_limit_bytes");

    if (limit == 0)
        return;
    if (needed < limit - limit / 4) {
        ht_doctor_add(d, HT_DOCTOR_OK, "log", "names and chunks need %s of at most %s of the log", ht_size_text(needed),
                      ht_size_text(limit));
        return;
    }
    ht_doctor_add(d, needed < limit - limit / 20 ? HT_DOCTOR_WARN : HT_DOCTOR_ERROR, "log",
                  "names and chunks need %s of at most %s of the log: the store will refuse new files",
                  ht_size_text(needed), ht_size_text(limit));
    ht_doctor_remedy(d, "delete small files, or make a new store with mkfs.hitrain --log-size= and copy");
}

static void check_memory(struct ht_doctor *d, const char *f)
{
    uint64_t tier = ht_figure(f, "dram_bytes") + ht_figure(f, "staging_bytes"), all = 0;
    uint64_t locked = ht_figure(f, "locked_bytes"), huge = ht_figure(f, "huge_bytes");
    char line[128];

    if (locked < tier) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "locked", "%s of the daemon's memory may be swapped out",
                      ht_size_text(tier - locked));
        ht_doctor_remedy(d, "raise RLIMIT_MEMLOCK of the daemon (ulimit -l, LimitMEMLOCK= of a unit)");
    }
    if (huge == 0 && tier >= 64 * HT_MIB) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "huge", "the daemon got no huge pages");
        ht_doctor_remedy(d, "see huge-pages; free memory before the mount, or mount soon after the boot");
    }
    if (ht_doctor_line(d, line, sizeof(line), "proc/meminfo") && sscanf(line, "MemTotal: %lu", &all) == 1 &&
        tier > all * 1024 / 10 * 9) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "memory", "dram and staging take %s of this machine's %s", ht_size_text(tier),
                      ht_size_text(all * 1024));
        ht_doctor_remedy(d, "mount with less dram=, so that programs and the page cache have memory");
    }
}

/* Counters that are 0 on a store that is well. */
static const struct {
    const char *word;
    enum ht_doctor_level level;
    const char *text, *remedy;
} zeros[] = {
    {"lost_chunks", HT_DOCTOR_ERROR, "chunks are lost: reading them fails",
     "hitrain-fsck -n names the files; restore them from a copy, or delete them"},
    {"checksum_errors", HT_DOCTOR_ERROR, "chunks had wrong bytes on a device",
     "hitrainctl events names device and files; run a scrub, and replace the device"},
    {"read_errors", HT_DOCTOR_ERROR, "reads of a device failed", "look at hitrainctl device and at the kernel's log"},
    {"write_errors", HT_DOCTOR_ERROR, "writes to a device failed", "look at hitrainctl device and at the kernel's log"},
    {"passthrough_fallbacks", HT_DOCTOR_NOTE, "passthrough files were opened without passthrough",
     "hitrainctl doctor without a mount says whether they are possible here; if so, they had no room: raise dram= or passthrough="},
};

static void check_zeros(struct ht_doctor *d, const char *f)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(zeros); i++) {
        uint64_t value = ht_figure(f, zeros[i].word);
        if (value == 0)
            continue;
        ht_doctor_add(d, zeros[i].level, zeros[i].word, "%llu %s", (unsigned long long)value, zeros[i].text);
        ht_doctor_remedy(d, "%s", zeros[i].remedy);
    }
    uint64_t found = ht_figure(f, "scrub_run_found"), repaired = ht_figure(f, "scrub_run_repaired");
    if (found > repaired) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "scrub", "the last scrub found %llu places that it could not repair",
                      (unsigned long long)(found - repaired));
        ht_doctor_remedy(d, "the events scrub-damage name the files: restore or delete them");
    }
}

static void check_endurance(struct ht_doctor *d, const char *f)
{
    uint64_t day = ht_figure(f, "day_written_bytes"), budget = ht_figure(f, "endurance_bytes");

    if (budget == 0 || day <= budget)
        return;
    ht_doctor_add(d, HT_DOCTOR_WARN, "endurance", "%s were written in a day; the budget is %s", ht_size_text(day),
                  ht_size_text(budget));
    ht_doctor_remedy(d, "make every n-th step durable (durable_every), or give the tier more memory");
}

void ht_doctor_figures(struct ht_doctor *d, const char *f)
{
    check_space(d, f);
    check_log(d, f);
    check_memory(d, f);
    check_zeros(d, f);
    check_endurance(d, f);
}

/* ------------------------------------------------------------------ devices */

static void check_member(struct ht_doctor *d, const struct ht_cmd_line *l)
{
    const char *path = ht_cmd_value(l, "path"), *health = ht_cmd_value(l, "health");

    if (strcmp(health, "ok") != 0) {
        bool gone = strcmp(health, "missing") == 0;
        ht_doctor_add(d, HT_DOCTOR_ERROR, "health", "device %s %s: %s", ht_cmd_value(l, "index"), path, health);
        ht_doctor_remedy(d,
                         gone ? "connect it and mount again"
                              : "copy what matters; look at hitrainctl device and at the kernel's log");
    }
    if (strcmp(ht_cmd_value(l, "log"), "lost") == 0) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "log-copy", "device %s %s lost its copy of the log", ht_cmd_value(l, "index"),
                      path);
        ht_doctor_remedy(d, "the store writes it again when the device takes writes; if it stays, replace the device");
    }
}

static void check_speeds(struct ht_doctor *d, const struct ht_cmd_line *lines, unsigned count, const char *key)
{
    uint64_t least = UINT64_MAX, most = 0;

    for (unsigned i = 0; i < count; i++) {
        uint64_t rate = ht_cmd_number(&lines[i], key);
        if (rate == 0)
            continue;
        least = ht_min_u64(least, rate);
        most = rate > most ? rate : most;
    }
    if (most == 0 || most / SPEED_RATIO < least)
        return;
    ht_doctor_add(d, HT_DOCTOR_NOTE, "unequal", "devices differ in speed (%s): from %s/s to %s/s", key,
                  ht_size_text(least), ht_size_text(most));
    ht_doctor_remedy(d, "new content goes to the fast ones; hitrainctl device shows the shares");
}

/* A relative path is one of the daemon's folder at that time, which is not known; the kernel has that of the first. */
void ht_doctor_members(struct ht_doctor *d, const char *source, const struct ht_cmd_line *lines, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        const char *path = ht_cmd_value(&lines[i], "path");
        check_member(d, &lines[i]);
        if (path[0] != '/' && path[0] != '\0' && count == 1)
            path = source;
        if (path[0] == '/')
            ht_doctor_device(d, path);
        ht_doctor_answered(d);
    }
    check_speeds(d, lines, count, "read_bytes_per_s");
    check_speeds(d, lines, count, "write_bytes_per_s");
}

static void check_devices(struct ht_doctor *d, const char *point, const char *source)
{
    static struct ht_cmd_line lines[HT_DEVICES_MAX];
    unsigned count = 0;
    char *text, *save;

    if (ht_hidden_text(point, "devices", &text) < 0)
        return;
    for (char *l = strtok_r(text, "\n", &save); l && count < HT_DEVICES_MAX; l = strtok_r(NULL, "\n", &save))
        count += ht_cmd_parse_json(l, &lines[count]) == 0;
    ht_doctor_members(d, source, lines, count);
    free(text);
}

/* ------------------------------------------------------------------- events */

struct tally {
    const char *code;
    uint64_t count;
};

static void add_event(struct tally *t, unsigned *count, const char *code, uint64_t n)
{
    unsigned i = 0;

    while (i < *count && strcmp(t[i].code, code) != 0)
        i++;
    if (i == EVENT_CODES_MAX)
        return;
    if (i == *count)
        t[(*count)++] = (struct tally){.code = code};
    t[i].count += n;
}

static void put_tally(struct ht_doctor *d, enum ht_doctor_level level, const struct tally *t, unsigned count)
{
    char text[HT_DOCTOR_TEXT_MAX] = "";
    size_t len = 0;

    for (unsigned i = 0; i < count && len < sizeof(text) - 80; i++)
        len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%.40s (%llu)", i ? ", " : "", t[i].code,
                                (unsigned long long)t[i].count);
    if (count == 0)
        return;
    ht_doctor_add(d, level, "events", "in the last day: %s", text);
    ht_doctor_remedy(d, "hitrainctl events shows them; hitrainctl(8) explains each code");
}

void ht_doctor_events(struct ht_doctor *d, char *text, uint64_t now_ns)
{
    struct tally errors[EVENT_CODES_MAX] = {0}, warnings[EVENT_CODES_MAX] = {0};
    unsigned error_count = 0, warning_count = 0;
    struct ht_cmd_line l;
    char *save;

    for (char *one = strtok_r(text, "\n", &save); one; one = strtok_r(NULL, "\n", &save)) {
        if (ht_cmd_parse_json(one, &l) != 0 || ht_cmd_number(&l, "time_ns") + DAY_NS < now_ns)
            continue;
        uint64_t n = ht_cmd_number(&l, "count");
        if (ht_show_level(&l) == HT_LOG_ERROR)
            add_event(errors, &error_count, ht_cmd_value(&l, "code"), n ? n : 1);
        else if (ht_show_level(&l) == HT_LOG_WARN)
            add_event(warnings, &warning_count, ht_cmd_value(&l, "code"), n ? n : 1);
    }
    put_tally(d, HT_DOCTOR_ERROR, errors, error_count);
    put_tally(d, HT_DOCTOR_WARN, warnings, warning_count);
    if (error_count + warning_count == 0)
        ht_doctor_add(d, HT_DOCTOR_OK, "events", "no error and no warning in the last day");
}

static void check_events(struct ht_doctor *d, const char *point)
{
    char *text;
    int rc = ht_hidden_text(point, "events", &text);

    if (rc == 0) {
        ht_doctor_events(d, text, ht_wall_ns());
        free(text);
    } else if (rc == -EACCES || rc == -EPERM) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "events", "only root and the owner of the mount's root may read events");
        ht_doctor_remedy(d, "run this as root");
    } else {
        ht_doctor_add(d, HT_DOCTOR_WARN, "events", "events cannot be read: %s", strerror(-rc));
        ht_doctor_remedy(d, "is it the root of the store that is mounted there? See hitrainctl events");
    }
}

/* -------------------------------------------------------------------- mount */

static void check_daemon(struct ht_doctor *d, const char *source, const char *f)
{
    struct ht_holder h;
    uint64_t needed = ht_figure(f, "dram_bytes") + ht_figure(f, "staging_bytes") + ht_figure(f, "meta_bytes") +
        ht_figure(f, "names_bytes") + SPARE_MIB * HT_MIB;

    if (ht_holder_find(source, &h) == 0 && h.pid)
        ht_doctor_cgroup(d, h.pid, needed);
}

/* Devices come before whatever needs their folders: one that does not answer is then named. */
void ht_doctor_mount(struct ht_doctor *d, const struct ht_mount_entry *m)
{
    char *f;
    bool known = ht_figures_read(m->point, &f) == 0;

    if (known) {
        ht_doctor_figures(d, f);
    } else {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s has no statistics: its daemon is of another version", m->point);
        ht_doctor_remedy(d, "unmount it and mount it with this version");
    }
    ht_doctor_answered(d);
    check_events(d, m->point);
    ht_doctor_answered(d);
    check_devices(d, m->point, m->source);
    ht_doctor_answered(d);
    if (known) {
        check_daemon(d, m->source, f);
        free(f);
    }
}
