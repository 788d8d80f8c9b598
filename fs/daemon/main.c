/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the daemon `hitrain`: puts the layers together, mounts, and takes them apart again.
 *
 * Up: devices, store, participants registered with it, replay, participants started, mount. Down in
 * reverse; whatever step fails, the ones before it are undone. Nothing is written before the store is mounted.
 */
#include <unistd.h>

#include "fs/daemon/daemon_priv.h"
#include "tiering/base/event.h"
#include "tiering/api/background.h"
#include "tiering/api/stats.h"
#include <hitrain/version.h>

/* ---------------------------------------------------------------- progress */

#define PROGRESS_NS UINT64_C(2000000000) /* on a terminal */
#define PATIENCE_NS UINT64_C(5000000000) /* elsewhere: scripts compare the output of mount */

static void report_progress(void *ctx, uint64_t since_begin_ns)
{
    const struct ht_daemon *d = ctx;
    char read[32], log[32];
    uint64_t bytes = 0;

    for (unsigned i = 0; i < d->dev_count; i++) {
        struct ht_dev_counters c;
        ht_dev_counters(d->dev[i], &c);
        bytes += c.read_bytes;
    }
    ht_info("%s: replaying the log for %u s: %s read (the log has two copies of %s)", d->source,
            (unsigned)(since_begin_ns / 1000000000), ht_format_size(bytes, read, sizeof(read)),
            ht_format_size(ht_store_layout(d->store)->log_bytes, log, sizeof(log)));
}

/* ---------------------------------------------------------------------- up */

/* Errors of a device that died or was removed, not of one that another process holds. */
static bool is_gone(int error)
{
    return error == -ENOENT || error == -ENXIO || error == -ENODEV || error == -EIO || error == -ENOMEDIUM;
}

static int open_devices(struct ht_daemon *d)
{
    const struct ht_options *o = &d->options;

    for (unsigned i = 0; i < o->device_count; i++) {
        int rc = ht_dev_open(o->device[i], o->store.read_only ? HT_DEV_RDONLY : 0, &d->dev[d->dev_count]);
        if (rc && !(o->store.degraded && is_gone(rc)))
            return rc; /* ht_dev_open has logged the reason */
        d->dev_count += rc == 0;
    }
    return d->dev_count ? 0 : -ENODEV;
}

/* Threads start where the devices are, and so do those that they start. */
static void run_near_devices(const struct ht_daemon *d)
{
    const struct ht_nodes *nodes = ht_store_nodes(d->store);

    if (nodes->count && !ht_nodes_run_on(nodes, HT_NUMA_INDEX_ANY))
        ht_info("%s: this process may not run on processors of its devices' NUMA nodes", d->source);
}

static void report_unlocked(const struct ht_daemon *d, uint64_t all)
{
    char needed[32], allowed[32];
    uint64_t limit = ht_mem_lock_limit();

    ht_format_size(all, needed, sizeof(needed));
    if (limit == UINT64_MAX)
        ht_warn("%s: the system does not lock %s of memory for the DRAM tier and staging, which may be swapped out",
                d->source, needed);
    else
        ht_warn(
            "%s: memory of the DRAM tier or of staging is not locked and may be swapped out: %s are to be locked, the "
            "limit is %s; raise it (ulimit -l, LimitMEMLOCK= of a unit), or use less with dram= and staging=",
            d->source, needed, ht_format_size(limit, allowed, sizeof(allowed)));
}

/* Missing memory costs speed, or steadiness, and nothing else. */
static void report_memory(const struct ht_daemon *d)
{
    struct ht_store_stats st;

    ht_store_stats(d->store, &st);
    uint64_t all = st.dram_bytes - st.shm_bytes + st.staging_bytes;
    if (st.locked_bytes < all)
        report_unlocked(d, all);
    if (st.huge_bytes == 0)
        ht_info("%s: the system gives no huge pages to the DRAM tier (/sys/kernel/mm/transparent_hugepage/enabled, "
                "option tune): it is slower to fill",
                d->source);
}

static int make_participants(struct ht_daemon *d)
{
    const struct ht_ns_setup ns = {ht_ctl_parts(d->ctl).ns_hooks, getuid(), getgid()};
    const struct ht_optim_setup optim = {.threads = d->options.optim_threads,
                                         .no_replay = d->options.no_replay,
                                         .hooks = ht_ctl_parts(d->ctl).optim_hooks};
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = &optim}};
    int rc = ht_participants_new(d->store, &setup, &d->participants);

    d->optim = d->participants.of[HT_PARTICIPANT_OPT];
    if (rc == 0)
        ht_ctl_attach(d->ctl, d->participants.of[HT_PARTICIPANT_NS], d->optim);
    return rc;
}

static int open_store(struct ht_daemon *d)
{
    struct ht_store_opts opts = d->options.store;

    if (opts.numa_node == HT_NUMA_AUTO && !ht_nodes_several())
        opts.numa_node = HT_NUMA_OFF; /* a machine with one node has nothing to choose */
    if (opts.shm_bytes == HT_PASSTHROUGH_AUTO) {
        opts.shm_bytes = 0;
        opts.shm_lent = ht_fuse_may_pass();
    }
    int rc = ht_store_new(d->dev, d->dev_count, &opts, &d->store);

    if (rc == 0) {
        run_near_devices(d);
        report_memory(d);
    }
    if (rc == 0)
        rc = ht_ctl_new(d->store, d->options.fixed.len ? (const char *)d->options.fixed.data : "", &d->ctl);
    return rc ? rc : make_participants(d);
}

static void look_for_claims(void *ctx, uint64_t since_begin_ns)
{
    const struct ht_daemon *d = ctx;

    ht_store_look_for_claims(d->store);
}

static int mount_store(struct ht_daemon *d)
{
    struct ht_ticker progress;

    ht_ticker_begin(&progress, ht_log_on_terminal() ? PROGRESS_NS : PATIENCE_NS, report_progress, d);
    int rc = ht_store_mount(d->store);
    ht_ticker_end(&progress);
    if (rc == -EUCLEAN)
        ht_error("%s: the log is damaged; nothing was changed; run hitrain-fsck", d->source);
    if (rc)
        return rc;
    d->store_mounted = true;
    if (!d->options.store.read_only)
        ht_ticker_begin(&d->claims, HT_CLAIM_LOOK_MS * UINT64_C(1000000), look_for_claims, d);
    rc = ht_participants_start(&d->participants);
    d->optim_started = rc == 0;
    if (rc == 0)
        ht_store_reserves_complete(d->store);
    if (rc == 0)
        ht_ns_compress_begin(d->participants.of[HT_PARTICIPANT_NS], d->options.compress);
    if (rc == 0)
        rc = ht_ctl_start(d->ctl);
    return rc ? rc : ht_digests_begin(d->ctl);
}

static void on_ready(void *ctx)
{
    struct ht_daemon *d = ctx;

    const struct ht_event_about about = {.device = d->source};

    ht_daemon_detach();
    /* It is the first event: what a caller does once the command returned comes after it. */
    ht_event(HT_EVENT_MOUNTED, &about, "%s is mounted on %s", d->source, d->mountpoint);
    ht_daemon_ready();
}

static void on_ending(void *ctx)
{
    const struct ht_daemon *d = ctx;

    ht_store_trim_cancel(d->store);
}

static void stop_mount(void *ctx)
{
    struct ht_daemon *d = ctx;

    on_ending(d);
    ht_shutdown_begin(d);
    ht_fuse_stop(d->fuse);
}

static int mount_fuse(struct ht_daemon *d)
{
    const struct ht_fuse_opts opts = {
        .source = d->source,
        .mount_options = d->options.passed.len ? (const char *)d->options.passed.data : "",
        .allow_other = d->options.allow_other,
        .single_thread = d->options.single_thread,
        .debug = d->options.debug,
        .threads = d->options.fuse_threads,
        .ready = on_ready,
        .ending = on_ending,
        .ctx = d,
    };
    int rc = ht_fuse_new(d->ctl, &opts, &d->fuse);

    if (rc)
        return rc;
    ht_signals_defer();
    rc = ht_fuse_mount(d->fuse, d->mountpoint);
    ht_signals_direct(rc ? NULL : stop_mount, d);
    return rc ? rc : ht_remount_later_flags(d->mountpoint, &d->options);
}

/* -------------------------------------------------------------------- down */

/* No client is left. Models first: content outside models becomes durable with the store. */
static int make_durable(struct ht_daemon *d)
{
    if (d->ctl) {
        ht_recalls_end(d->ctl);
        ht_digests_end(d->ctl);
    }
    int models = d->optim_started ? ht_optim_finish(d->optim) : 0;
    if (d->optim_started)
        ht_optim_stop(d->optim);
    int rc = d->store_mounted ? ht_store_unmount(d->store) : 0;
    if (d->store_mounted && !d->options.store.read_only)
        ht_ticker_end(&d->claims);
    if (rc) {
        const struct ht_event_about about = {.device = d->source, .error = rc};
        ht_event(HT_EVENT_PAGES_LOST, &about, "%s: not everything could be written at the end: %s", d->source,
                 strerror(-rc));
    }
    return rc ? rc : models;
}

static int shut_down(struct ht_daemon *d)
{
    ht_shutdown_begin(d);
    if (d->fuse)
        ht_fuse_finish(d->fuse);
    ht_dump_server_end(); /* a new mount may have the same number */
    int rc = make_durable(d);
    ht_shutdown_end();
    if (d->fuse)
        ht_fuse_free(d->fuse);
    if (d->ctl)
        ht_ctl_detach(d->ctl);
    ht_participants_free(&d->participants);
    ht_ctl_free(d->ctl);
    if (d->store)
        ht_store_close(d->store);
    while (d->dev_count)
        ht_dev_close(d->dev[--d->dev_count]);
    return rc;
}

/* -------------------------------------------------------------------- main */

/* Memory is taken during the mount, when it is too late to refuse. */
static int check_memory(struct ht_daemon *d)
{
    const struct ht_store_opts *o = &d->options.store;
    uint64_t there = ht_mem_available();
    char dram[32], staging[32], available[32];

    if (o->dram_bytes <= there && o->staging_bytes <= there - o->dram_bytes)
        return 0;
    ht_error("dram=%s and staging=%s are more than the %s of memory that are available here",
             o->dram_bytes ? ht_format_size(o->dram_bytes, dram, sizeof(dram)) : "default",
             o->staging_bytes ? ht_format_size(o->staging_bytes, staging, sizeof(staging)) : "default",
             ht_format_size(there, available, sizeof(available)));
    return -ENOMEM;
}

static const char *remedy(int err)
{
    if (err == -ENOMEM)
        return "; ask for less memory with dram= and staging=";
    return err == -EMFILE || err == -ENFILE ? "; raise the limit of open files (ulimit -n)" : "";
}

static int wait_for_signals(struct ht_daemon *d)
{
    return ht_signals_start();
}

/* Lower layers log errors of the things they check; this function names the step for all others. */
static int begin(struct ht_daemon *d)
{
    static const struct {
        const char *name;
        int (*run)(struct ht_daemon *d);
    } steps[] = {{"waiting for signals", wait_for_signals},
                 {"finding memory", check_memory},
                 {"opening", open_devices},
                 {"reading the store", open_store},
                 {"mounting the store", mount_store},
                 {"mounting through FUSE", mount_fuse}};

    for (size_t i = 0; i < HT_ARRAY_SIZE(steps); i++) {
        int rc = steps[i].run(d);
        if (rc) {
            ht_error("%s is not mounted: %s failed: %s%s", d->source, steps[i].name, strerror(-rc), remedy(rc));
            return rc;
        }
    }
    return 0;
}

static int serve_mount(struct ht_daemon *d)
{
    ht_process_protect();
    if (d->options.tune)
        ht_process_tune();
    int rc = begin(d);
    if (rc == 0) {
        ht_dump_server_begin(d);
        ht_lingering_begin(d);
        rc = ht_fuse_loop(d->fuse);
        ht_lingering_end();
        if (rc)
            ht_error("%s: the connection to the kernel ended: %s", d->mountpoint, strerror(-rc));
    }
    ht_signals_end();
    int end = shut_down(d);
    return rc ? rc : end;
}

/* Checks that need nothing opened, so that the simplest mistakes are reported first. */
static int check_places(struct ht_daemon *d)
{
    int rc = ht_mountpoint_prepare(d->options.mountpoint, d->mountpoint);

    if (rc == 0)
        rc = ht_mountpoint_check_fuse();
    if (rc == 0 && !realpath(d->options.device[0], d->source)) {
        rc = -errno;
        ht_error("%s: %s", d->options.device[0], strerror(-rc));
    }
    return rc;
}

static int run_daemon(struct ht_daemon *d)
{
    if (d->options.remount)
        return ht_remount(&d->options);
    int rc = check_places(d);
    if (rc == 0 && !d->options.foreground) {
        fflush(NULL);
        rc = ht_daemon_fork();
        if (rc)
            ht_error("cannot become a daemon: %s", strerror(-rc));
    }
    return rc ? rc : serve_mount(d);
}

int main(int argc, char **argv)
{
    static struct ht_daemon d;

    ht_stdio_fds_open();
    int rc = ht_options_parse(argc, argv, geteuid() == 0, &d.options);
    if (rc == 0 && d.options.help)
        ht_options_usage();
    else if (rc == 0 && d.options.version)
        printf("hitrain %s (libfuse %s)\n", HT_VERSION, ht_fuse_library_version());
    else if (rc == 0)
        rc = run_daemon(&d);
    ht_options_free(&d.options);
    return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}
