/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.h - the checks of `hitrainctl doctor`: each adds findings to one list and changes nothing.
 *
 * Files below /proc and /sys are read through `root`, so that tests can show other machines. A check that cannot read
 * what it needs finds nothing.
 */
#pragma once

#include "mount-helpers/ctl/ctl.h"
#include "tiering/sys/mounts.h"

enum ht_doctor_level { HT_DOCTOR_OK, HT_DOCTOR_NOTE, HT_DOCTOR_WARN, HT_DOCTOR_ERROR, HT_DOCTOR_LEVELS };
enum { HT_DOCTOR_TEXT_MAX = 512, HT_DOCTOR_FINDINGS_MAX = 256 };

struct ht_doctor_finding {
    enum ht_doctor_level level;
    const char *check; /* a word, for programs */
    char text[HT_DOCTOR_TEXT_MAX];
    char remedy[HT_DOCTOR_TEXT_MAX]; /* "": none is needed */
};

struct ht_doctor {
    const char *root;      /* before /proc and /sys: "", or a folder of a test */
    int told;              /* a pipe that is told of each answer; 0: none */
    bool mount;            /* a mount of hitrain is asked */
    char device[PATH_MAX]; /* that is asked now; "": none */
    unsigned count;
    bool cut;                       /* there were more findings */
    struct ht_doctor_finding *last; /* added last, or NULL */
    struct ht_doctor_finding finding[HT_DOCTOR_FINDINGS_MAX];
};

/* The finding before has no remedy until ht_doctor_remedy. */
void ht_doctor_add(struct ht_doctor *d, enum ht_doctor_level level, const char *check, const char *fmt, ...)
    HT_PRINTF(4, 5);
/* Of the finding that was added last. */
void ht_doctor_remedy(struct ht_doctor *d, const char *fmt, ...) HT_PRINTF(2, 3);
/* The mount or the device has answered. */
void ht_doctor_answered(const struct ht_doctor *d);
/* Of the findings from that number on. */
enum ht_doctor_level ht_doctor_worst(const struct ht_doctor *d, unsigned from);

/* The first line of a file below root, without its end. False: there is none. */
bool ht_doctor_line(const struct ht_doctor *d, char *out, size_t cap, const char *fmt, ...) HT_PRINTF(4, 5);
/* The number that begins that line. */
bool ht_doctor_number(const struct ht_doctor *d, uint64_t *out, const char *fmt, ...) HT_PRINTF(3, 4);

/* doctor_machine.c: the kernel, its limits, memory, the clock. */
void ht_doctor_machine(struct ht_doctor *d);
/* The memory limits of the control groups of a process, or of this one (0). */
void ht_doctor_cgroup(struct ht_doctor *d, int pid, uint64_t needed_bytes);

/* doctor_device.c: a block device or a file that holds a part of a store, by its path. */
void ht_doctor_device(struct ht_doctor *d, const char *path);

/* doctor_mount.c: what a daemon says about itself. lines: its devices; source: the first, as the kernel knows it. */
void ht_doctor_figures(struct ht_doctor *d, const char *f);
void ht_doctor_members(struct ht_doctor *d, const char *source, const struct ht_cmd_line *lines, unsigned count);
/* text: lines of .hitrain/events; it is changed. */
void ht_doctor_events(struct ht_doctor *d, char *text, uint64_t now_ns);
/* All of a mount that answers, and its devices. */
void ht_doctor_mount(struct ht_doctor *d, const struct ht_mount_entry *m);
