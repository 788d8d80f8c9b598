/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the daemon `hitrain`: puts the layers together, mounts, and takes them apart again.
 *
 * Up: devices, store, names and optimizer registered with it, replay, names and optimizer started, mount. Down in reverse;
 * whatever step fails, the ones before it are undone. Nothing is written before the store is mounted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fs/ctl/ctl.h"
#include "fs/daemon.h"
#include "fs/ending.h"
#include "fs/fuse/session.h"
#include "fs/lingering.h"
#include "fs/mountpoint.h"
#include "fs/ns/ns.h"
#include "fs/options.h"
#include "fs/process.h"
#include "fs/remount.h"
#include "optim/optim.h"
#include "tiering/base/event.h"
#include "tiering/base/mem.h"
#include "tiering/base/std.h"
#include "tiering/base/ticker.h"
#include "tiering/store/store.h"
#include <hitrain/version.h>

struct daemon {
    struct ht_options options;
    char mountpoint[PATH_MAX], source[PATH_MAX];
    struct ht_dev *dev[HT_DEVICES_MAX];
    unsigned dev_count;
    struct ht_store *store;
    struct ht_ctl *ctl;
    struct ht_ns *ns;
    struct ht_optim *optim;
    struct ht_fuse *fuse;
    bool store_mounted, optim_started;
};

/* ---------------------------------------------------------------- progress */

#define PROGRESS_NS UINT64_C(2000000000) /* on a terminal */
#define PATIENCE_NS UINT64_C(5000000000) /* elsewhere: scripts compare what mount says */

static void tell_progress(void *ctx, uint64_t since_begin_ns)
{
    const struct daemon *d = ctx;
    char read[32], log[32];
    uint64_t bytes = 0;

    for (unsigned i = 0; i < d->dev_count; i++) {
        struct ht_dev_counters c;

        ht_dev_counters(d->dev[i], &c);
        bytes += c.read_bytes;
    }
    ht_info("%s: replaying the log for %u s: %s read (the log has two copies of %s)", d->source,
            (unsigned)(since_begin_ns / 1000000000), ht_format_size(bytes, read, sizeof(read)),
            ht_format_size(ht_store_super(d->store)->log_bytes, log, sizeof(log)));
}

/* ---------------------------------------------------------------------- up */

/* As a device is that died or was taken out; not one that somebody else holds. */
static bool is_gone(int error)
{
    return error == -ENOENT || error == -ENXIO || error == -ENODEV || error == -EIO || error == -ENOMEDIUM;
}

static int open_devices(struct daemon *d)
{
    const struct ht_options *o = &d->options;

    for (unsigned i = 0; i < o->device_count; i++) {
        int r = ht_dev_open(o->device[i], o->read_only ? HT_DEV_RDONLY : 0, &d->dev[d->dev_count]);

        if (r && !(o->degraded && is_gone(r)))
            return r; /* said why */
        d->dev_count += r == 0;
    }
    return d->dev_count ? 0 : -ENODEV;
}

/* A machine with one node has nothing to choose. */
static int numa_node(const struct daemon *d)
{
    return d->options.numa_node == HT_NUMA_AUTO && !ht_nodes_several() ? HT_NUMA_OFF : d->options.numa_node;
}

/* Threads start where the devices are, and so do those that they start. */
static void run_near_devices(const struct daemon *d)
{
    const struct ht_nodes *nodes = ht_store_nodes(d->store);

    if (nodes->count && !ht_nodes_run_on(nodes, HT_NEAR_ANY))
        ht_info("%s: this process may not run on processors of its devices' NUMA nodes", d->source);
}

static void tell_unlocked(const struct daemon *d, uint64_t all)
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

/* What was asked for and is not there costs speed, or calm, and nothing else. */
static void tell_memory(const struct daemon *d)
{
    struct ht_store_stats st;
    uint64_t all;

    ht_store_stats(d->store, &st);
    all = st.dram_bytes - st.handout_bytes + st.staging_bytes;
    if (st.locked_bytes < all)
        tell_unlocked(d, all);
    if (st.huge_bytes == 0)
        ht_info("%s: the system gives no huge pages to the DRAM tier (/sys/kernel/mm/transparent_hugepage/enabled, "
                "option tune): it is slower to fill",
                d->source);
}

static int open_store(struct daemon *d)
{
    const struct ht_store_opts opts = {
        .dram_bytes = d->options.dram_bytes,
        .staging_bytes = d->options.staging_bytes,
        .handout_bytes = d->options.handout_bytes,
        .scrub_rate_bytes = d->options.scrub_rate_bytes,
        .commit_ms = d->options.commit_ms,
        .read_only = d->options.read_only,
        .degraded = d->options.degraded,
        .answer_ms = d->options.answer_s * 1000,
        .numa_node = numa_node(d),
    };
    int r = ht_store_new(d->dev, d->dev_count, &opts, &d->store);

    if (r == 0) {
        run_near_devices(d);
        tell_memory(d);
    }
    if (r == 0)
        r = ht_ctl_new(d->store, &d->ctl);
    if (r == 0)
        r = ht_ns_new(d->store, ht_ctl_ns_hooks(d->ctl), getuid(), getgid(), &d->ns);
    if (r == 0)
        r = ht_optim_new(d->store, d->options.optim_threads, ht_ctl_optim_hooks(d->ctl), &d->optim);
    if (r == 0)
        ht_ctl_attach(d->ctl, d->ns, d->optim);
    return r;
}

static int mount_store(struct daemon *d)
{
    struct ht_ticker progress;
    int r;

    ht_ticker_begin(&progress, ht_log_on_terminal() ? PROGRESS_NS : PATIENCE_NS, tell_progress, d);
    r = ht_store_mount(d->store);
    ht_ticker_end(&progress);
    if (r == -EUCLEAN)
        ht_error("%s: the log is damaged; nothing was changed; run hitrain-fsck", d->source);
    if (r)
        return r;
    d->store_mounted = true;
    r = ht_ns_start(d->ns);
    if (r == 0)
        r = ht_optim_start(d->optim);
    d->optim_started = r == 0;
    return r ? r : ht_ctl_start(d->ctl);
}

static void on_ready(void *ctx)
{
    struct daemon *d = ctx;

    const struct ht_event_about about = {.device = d->source};

    ht_daemon_ready();
    ht_event(HT_EVENT_MOUNTED, &about, "%s is mounted on %s", d->source, d->mountpoint);
}

static void detach_mount(void *ctx)
{
    const struct daemon *d = ctx;

    if (d->fuse)
        ht_fuse_detach(d->fuse);
}

static void begin_ending(struct daemon *d)
{
    const struct ht_ending ending = {.dev = d->dev,
                                     .count = d->dev_count,
                                     .answer_s = d->options.answer_s ? d->options.answer_s : HT_DEVICE_ANSWER_S,
                                     .detach = detach_mount,
                                     .ctx = d};

    ht_ending_begin(&ending);
}

static void stop_mount(void *ctx)
{
    struct daemon *d = ctx;

    begin_ending(d);
    ht_fuse_stop(d->fuse);
}

static int mount_fuse(struct daemon *d)
{
    const struct ht_fuse_opts opts = {
        .source = d->source,
        .mount_options = d->options.passed.len ? (const char *)d->options.passed.data : "",
        .allow_other = d->options.allow_other,
        .single_thread = d->options.single_thread,
        .debug = d->options.debug,
        .threads = d->options.fuse_threads,
        .ready = on_ready,
        .ctx = d,
    };
    int r = ht_fuse_new(d->ctl, &opts, &d->fuse);

    if (r)
        return r;
    ht_signals_defer();
    r = ht_fuse_mount(d->fuse, d->mountpoint);
    ht_signals_direct(r ? NULL : stop_mount, d);
    return r ? r : ht_remount_later_flags(d->mountpoint, &d->options);
}

/* -------------------------------------------------------------------- down */

/* No client is left. Models first: what is outside of them becomes durable with the store. */
static int make_durable(struct daemon *d)
{
    int models = d->optim_started ? ht_optim_finish(d->optim) : 0, r;

    if (d->optim_started)
        ht_optim_stop(d->optim);
    r = d->store_mounted ? ht_store_unmount(d->store) : 0;
    if (r) {
        const struct ht_event_about about = {.device = d->source, .error = r};

        ht_event(HT_EVENT_PAGES_LOST, &about, "%s: not everything could be written at the end: %s", d->source,
                 strerror(-r));
    }
    return r ? r : models;
}

static int shut_down(struct daemon *d)
{
    int r;

    begin_ending(d);
    if (d->fuse)
        ht_fuse_finish(d->fuse);
    r = make_durable(d);
    ht_ending_end();
    if (d->fuse)
        ht_fuse_free(d->fuse);
    if (d->ctl)
        ht_ctl_detach(d->ctl);
    if (d->optim)
        ht_optim_free(d->optim);
    if (d->ns)
        ht_ns_free(d->ns);
    ht_ctl_free(d->ctl);
    if (d->store)
        ht_store_close(d->store);
    while (d->dev_count)
        ht_dev_close(d->dev[--d->dev_count]);
    return r;
}

/* -------------------------------------------------------------------- main */

/* Memory is taken while the mount is in use already, when it is too late to say no. */
static int check_memory(const struct ht_options *o)
{
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
    switch (-err) {
    case ENOMEM:
        return "; ask for less memory with dram= and staging=";
    case EMFILE:
    case ENFILE:
        return "; raise the limit of open files (ulimit -n)";
    default:
        return "";
    }
}

/* Lower layers say what is wrong with what they look at; this is for what nobody has named. */
static int begin(struct daemon *d)
{
    const char *step = "waiting for signals";
    int r = ht_signals_start();

    if (r == 0) {
        step = "finding memory";
        r = check_memory(&d->options);
    }
    if (r == 0) {
        step = "opening";
        r = open_devices(d);
    }
    if (r == 0) {
        step = "reading the store";
        r = open_store(d);
    }
    if (r == 0) {
        step = "mounting the store";
        r = mount_store(d);
    }
    if (r == 0) {
        step = "mounting through FUSE";
        r = mount_fuse(d);
    }
    if (r)
        ht_error("%s is not mounted: %s failed: %s%s", d->source, step, strerror(-r), remedy(r));
    return r;
}

static int serve(struct daemon *d)
{
    int r, end;

    ht_process_protect();
    if (d->options.tune)
        ht_process_tune();
    r = begin(d);
    if (r == 0) {
        ht_lingering_begin(d->source, d->mountpoint);
        r = ht_fuse_loop(d->fuse);
        ht_lingering_end();
        if (r)
            ht_error("%s: the connection to the kernel ended: %s", d->mountpoint, strerror(-r));
    }
    ht_signals_end();
    end = shut_down(d);
    return r ? r : end;
}

/* Checks that need nothing opened, so that the simplest mistakes are told first. */
static int check_places(struct daemon *d)
{
    int r = ht_mountpoint_prepare(d->options.mountpoint, d->mountpoint);

    if (r == 0)
        r = ht_mountpoint_check_fuse();
    if (r == 0 && !realpath(d->options.device[0], d->source)) {
        r = -errno;
        ht_error("%s: %s", d->options.device[0], strerror(-r));
    }
    return r;
}

static int run(struct daemon *d)
{
    int r;

    if (d->options.remount)
        return ht_remount(&d->options);
    r = check_places(d);
    if (r == 0 && !d->options.foreground) {
        fflush(NULL);
        r = ht_daemon_fork();
        if (r)
            ht_error("cannot become a daemon: %s", strerror(-r));
    }
    return r ? r : serve(d);
}

int main(int argc, char **argv)
{
    static struct daemon d;
    int r;

    ht_std_open();
    r = ht_options_parse(argc, argv, geteuid() == 0, &d.options);
    if (r == 0 && d.options.help)
        ht_options_usage();
    else if (r == 0 && d.options.version)
        printf("hitrain %s (libfuse %s)\n", HT_VERSION, ht_fuse_library_version());
    else if (r == 0)
        r = run(&d);
    ht_options_free(&d.options);
    return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
