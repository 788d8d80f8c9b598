/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics.c - every figure that clients can read: one row each, whether as an attribute alone, as a line of the
 * attribute stats, or as a metric. A new figure is one row here. Counts of events have a row for each code, made from
 * the table in tiering/base/event.c.
 *
 * Figures are a snapshot: gathered into one struct, then written out. No lock is held in between, so figures of
 * different layers may be some microseconds apart.
 */
#include "fs/ctl/events.h"
#include "tiering/api/stats.h"

#include <limits.h>
#include <math.h>

struct metrics {
    struct ht_store_stats store;
    struct ht_ns_stats ns;
    struct ht_root_stat root;
    struct ht_obj_stat file;
    struct ht_scrub_stats scrub;
    struct ht_plan_stats plan;
    uint64_t meta_bytes;
    uint64_t file_state_bytes, file_state_bits;
    uint64_t root_cold_bytes;
    struct ht_traffic traffic;
    uint64_t events[HT_LOG_LEVELS];
};

enum scope { OF_STORE = 1, OF_ROOT = 2, OF_FILE = 4 };
enum kind { GAUGE, COUNTER, SUM /* of all devices; metrics show each device */, IS_SET /* metrics: 1, or 0 for 0 */ };

struct row {
    const char *word;
    uint8_t scope; /* one of enum scope */
    uint8_t kind;
    uint16_t offset;
    const char *help;
};

#define ROW(scope, word, kind, field, help)                      \
    {                                                            \
        word, scope, kind, offsetof(struct metrics, field), help \
    }
#define STORE(...) ROW(OF_STORE, __VA_ARGS__)
#define ROOT(...) ROW(OF_ROOT, __VA_ARGS__)
#define FILE_(...) ROW(OF_FILE, __VA_ARGS__)

static const struct row rows[] = {
    STORE("mount_param_read_bytes", COUNTER, traffic.read_bytes[HT_TRAFFIC_PARAM],
          "Parameter bytes read through the mount."),
    STORE("mount_param_written_bytes", COUNTER, traffic.written_bytes[HT_TRAFFIC_PARAM],
          "Parameter bytes written through the mount."),
    STORE("mount_grad_read_bytes", COUNTER, traffic.read_bytes[HT_TRAFFIC_GRAD],
          "Gradient bytes read through the mount."),
    STORE("mount_grad_written_bytes", COUNTER, traffic.written_bytes[HT_TRAFFIC_GRAD],
          "Gradient bytes written through the mount."),
    STORE("mount_state_read_bytes", COUNTER, traffic.read_bytes[HT_TRAFFIC_STATE],
          "Optimizer state bytes read through the mount."),
    STORE("mount_state_written_bytes", COUNTER, traffic.written_bytes[HT_TRAFFIC_STATE],
          "Optimizer state bytes written through the mount."),
    STORE("mount_other_read_bytes", COUNTER, traffic.read_bytes[HT_TRAFFIC_OTHER],
          "Other bytes read through the mount."),
    STORE("mount_other_written_bytes", COUNTER, traffic.written_bytes[HT_TRAFFIC_OTHER],
          "Other bytes written through the mount."),
    STORE("mount_requests", COUNTER, traffic.requests, "Requests of the kernel."),
    STORE("mount_parked_reads", COUNTER, traffic.parked_reads, "Reads that waited for an update of their bytes."),
    STORE("mount_workers", GAUGE, traffic.workers,
          "Threads that take requests: more than usual while a device holds some."),
    STORE("mount_job_threads", GAUGE, traffic.job_threads, "Threads for requests that may wait for steps and updates."),
    STORE("mount_jobs_left", GAUGE, traffic.jobs_left,
          "Of these, aborts that have ended and wait for directories of the kernel."),

    STORE("total_bytes", GAUGE, store.total_bytes, "Space for data on all devices."),
    STORE("free_bytes", GAUGE, store.free_bytes, "Space that is not in use."),
    STORE("available_bytes", GAUGE, store.available_bytes, "Free space less reservations."),
    STORE("reserved_bytes", GAUGE, store.reserved_bytes,
          "Free space reserved for dirty content, the next step, and steps to be logged."),
    STORE("pending_free_bytes", GAUGE, store.pending_free_bytes,
          "Freed space that is reusable once the log is durable."),
    STORE("objects", GAUGE, store.objects, "Tensors, states and files."),
    STORE("chunks", GAUGE, store.chunks, "Chunks of all objects."),
    STORE("lost_chunks", GAUGE, store.lost_chunks, "Chunks that hitrain-fsck has marked lost: reading them is EIO."),
    STORE("inodes", GAUGE, ns.inodes, "Inodes."),
    STORE("entries", GAUGE, ns.entries, "Directory entries."),
    STORE("xattrs", GAUGE, ns.xattrs, "Extended attributes."),

    STORE("dram_bytes", GAUGE, store.dram_bytes, "DRAM tier."),
    STORE("resident_bytes", GAUGE, store.dram_used_bytes, "Used part of the DRAM tier."),
    STORE("dirty_bytes", GAUGE, store.dram_dirty_bytes, "Part of the DRAM tier newer than the devices."),
    STORE("protected_bytes", GAUGE, store.dram_protected_bytes,
          "Part of the DRAM tier, in whole MiB, that holds what updates work on: the protected set."),
    STORE("protectable_bytes", GAUGE, store.dram_protectable_bytes,
          "What the protected set may take now: less while gradients find no room beside it."),
    STORE("pinned_bytes", GAUGE, store.dram_pinned_bytes,
          "Part of the DRAM tier that holds files with pin=dram or tier=dram."),
    STORE("passthrough_bytes", GAUGE, store.shm_bytes, "Part of the DRAM tier for passthrough files."),
    STORE("passthrough_used_bytes", GAUGE, store.shm_used_bytes, "Used part of that."),
    STORE("passthrough_files", GAUGE, store.shm_count, "Files in it."),
    STORE("passthrough_opens", COUNTER, traffic.passthrough_opens, "Opens of passthrough files."),
    STORE("passthrough_fallbacks", COUNTER, traffic.passthrough_fallbacks,
          "Opens of such files that passthrough was not possible for."),
    STORE("workingset_bytes", GAUGE, store.dram_workingset_bytes,
          "Part of the DRAM tier that holds the working set: images that were refetched after their eviction."),
    STORE("staging_bytes", GAUGE, store.staging_bytes, "Staging pool."),
    STORE("staging_used_bytes", GAUGE, store.staging_used_bytes, "Used part of the staging pool."),
    STORE("locked_bytes", GAUGE, store.locked_bytes,
          "Memory of tier and staging that cannot be swapped out, as mapped."),
    STORE("huge_bytes", GAUGE, store.huge_bytes, "Memory of tier and staging in huge pages, when it was populated."),
    STORE("rings", GAUGE, store.io.rings, "Threads that use devices: each has one ring of io_uring."),
    STORE("ring_mode", GAUGE, store.io.mode,
          "How completions arrive: 0 by interrupts, 1 by fewer interrupts, 2 deferred to the thread that waits."),
    STORE("registered_devices", GAUGE, store.io.devices, "Devices registered with each ring."),
    STORE("registered_bytes", GAUGE, store.io.memory_bytes,
          "Memory registered with the rings: tier and staging, or staging."),
    STORE(
        "meta_bytes", GAUGE, meta_bytes,
        "Memory for objects, chunks, optimizer ranges, descriptors of the tier, maps of devices and buffers of the log."),
    STORE("names_bytes", GAUGE, ns.meta_bytes, "Memory for names and attributes."),
    STORE("heap_spare_bytes", GAUGE, store.heap_spare_bytes,
          "Memory that other memory left behind, and that the next takes: some of it is resident."),

    STORE("hits", COUNTER, store.hits, "Chunk accesses served from DRAM."),
    STORE("misses", COUNTER, store.misses, "Chunk accesses that needed a device."),
    STORE("evictions", COUNTER, store.evictions, "Images dropped to make room."),
    STORE("read_ahead_chunks", COUNTER, store.readahead_chunks, "Chunks read ahead of sequential readers."),
    STORE("read_ahead_hits", COUNTER, store.readahead_hits, "Readahead chunks that were used."),
    STORE("read_ahead_wasted", COUNTER, store.readahead_wasted, "Readahead chunks that were evicted unused."),
    STORE("plan_step_ns", GAUGE, plan.figures.step_ns, "Length of the step that is planned, nanoseconds; 0: no plan."),
    STORE("plan_bytes", GAUGE, plan.figures.bytes, "Content that such a step uses."),
    STORE("plan_hits", COUNTER, plan.hits, "Accesses that a plan had at their time."),
    STORE("plan_strangers", COUNTER, plan.strangers, "Accesses that a plan did not have at their time."),
    STORE("plans_made", COUNTER, plan.made, "Plans of steps."),
    STORE("plans_dropped", COUNTER, plan.dropped,
          "Plans that two steps did not match, or that a change of clipping ended."),
    STORE("moved_bytes", COUNTER, store.moved_bytes,
          "Parameters and state that an update wrote to another device than before."),
    STORE("scratch_written_bytes", COUNTER, store.scratch_written_bytes,
          "Bytes of scratch files and of gradients that devices got because memory was short."),
    STORE("scratch_dropped_bytes", COUNTER, store.scratch_dropped_bytes,
          "Bytes of scratch files and of gradients that ended before any device got them."),
    STORE("room_waits", COUNTER, store.room_waits, "Requests that waited for room in the DRAM tier."),
    STORE("writebacks", COUNTER, store.writebacks, "Images written to devices."),
    STORE("device_read_bytes", SUM, store.device_read_bytes, "Bytes read from devices."),
    STORE("device_written_bytes", SUM, store.device_written_bytes, "Bytes written to devices."),
    STORE("device_discarded_bytes", SUM, store.device_discarded_bytes, "Free space that devices have discarded."),
    STORE("day_written_bytes", GAUGE, store.day_written_bytes,
          "Bytes written to devices in the last 24 hours, since the mount."),
    STORE("endurance_bytes", GAUGE, store.endurance_bytes, "Budget of bytes per day; 0: none."),
    STORE("device_flushes", SUM, store.device_flushes, "Cache flushes of devices."),
    STORE("checksum_errors", COUNTER, store.checksum_errors, "Chunks whose bytes differ from the written ones."),
    STORE("read_errors", COUNTER, store.read_errors, "Reads that a device failed."),
    STORE("write_errors", COUNTER, store.write_errors, "Writes that a device failed."),
    STORE("cold_bytes", GAUGE, store.cold_bytes, "Content that lies in the vault."),
    STORE("cold_read_bytes", COUNTER, store.cold_read_bytes, "Bytes that came from the vault."),
    STORE("cold_waits", COUNTER, store.cold_waits, "Reads and writes that waited for the vault."),
    STORE("cold_wait_ns", COUNTER, store.cold_wait_ns, "How long these waited, nanoseconds."),
    STORE("scrub_state", GAUGE, scrub.state, "0 no scrub yet, 1 running, 2 complete, 3 stopped, 4 failed."),
    STORE("scrub_run_bytes", GAUGE, scrub.run_bytes, "Read by the scrub that runs, or ran last."),
    STORE("scrub_run_total_bytes", GAUGE, scrub.run_total_bytes, "Bytes that this scrub has to read."),
    STORE("scrub_run_ns", GAUGE, scrub.run_ns, "How long that scrub has run, nanoseconds."),
    STORE("scrub_run_found", GAUGE, scrub.run_found, "Bad copies and chunks that it found."),
    STORE("scrub_run_repaired", GAUGE, scrub.run_repaired, "Of these, repaired."),
    STORE("scrub_runs", COUNTER, scrub.runs, "Complete scrubs."),
    STORE("scrub_read_bytes", COUNTER, scrub.bytes, "Bytes read by scrubs."),
    STORE("scrub_found", COUNTER, scrub.found, "Bad copies and chunks that scrubs found."),
    STORE("scrub_repaired", COUNTER, scrub.repaired, "Of these, repaired."),
    STORE("commits", COUNTER, store.commits, "Transactions that a caller waited for."),

    STORE("log_bytes", GAUGE, store.log.log_bytes, "Size of the metadata log."),
    STORE("log_used_bytes", GAUGE, store.log.used_bytes, "Used part of the metadata log."),
    STORE("log_reserved_bytes", GAUGE, store.log.reserved_bytes, "Log bytes that live metadata needs."),
    STORE("log_reserve_limit_bytes", GAUGE, store.log.reserve_limit_bytes, "Most that live metadata may need."),
    STORE("log_written_bytes", COUNTER, store.log.bytes_written, "Bytes written to the log."),
    STORE("log_frames", COUNTER, store.log.frames_written, "Frames written to the log."),
    STORE("log_groups", COUNTER, store.log.groups, "Transactions written to the log."),
    STORE("log_checkpoints", COUNTER, store.log.checkpoints, "Checkpoints of the log."),

    STORE("error_events", COUNTER, events[HT_LOG_ERROR], "Events since the mount that are errors."),
    STORE("warn_events", COUNTER, events[HT_LOG_WARN], "Events since the mount that are warnings."),

    ROOT("step", GAUGE, root.step, "Finished steps."),
    ROOT("durable_step", GAUGE, root.durable_step, "Durable steps."),
    ROOT("logged_steps", GAUGE, root.logged_steps,
         "Of these, the steps whose gradients are stored in place of their result."),
    ROOT("logged_bytes", GAUGE, root.logged_bytes, "Bytes of logged steps, with those that are kept for readers."),
    ROOT("redo_reserved_bytes", GAUGE, root.redo_reserved_bytes,
         "Space reserved for the gradients of the steps until the next full one."),
    ROOT("delta_bytes", GAUGE, root.delta_bytes, "Bytes of the changes that the last steps left for readers."),
    ROOT("delta_lineage", IS_SET, root.delta_lineage, "1. As an attribute, the lineage of these changes."),
    ROOT("replay_steps", GAUGE, root.replay_steps, "Logged steps that are being computed again."),
    ROOT("replay_steps_left", GAUGE, root.replay_steps_left, "Of these, the steps to come."),
    ROOT("replay_seconds_left", GAUGE, root.replay_seconds_left,
         "How long these take, an estimate; 0 until one step has ended."),
    ROOT("step_open", IS_SET, root.step_open, "1 while a step is open. As an attribute, the step's number."),
    ROOT("parameters", GAUGE, root.parameters, "Parameters with optimizer state."),
    ROOT("state_bytes", GAUGE, root.state_bytes, "Optimizer state."),
    ROOT("grad_bytes", COUNTER, root.grad_bytes, "Gradient bytes accepted."),
    ROOT("updated_elements", COUNTER, root.updated_elements, "Elements updated."),
    ROOT("added_elements", COUNTER, root.added_elements, "Gradient elements added to sums (accumulate)."),
    ROOT("sum_resident_bytes", GAUGE, root.sum_resident_bytes, "Sums of gradients in the DRAM tier."),
    ROOT("sum_stored_bytes", GAUGE, root.sum_stored_bytes, "Sums of gradients on devices, because DRAM has no room."),
    ROOT("nonfinite", COUNTER, root.nonfinite,
         "Gradient elements that were NaN or infinite; elements of the sum where gradients accumulate."),
    ROOT("skipped_steps", COUNTER, root.skipped, "Steps that changed nothing because a gradient was not finite."),
    ROOT("clipped_steps", COUNTER, root.clipped, "Steps whose gradient was longer than max_grad_norm."),
    ROOT("cold_bytes", GAUGE, root_cold_bytes, "Content of the model that lies in the vault."),
    ROOT("step_written_bytes", GAUGE, root.step_written_bytes,
         "Bytes of the model written to devices between the ends of the last two steps."),
    ROOT("update_ns", COUNTER, root.update_ns, "Worker time spent in updates, nanoseconds."),
    ROOT("commit_ns", COUNTER, root.commit_ns, "Time spent in commits, nanoseconds."),

    FILE_("logical_bytes", GAUGE, file.size, "Size."),
    FILE_("stored_bytes", GAUGE, file.stored_bytes, "Space on devices."),
    FILE_("cold_bytes", GAUGE, file.cold_bytes, "Stored bytes in the vault."),
    FILE_("cold_waits", COUNTER, file.cold_waits, "Reads and writes that waited for the vault."),
    FILE_("resident_bytes", GAUGE, file.resident_bytes, "In the DRAM tier."),
    FILE_("dirty_bytes", GAUGE, file.dirty_bytes, "In the DRAM tier and newer than the devices."),
    FILE_("chunk_bytes", GAUGE, file.chunk_bytes, "Size of a chunk."),
    FILE_("state_stored_bytes", GAUGE, file_state_bytes, "Space of its optimizer state on devices."),
    FILE_("state_bits", GAUGE, file_state_bits, "Bits of an element of its optimizer state; 0: it has none."),
    FILE_("hits", COUNTER, file.hits, "Chunk accesses served from DRAM."),
    FILE_("misses", COUNTER, file.misses, "Chunk accesses that needed a device."),
    FILE_("device_read_bytes", COUNTER, file.device_read_bytes, "Bytes read from devices."),
    FILE_("device_written_bytes", COUNTER, file.device_written_bytes, "Bytes written to devices."),
};

/* ------------------------------------------------------------------ gather */

/* The figures of an inode: a set of scopes, 0 for most directories; *out_root: the model root of OF_ROOT. */
static unsigned scopes_of(struct ht_ctl *c, uint64_t ino, uint64_t *out_root)
{
    unsigned scopes = ino == HT_NS_ROOT_INO ? OF_STORE : 0;
    struct ht_ns_tensor t;
    struct stat st;

    *out_root = 0;
    if (ht_ns_getattr(c->ns, ino, &st) || ht_ns_tensor(c->ns, ino, &t))
        return scopes;
    if (S_ISREG(st.st_mode))
        return scopes | OF_FILE;
    *out_root = t.root;
    return t.root && S_ISDIR(st.st_mode) ? scopes | OF_ROOT : scopes;
}

static void gather_store(struct ht_ctl *c, struct metrics *f)
{
    const _Atomic uint64_t *from = (const _Atomic uint64_t *)&c->traffic; /* it has nothing else */
    _Atomic uint64_t *to = (_Atomic uint64_t *)&f->traffic;
    uint64_t events[HT_EVENT_CODES];

    ht_event_log_counts(c->events, events);
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        f->events[ht_event_kinds[i].level] += events[i];
    ht_store_stats(c->store, &f->store);
    ht_store_scrub_stats(c->store, &f->scrub);
    ht_store_plan_stats(c->store, &f->plan);
    ht_ns_stats(c->ns, &f->ns);
    f->meta_bytes = f->store.meta_bytes + f->store.working_bytes + ht_optim_meta_bytes(c->optim);
    for (size_t i = 0; i < sizeof(c->traffic) / sizeof(*from); i++)
        to[i] = from[i];
}

static int gather_file(struct ht_ctl *c, uint64_t ino, struct metrics *f)
{
    struct ht_obj *obj;
    int rc = ht_ns_open(c->ns, ino, &obj);

    if (rc)
        return rc;
    ht_obj_stat(obj, &f->file);
    ht_ns_close(c->ns, ino);
    f->file_state_bytes = ht_optim_state_stored(c->optim, ino);
    f->file_state_bits = ht_optim_state_bits(c->optim, ino);
    return 0;
}

/* Is it added over the sums of a root? */
static bool is_of_sums(const struct row *row)
{
    return row->offset == offsetof(struct metrics, root.sum_resident_bytes) ||
        row->offset == offsetof(struct metrics, root.sum_stored_bytes);
}

static int gather(struct ht_ctl *c, unsigned scopes, uint64_t root, uint64_t ino, bool sums, struct metrics *f)
{
    int rc = 0;

    memset(f, 0, sizeof(*f));
    if (scopes & OF_STORE)
        gather_store(c, f);
    if (scopes & OF_ROOT)
        rc = ht_optim_root_stat(c->optim, root, &f->root);
    if (scopes & OF_ROOT)
        f->root_cold_bytes = ht_scope_cold_bytes(c->store, root);
    if (rc == 0 && (scopes & OF_ROOT) && sums)
        ht_optim_root_sums(c->optim, root, &f->root);
    if (rc == 0 && (scopes & OF_FILE))
        rc = gather_file(c, ino, f);
    return rc;
}

/* ------------------------------------------------------------------ events */

#define EVENTS_PREFIX "events_"
enum { EVENT_WORD_BYTES = 64 };

/* write-error is counted as events_write_error. */
static void event_word(unsigned code, char out[EVENT_WORD_BYTES])
{
    snprintf(out, EVENT_WORD_BYTES, EVENTS_PREFIX "%s", ht_event_kinds[code].word);
    for (char *p = out; *p; p++)
        if (*p == '-')
            *p = '_';
}

/* Its code; -1: no event is counted as this. */
static int find_event(const char *word)
{
    char known[EVENT_WORD_BYTES];

    for (unsigned i = 0; i < HT_EVENT_CODES; i++) {
        event_word(i, known);
        if (strcmp(known, word) == 0)
            return (int)i;
    }
    return -1;
}

static void event_lines(struct ht_ctl *c, struct ht_buf *out)
{
    uint64_t count[HT_EVENT_CODES];
    char word[EVENT_WORD_BYTES];

    ht_event_log_counts(c->events, count);
    for (unsigned i = 0; i < HT_EVENT_CODES; i++) {
        event_word(i, word);
        ht_buf_printf(out, "%s=%llu\n", word, (unsigned long long)count[i]);
    }
}

static void event_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    uint64_t count[HT_EVENT_CODES];

    ht_event_log_counts(c->events, count);
    ht_metrics_head(out, "hitrain_events", "counter", "Events since the mount, by code.");
    for (unsigned i = 0; i < HT_EVENT_CODES; i++)
        ht_buf_printf(out, "hitrain_events_total{code=\"%s\",level=\"%s\"} %llu\n", ht_event_kinds[i].word,
                      ht_log_level_word(ht_event_kinds[i].level), (unsigned long long)count[i]);
}

/* -------------------------------------------------------------- attributes */

static const struct row *find_row(const char *word, unsigned scopes)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if ((rows[i].scope & scopes) && strcmp(rows[i].word, word) == 0)
            return &rows[i];
    return NULL;
}

bool ht_metrics_known(const char *word)
{
    return find_row(word, OF_STORE | OF_ROOT | OF_FILE) || find_event(word) >= 0;
}

int ht_metrics_one(struct ht_ctl *c, uint64_t ino, const char *word, uint64_t *out)
{
    uint64_t events[HT_EVENT_CODES];
    struct metrics f;
    uint64_t root;
    unsigned scopes = scopes_of(c, ino, &root);

    const struct row *row = find_row(word, scopes);
    if (row) {
        int rc = gather(c, row->scope, root, ino, is_of_sums(row), &f);
        *out = rc ? 0 : ht_metrics_value(&f, row->offset);
        return rc;
    }
    int code = scopes & OF_STORE ? find_event(word) : -1;
    if (code < 0)
        return -ENODATA;
    ht_event_log_counts(c->events, events);
    *out = events[code];
    return 0;
}

/* The words in force for the next step of a parameter, or of files below a directory without words of their own. */
static void effective_words(struct ht_ctl *c, uint64_t ino, unsigned scopes, uint64_t root, struct ht_buf *out)
{
    uint64_t model = scopes & OF_FILE ? ht_ctl_param(c, ino) : root;
    char text[HT_OPTIM_CONFIG_TEXT_MAX], err[HT_OPTIM_ERROR_MAX];
    struct ht_optim_config config;

    if (!model)
        return;
    if (ht_optim_words_of(c->optim, model, ino, &config, err) == 0)
        ht_optim_config_text(&config, text, sizeof(text));
    else
        snprintf(text, sizeof(text), "refused: %s", err);
    ht_buf_printf(out, "optimizer=%s\n", text);
}

int ht_metrics_lines(struct ht_ctl *c, uint64_t ino, struct ht_buf *out)
{
    struct metrics f;
    uint64_t root;
    unsigned scopes = scopes_of(c, ino, &root);
    int rc = gather(c, scopes, root, ino, true, &f);

    if (rc)
        return rc;
    if (!scopes)
        return -ENODATA;
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if (rows[i].scope & scopes)
            ht_buf_printf(out, "%s=%llu\n", rows[i].word, (unsigned long long)ht_metrics_value(&f, rows[i].offset));
    effective_words(c, ino, scopes, root, out);
    if (f.root.claimed_by[0])
        ht_buf_printf(out, "claimed_by=%s pid=%d\n", f.root.claimed_by, f.root.claimed_pid);
    if (scopes & OF_STORE) {
        ht_node_lines(c, out);
        event_lines(c, out);
    }
    return out->err;
}

/* ------------------------------------------------------------- OpenMetrics */

enum { ROOTS_SHOWN_MAX = 256 };

struct root_metrics {
    char path[PATH_MAX], label[2 * PATH_MAX]; /* programs open the model by the path */
    struct metrics f;
};

struct root_list {
    struct ht_ctl *ctl;
    const struct ht_caller *caller;
    struct ht_buf found; /* struct root_metrics, one after the other */
    unsigned count;
};

static int add_root(void *ctx, uint64_t ino)
{
    struct root_list *list = ctx;
    struct root_metrics r;

    if (list->count == ROOTS_SHOWN_MAX || gather(list->ctl, OF_ROOT, ino, ino, true, &r.f))
        return 0;
    r.path[0] = '/';
    ht_ns_path(list->ctl->ns, ino, r.path + 1, sizeof(r.path) - 1);
    ht_metrics_label(r.path, r.label, sizeof(r.label));
    ht_buf_put(&list->found, &r, sizeof(r));
    list->count += !list->found.err;
    return list->found.err;
}

/* A path names entries of directories that some users may not search. */
static int add_if_known(void *ctx, uint64_t ino)
{
    const struct root_list *list = ctx;

    return ht_ctl_may_find(list->ctl, ino, list->caller) ? add_root(ctx, ino) : 0;
}

/* Takes the caller's groups once for all roots. */
static int add_known(struct root_list *list, const struct ht_caller *caller)
{
    struct ht_person person;
    int rc = ht_person_init(&person, caller);

    if (rc)
        return rc;
    struct ht_caller known = ht_person_caller(&person);
    list->caller = &known;
    rc = ht_ns_roots(list->ctl->ns, add_if_known, list);
    list->caller = NULL;
    ht_person_free(&person);
    return rc;
}

static void metric_head(const struct row *row, struct ht_buf *out)
{
    char name[64];

    snprintf(name, sizeof(name), "hitrain_%s", row->word);
    ht_metrics_head(out, name, row->kind == COUNTER ? "counter" : "gauge", row->help);
}

static uint64_t metric_of(const struct row *row, const struct metrics *f)
{
    uint64_t v = ht_metrics_value(f, row->offset);

    return row->kind == IS_SET ? v != 0 : v;
}

static void metric_roots(const struct row *row, const struct root_list *list, struct ht_buf *out)
{
    const struct root_metrics *r = (const struct root_metrics *)(void *)list->found.data;

    if (list->count)
        metric_head(row, out);
    for (unsigned i = 0; i < list->count; i++)
        ht_buf_printf(out, "hitrain_%s%s{root=\"%s\"} %llu\n", row->word, row->kind == COUNTER ? "_total" : "",
                      r[i].label, (unsigned long long)metric_of(row, &r[i].f));
}

/* As OpenMetrics writes them. */
static void put_double(double value, struct ht_buf *out)
{
    if (isnan(value))
        ht_buf_printf(out, " NaN\n");
    else if (isinf(value))
        ht_buf_printf(out, value > 0 ? " +Inf\n" : " -Inf\n");
    else
        ht_buf_printf(out, " %.17g\n", value);
}

/* Adds the norms of the roots that know theirs. */
static void norm_metrics(const struct root_list *list, struct ht_buf *out)
{
    const struct root_metrics *r = (const struct root_metrics *)(void *)list->found.data;
    bool begun = false;

    for (unsigned i = 0; i < list->count; i++) {
        if (!r[i].f.root.norm_known)
            continue;
        if (!begun)
            ht_metrics_head(out, "hitrain_grad_norm", "gauge",
                            "Norm of the last step's gradient, before clipping. With max_grad_norm or skip_nonfinite.");
        begun = true;
        ht_buf_printf(out, "hitrain_grad_norm{root=\"%s\"}", r[i].label);
        put_double(r[i].f.root.grad_norm, out);
    }
}

static void claim_metrics(const struct root_list *list, struct ht_buf *out)
{
    const struct root_metrics *r = (const struct root_metrics *)(void *)list->found.data;
    bool begun = false;

    for (unsigned i = 0; i < list->count; i++) {
        const struct ht_root_stat *st = &r[i].f.root;
        if (!st->claimed_by[0])
            continue;
        if (!begun)
            ht_metrics_head(out, "hitrain_claimed", "gauge", "The program that alone may steer the model.");
        begun = true;
        ht_buf_printf(out, "hitrain_claimed{root=\"%s\",name=\"%s\",pid=\"%d\"} 1\n", r[i].label, st->claimed_by,
                      st->claimed_pid);
    }
}

int ht_metrics_openmetrics(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller, struct ht_buf *out)
{
    struct root_list list = {.ctl = c, .found = HT_BUF_INIT};
    struct metrics f;
    int rc = root ? add_root(&list, root) : add_known(&list, caller);

    if (rc == 0 && !root)
        rc = gather(c, OF_STORE, 0, 0, false, &f);
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows) && rc == 0; i++) {
        if (rows[i].scope == OF_ROOT && !find_row(rows[i].word, OF_STORE)) /* a metric has one meaning */
            metric_roots(&rows[i], &list, out);
        else if (rows[i].scope == OF_STORE && rows[i].kind != SUM && !root) {
            metric_head(&rows[i], out);
            ht_buf_printf(out, "hitrain_%s%s %llu\n", rows[i].word, rows[i].kind == COUNTER ? "_total" : "",
                          (unsigned long long)metric_of(&rows[i], &f));
        }
    }
    if (rc == 0) {
        norm_metrics(&list, out);
        claim_metrics(&list, out);
    }
    if (rc == 0 && !root) {
        ht_part_metrics(c, out);
        event_metrics(c, out);
    }
    ht_buf_printf(out, "# EOF\n");
    ht_buf_free(&list.found);
    return rc ? rc : out->err;
}

/* ------------------------------------------------------------- model roots */

static void put_root(const struct root_metrics *r, FILE *to)
{
    const struct ht_root_stat *st = &r->f.root;
    char norm[32];
    struct ht_json j = ht_feed_line(to);

    ht_json_str(&j, "path", r->path);
    ht_json_bool(&j, "open", st->step_open != 0);
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if (rows[i].scope == OF_ROOT)
            ht_json_u64(&j, rows[i].word, ht_metrics_value(&r->f, rows[i].offset));
    snprintf(norm, sizeof(norm), "%.17g", st->grad_norm);
    if (st->norm_known)
        ht_json_word(&j, "grad_norm", norm);
    if (st->claimed_by[0]) {
        ht_json_str(&j, "claimed_by", st->claimed_by);
        ht_json_u64(&j, "pid", (uint64_t)st->claimed_pid);
    }
    ht_json_end(&j);
}

static int next_roots(void *ctx, uint64_t *after, FILE *to)
{
    struct root_list *list = ctx;
    const struct root_metrics *r = (const struct root_metrics *)(void *)list->found.data;

    for (unsigned i = 0; i < list->count; i++)
        put_root(&r[i], to);
    bool any = list->count;
    list->count = 0;
    return any;
}

static void free_list(void *ctx)
{
    struct root_list *list = ctx;

    ht_buf_free(&list->found);
    free(list);
}

int ht_root_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    struct root_list *list = calloc(1, sizeof(*list));

    if (!list)
        return -ENOMEM;
    *list = (struct root_list){.ctl = c, .found = HT_BUF_INIT};
    int rc = add_known(list, caller);
    if (rc) {
        free_list(list);
        return rc;
    }
    return ht_feed_open(next_roots, free_list, list, out);
}
