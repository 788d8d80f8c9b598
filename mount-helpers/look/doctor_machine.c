/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_machine.c - checks of the kernel, its limits, memory and the clock. See doctor.h. */
#include "mount-helpers/look/doctor.h"

#include <sys/syscall.h>
#include <sys/timex.h>
#include <time.h>
#include <unistd.h>

#include "tiering/sys/mem.h"

#define HUGE_PAGES "sys/kernel/mm/transparent_hugepage"
#define BUILT_IN "CONFIG_FUSE_PASSTHROUGH=y"
#define RELEASED_S 1767225600 /* 2026-01-01: no clock that is right shows an earlier time */

enum { PAGES_TUNED = 1024 };

/* The word in brackets of a line like "always [madvise] never". */
static bool chosen_word(const struct ht_doctor *d, const char *path, char out[32])
{
    char line[256], *begin;

    if (!ht_doctor_line(d, line, sizeof(line), "%s", path) || !(begin = strchr(line, '[')))
        return false;
    begin[strcspn(begin, "]")] = '\0';
    snprintf(out, 32, "%s", begin + 1);
    return true;
}

static void check_huge_pages(struct ht_doctor *d)
{
    char own[32], shared[32];

    if (!chosen_word(d, HUGE_PAGES "/enabled", own)) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "huge-pages", "this kernel has no transparent huge pages");
        ht_doctor_remedy(d, "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE");
        return;
    }
    if (strcmp(own, "never") == 0) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "huge-pages", "huge pages are off: filling the DRAM tier takes much longer");
        ht_doctor_remedy(d, "echo madvise >/" HUGE_PAGES "/enabled, or mount with the option tune");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "huge-pages", "huge pages are available (%s)", own);
    }
    if (!chosen_word(d, HUGE_PAGES "/shmem_enabled", shared))
        return;
    if (strcmp(shared, "never") == 0 || strcmp(shared, "deny") == 0) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "shared-huge-pages", "passthrough files get no huge pages (%s)", shared);
        ht_doctor_remedy(d, "echo advise >/" HUGE_PAGES "/shmem_enabled, or mount with the option tune");
    }
}

/* 6009 for Linux 6.9; 0: not known. */
static unsigned kernel_version(const struct ht_doctor *d, char release[128])
{
    unsigned major, minor;

    if (!ht_doctor_line(d, release, 128, "proc/sys/kernel/osrelease") || sscanf(release, "%u.%u", &major, &minor) != 2)
        return 0;
    return major * 1000 + minor;
}

static void check_kernel(struct ht_doctor *d)
{
    char release[128];
    unsigned version = kernel_version(d, release);

    if (!version)
        return;
    if (version < 5006) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "kernel", "Linux %s is too old for hitrain", release);
        ht_doctor_remedy(d, "use Linux 6.1 or newer");
    } else if (version < 6001) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "kernel", "Linux %s: each completion of a device is an interrupt", release);
        ht_doctor_remedy(d, "use Linux 6.1 or newer");
    } else if (version < 6009) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "kernel", "Linux %s has no passthrough files", release);
        ht_doctor_remedy(d, "use Linux 6.9 or newer if programs map passthrough files");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "kernel", "Linux %s", release);
    }
}

static void check_fuse(struct ht_doctor *d)
{
    char path[PATH_MAX];
    uint64_t pages;

    snprintf(path, sizeof(path), "%s/dev/fuse", d->root);
    if (access(path, R_OK | W_OK) != 0) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "fuse", "/dev/fuse: %s", strerror(errno));
        ht_doctor_remedy(d,
                         errno == ENOENT ? "modprobe fuse; in a container pass the device in"
                                         : "run as root, or give this user access to /dev/fuse");
        return;
    }
    ht_doctor_add(d, HT_DOCTOR_OK, "fuse", "/dev/fuse can be opened");
    if (ht_doctor_number(d, &pages, "proc/sys/fs/fuse/max_pages_limit") && pages < PAGES_TUNED) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "fuse-pages", "requests of the kernel have at most %s",
                      ht_size_text(pages * 4096));
        ht_doctor_remedy(d, "sysctl fs.fuse.max_pages_limit=%d, or mount with the option tune", PAGES_TUNED);
    }
}

/*
 * Whether a daemon that this user starts could hand the memory of files out. An old kernel is check_kernel's finding.
 */
static void check_passthrough(struct ht_doctor *d)
{
    char release[128], path[PATH_MAX], line[256] = "";

    if (kernel_version(d, release) < 6009)
        return;
    snprintf(path, sizeof(path), "%s/boot/config-%s", d->root, release);
    FILE *f = fopen(path, "re");
    bool known = f, built_in = false;
    while (known && !built_in && fgets(line, sizeof(line), f))
        built_in = strncmp(line, BUILT_IN, strlen(BUILT_IN)) == 0;
    if (f)
        fclose(f);
    if (known && !built_in) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "passthrough", "Linux %s was built without passthrough files", release);
        ht_doctor_remedy(d, "use a kernel with CONFIG_FUSE_PASSTHROUGH if programs or a GPU map files");
    } else if (geteuid() != 0) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "passthrough", "a daemon of this user has no passthrough files");
        ht_doctor_remedy(d, "mount as root (CAP_SYS_ADMIN) if programs or a GPU map files");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "passthrough", "programs and GPUs may map files (passthrough=auto)");
    }
}

/* The programs that stand beside this one run with this libfuse: `hitrain --version` prints it. */
static void check_libfuse(struct ht_doctor *d)
{
    char folder[PATH_MAX], command[PATH_MAX + 32], line[256] = "", *at;
    unsigned major, minor;

    if (!ht_own_folder(0, folder) || strchr(folder, '\''))
        return;
    snprintf(command, sizeof(command), "'%s/hitrain' --version 2>/dev/null", folder);
    FILE *f = popen(command, "re");
    bool ok = f && fgets(line, sizeof(line), f);
    if (f)
        (void)pclose(f);
    at = ok ? strstr(line, "(libfuse ") : NULL;
    if (!at || sscanf(at, "(libfuse %u.%u", &major, &minor) != 2)
        return;
    line[strcspn(line, "\n")] = '\0';
    if (major * 1000 + minor >= 3017) {
        ht_doctor_add(d, HT_DOCTOR_OK, "libfuse", "%s", line);
        return;
    }
    ht_doctor_add(d, HT_DOCTOR_WARN, "libfuse", "%s: libfuse before 3.17 has no passthrough files", line);
    ht_doctor_remedy(d, "install libfuse 3.17 or newer");
}

/* Flags and sizes of struct io_uring_params that this check needs are all 0. */
static int try_ring(void)
{
    uint64_t params[32] = {0};
    long fd = syscall(SYS_io_uring_setup, 4u, params);

    if (fd < 0)
        return -errno;
    close((int)fd);
    return 0;
}

static void check_io_uring(struct ht_doctor *d)
{
    uint64_t disabled = 0;

    (void)ht_doctor_number(d, &disabled, "proc/sys/kernel/io_uring_disabled");
    int rc = try_ring();
    if (rc == -ENOMEM || rc == -EMFILE || rc == -ENFILE || rc == -EAGAIN) {
        ht_doctor_add(d, HT_DOCTOR_WARN, "io_uring", "no ring could be made: %s", strerror(-rc));
        ht_doctor_remedy(d, "raise the limits of open files and locked memory (ulimit -n, ulimit -l)");
    } else if (disabled == 2 || rc < 0) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "io_uring", "io_uring cannot be used: %s",
                      disabled == 2 ? "kernel.io_uring_disabled is 2" : strerror(-rc));
        ht_doctor_remedy(d, "sysctl kernel.io_uring_disabled=0; in a container allow the io_uring system calls");
    } else if (disabled == 1) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "io_uring", "only root and one group may use io_uring");
        ht_doctor_remedy(d, "add users who mount stores to the group of kernel.io_uring_group");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "io_uring", "io_uring can be used");
    }
}

static void check_memlock(struct ht_doctor *d)
{
    uint64_t limit = ht_mem_lock_limit();

    if (limit == UINT64_MAX || geteuid() == 0) {
        ht_doctor_add(d, HT_DOCTOR_OK, "memlock", "this user may lock memory");
        return;
    }
    ht_doctor_add(d, HT_DOCTOR_NOTE, "memlock", "this user may lock %s; more of a store's memory could be swapped out",
                  ht_size_text(limit));
    ht_doctor_remedy(d, "raise it to dram= plus staging= (ulimit -l, LimitMEMLOCK= of a unit)");
}

static void check_clock(struct ht_doctor *d)
{
    struct timex t = {0};
    int state = adjtimex(&t);

    if (time(NULL) < RELEASED_S) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "clock", "the clock is years slow: times of files and events are wrong");
        ht_doctor_remedy(d, "set the clock, and start a service that keeps it right (systemd-timesyncd, chrony)");
    } else if (state < 0 || state == TIME_ERROR) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "clock", "no service keeps the clock right");
        ht_doctor_remedy(d, "start systemd-timesyncd or chrony, so that events have the right time");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "clock", "the clock is synchronized");
    }
}

/* ----------------------------------------------------------- control groups */

/* The smallest limit of a group and those above it; UINT64_MAX: none. at is changed. */
static uint64_t limit_above(const struct ht_doctor *d, const char *mount, const char *file, char *at)
{
    uint64_t least = UINT64_MAX, limit;

    for (;;) {
        if (ht_doctor_number(d, &limit, "%s%s/%s", mount, at, file))
            least = ht_min_u64(least, limit);
        char *slash = strrchr(at, '/');
        if (!slash)
            return least;
        *slash = '\0';
    }
}

static uint64_t memory_limit(const struct ht_doctor *d, int pid)
{
    char path[PATH_MAX], line[PATH_MAX];
    uint64_t least = UINT64_MAX;

    if (pid)
        snprintf(path, sizeof(path), "%s/proc/%d/cgroup", d->root, pid);
    else
        snprintf(path, sizeof(path), "%s/proc/self/cgroup", d->root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        char *group = strchr(line, '/');
        line[strcspn(line, "\n")] = '\0';
        if (!group || strstr(line, "/.."))
            continue;
        if (strncmp(line, "0::", 3) == 0)
            least = ht_min_u64(least, limit_above(d, "sys/fs/cgroup", "memory.max", group));
        else if (strstr(line, ":memory:"))
            least = ht_min_u64(least, limit_above(d, "sys/fs/cgroup/memory", "memory.limit_in_bytes", group));
    }
    if (f)
        fclose(f);
    return least;
}

void ht_doctor_cgroup(struct ht_doctor *d, int pid, uint64_t needed_bytes)
{
    uint64_t limit = memory_limit(d, pid);

    if (limit > INT64_MAX - (UINT64_C(1) << 20)) {
        ht_doctor_add(d, HT_DOCTOR_OK, "cgroup", "no control group limits memory");
    } else if (needed_bytes == 0) {
        ht_doctor_add(d, HT_DOCTOR_NOTE, "cgroup", "a control group limits memory to %s", ht_size_text(limit));
        ht_doctor_remedy(d, "keep dram= plus staging= below it, with 128 MiB to spare");
    } else if (limit < needed_bytes) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "cgroup",
                      "a control group limits memory to %s, and the daemon needs %s: the kernel may kill it",
                      ht_size_text(limit), ht_size_text(needed_bytes));
        ht_doctor_remedy(d, "raise the limit (MemoryMax= of the unit), or mount with less dram=");
    } else {
        ht_doctor_add(d, HT_DOCTOR_OK, "cgroup", "the daemon's memory limit of %s is enough", ht_size_text(limit));
    }
}

void ht_doctor_machine(struct ht_doctor *d)
{
    check_kernel(d);
    check_fuse(d);
    check_libfuse(d);
    check_passthrough(d);
    check_io_uring(d);
    check_huge_pages(d);
    check_memlock(d);
    check_clock(d);
}
