/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members.c - the devices of a store: which are there, whether they belong together, which take part in an epoch.
 *
 * The order in which an epoch begins:
 *
 *   superblocks: the epoch; its members: all except those with a stale log
 *   log: stale copies are brought up to date; the epoch record
 *   superblocks again, if there were such copies: their members take part, too
 *
 * So a crash in between never leaves a member that wrongly takes itself for up to date. A member whose copy of the log,
 * or whose superblock, cannot be written is excluded in the same way. It is excluded with an epoch of its own, which is
 * durable before any content that this member lacks. space/super.h says how the next mount treats it. It takes part
 * again when its log was brought up to date, or with the next superblock that it takes if its log never failed.
 *
 * A member without a log that does not answer is excluded, too: then neither a checkpoint nor the loss of a copy of the
 * log waits for it. It takes part again in the next mount.
 *
 * Lock: super_lock guards sb, part, super_failed and unrecorded.
 */
#include "tiering/space/claim.h"
#include "tiering/base/event.h"
#include "tiering/base/mutant.h"
#include "tiering/space/super.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/data.h"

/* ---------------------------------------------------------------- gather */

struct gathering {
    struct ht_super sb[HT_DEVICES_MAX]; /* of s->dev[i] */
    const struct ht_super *there[HT_DEVICES_MAX];
};

/* among: other devices are named, too; formatting a former member would destroy its content. */
static void report_super_problem(struct ht_dev *dev, int rc, bool among)
{
    char lacks[256];
    const char *why = rc == -EMEDIUMTYPE && among
        ? "holds nothing of a hitrain store; if it was a member of this one, leave it out and mount with -o degraded"
        : rc == -EMEDIUMTYPE ? "holds no hitrain store; format it with mkfs.hitrain"
        : rc == -EUCLEAN     ? "has superblocks of hitrain but none is valid; run hitrain-fsck"
        : rc == -ENODATA     ? "is smaller than the store it holds: truncated?"
                             : strerror(-rc);

    if (rc == -EPROTONOSUPPORT) {
        ht_super_unknown_text(dev, lacks, sizeof(lacks));
        ht_error("%s: was written by a newer version of hitrain, and this one lacks %s; see hitrainctl features DEVICE",
                 ht_dev_name(dev), *lacks ? lacks : "its format");
        return;
    }
    ht_error("%s: %s", ht_dev_name(dev), why);
}

static int add_member(struct ht_store *s, struct gathering *g, struct ht_dev *dev, const struct ht_super *sb)
{
    unsigned index = sb->device_index;

    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (g->there[i] && memcmp(sb->uuid, g->there[i]->uuid, sizeof(sb->uuid)) != 0) {
            ht_error("%s belongs to another store than %s", ht_dev_name(dev), ht_dev_name(s->dev[i]));
            return -EXDEV;
        }
    if (g->there[index]) {
        ht_error("%s and %s are the same member", ht_dev_name(dev), ht_dev_name(s->dev[index]));
        return -EXDEV;
    }
    g->sb[index] = *sb;
    g->there[index] = &g->sb[index];
    s->dev[index] = dev;
    return 0;
}

static int read_member(struct ht_store *s, struct gathering *g, struct ht_dev *dev, bool among)
{
    struct ht_super sb;
    struct ht_super_report report;
    int rc = ht_super_read(dev, &sb, &report);

    if (rc == 0)
        return add_member(s, g, dev, &sb);
    report_super_problem(dev, rc, among);
    if (rc != -EIO || !s->opts.degraded)
        return rc;
    ht_warn("%s: going on as if it were missing", ht_dev_name(dev));
    return 0;
}

static int validate(struct ht_store *s, const struct gathering *g)
{
    struct ht_members m;
    int rc = ht_members_validate(g->there, &m);

    if (rc == -EXDEV)
        ht_error(
            "%s and %s have diverged: each was mounted without the other and has changes that the other lacks; mount "
            "one of them with -o degraded, save the content that you need, and format the other",
            ht_dev_name(s->dev[m.apart[0]]), ht_dev_name(s->dev[m.apart[1]]));
    else if (rc == -ESTALE)
        ht_error(
            "%s was left behind when its log could not be written, and the others went on: name the other members, too",
            ht_dev_name(s->dev[m.left_behind]));
    else if (rc == -ENXIO)
        ht_error("%s is no member of the store: mkfs.hitrain was adding it and was cut short, and the store went on "
                 "without it; leave it out, or add it again",
                 ht_dev_name(s->dev[m.stranger]));
    if (rc == 0) {
        HT_UNSHARED(HT_LOCK_SUPER);
        s->sb = g->sb[m.newest];
        ht_super_get_layout(&s->sb, &s->layout);
        s->dev_count = s->sb.device_count;
    }
    return rc;
}

/* Each device must fit its own superblock, but the newest superblock counts. */
static int check_fit(struct ht_store *s)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        if (s->dev[i] && ht_dev_size(s->dev[i]) < s->layout.device_bytes[i]) {
            report_super_problem(s->dev[i], -ENODATA, true);
            return -ENODATA;
        }
    }
    return 0;
}

static int check_missing(struct ht_store *s)
{
    for (unsigned i = 0; i < s->dev_count && !s->opts.degraded; i++)
        if (!s->dev[i]) {
            ht_error("device %u of %u of the store is missing; name it with -o device=PATH, or go on without its "
                     "content with -o degraded",
                     i, s->dev_count);
            return -ENODEV;
        }
    return 0;
}

void ht_store_report_missing(struct ht_store *s)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (!s->dev[i])
            ht_event(HT_EVENT_DEGRADED, NULL,
                     "mounted without device %u of %u: its content cannot be read until it returns; new data goes "
                     "to the others",
                     i, s->dev_count);
}

int ht_store_gather(struct ht_store *s, struct ht_dev *const devs[], unsigned n)
{
    struct gathering g = {0};
    bool any = false;
    int rc = 0;

    for (unsigned i = 0; !rc && i < n; i++)
        rc = read_member(s, &g, devs[i], n > 1);
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        any |= g.there[i] != NULL;
    if (!rc)
        rc = any ? validate(s, &g) : -EIO;
    if (!rc)
        rc = check_fit(s);
    for (unsigned i = 0; !rc && i < s->dev_count; i++)
        if (!s->dev[i])
            s->data->health[i] = HT_HEALTH_MISSING;
    return rc ? rc : check_missing(s);
}

void ht_store_put_in_order(const struct ht_store *s, struct ht_dev *devs[], unsigned n)
{
    struct ht_dev *others[HT_DEVICES_MAX];
    unsigned count = 0, at = 0;

    for (unsigned i = 0; i < n; i++) {
        bool member = false;
        for (unsigned k = 0; k < s->dev_count; k++)
            member |= s->dev[k] == devs[i];
        if (!member)
            others[count++] = devs[i];
    }
    for (unsigned i = 0; i < s->dev_count; i++)
        if (s->dev[i])
            devs[at++] = s->dev[i];
    for (unsigned i = 0; i < count; i++)
        devs[at++] = others[i];
}

/* ------------------------------------------------------------- superblocks */

static void report_left(struct ht_store *s, uint32_t devices, const char *what)
{
    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_event_about about = {.device = s->dev[i] ? ht_dev_name(s->dev[i]) : NULL, .error = -EIO};
        if (devices >> i & 1)
            ht_event(HT_EVENT_MEMBER_LEFT, &about,
                     "%s (device %u) does not take %s: the others go on without it; its content stays in use",
                     about.device, i, what);
    }
}

static bool has_log(const struct ht_store *s, uint32_t devices)
{
    return (devices >> s->layout.log_device[0] & 1) || (devices >> s->layout.log_device[1] & 1);
}

static void leave_behind(struct ht_store *s, uint32_t devices) HT_REQUIRES(HT_LOCK_SUPER)
{
    s->data->part &= ~devices;
    s->sb.epoch++;
    ht_members_take_part(&s->sb, s->data->part);
}

static void bring_back(struct ht_store *s, uint32_t devices) HT_REQUIRES(HT_LOCK_SUPER)
{
    s->data->part |= devices;
    ht_members_take_part(&s->sb, s->data->part);
    for (unsigned i = 0; i < s->dev_count; i++)
        if (devices >> i & 1)
            ht_info("%s (device %u) takes part again", ht_dev_name(s->dev[i]), i);
}

static uint32_t present(const struct ht_store *s)
{
    uint32_t devices = 0;

    for (unsigned i = 0; i < s->dev_count; i++)
        devices |= (uint32_t)(s->dev[i] != NULL) << i;
    return devices;
}

static void stop_writes(struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER)
{
    if (s->data->taken)
        return;
    s->data->taken = s->sb.taken = true;
    for (unsigned i = 0; i < s->dev_count; i++)
        if (s->dev[i])
            ht_dev_stop_writes(s->dev[i]);
    ht_event(HT_EVENT_TAKEN_OVER, &(struct ht_event_about){.error = -EROFS},
             "another machine, or a mount by another name of the device, took the store over while this mount stood "
             "still: it writes nothing any more");
}

/* The devices (bits) that do not take it. A silent one that the log can do without is not asked. */
static uint32_t write_to_members(struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER)
{
    uint32_t silent = ht_probe_devices(s, present(s) & ~(ht_log_devices(s) | s->data->super_failed));
    struct ht_dev *devs[HT_DEVICES_MAX];

    for (unsigned i = 0; i < s->dev_count; i++)
        devs[i] = (s->data->super_failed | silent) >> i & 1 ? NULL : s->dev[i];
    uint32_t failed = ht_super_write(&s->sb, devs, s->dev_count, NULL);
    if (s->sb.taken)
        stop_writes(s);
    return failed | silent;
}

/*
 * back: devices that take part no longer and have the whole log. A second superblock lets them take part again, once
 * they hold a first one that excludes them. With one superblock only, a crash before it is on all devices could leave
 * two views. One device could be mounted alone without knowing that superblock, while the others say that it took part.
 */
static int write_super(struct ht_store *s, uint32_t back) HT_REQUIRES(HT_LOCK_SUPER)
{
    s->data->super_failed &= ~back;
    for (;;) {
        uint32_t failed = write_to_members(s), left = s->data->part & failed, came = back & ~failed;
        s->data->unrecorded = !has_log(s, (s->data->part & ~left) | came);
        if (s->data->unrecorded)
            return -EIO; /* the last one is not excluded: the next superblock is for it, too */
        s->data->super_failed |= failed;
        if (came)
            bring_back(s, came);
        if (left) {
            leave_behind(s, left);
            report_left(s, left, "its superblock");
        }
        if (!came && !left)
            return 0;
        back = 0;
    }
}

/* Devices that take no part and have the whole log: only their superblock could not be written. */
static uint32_t outside(const struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER)
{
    return ht_log_devices(s) & ~s->data->part;
}

int ht_store_write_super(struct ht_store *s)
{
    uint32_t before = outside(s);
    int rc = write_super(s, before);
    uint32_t now = outside(s) & ~before;

    return rc || !now ? rc : write_super(s, now); /* a passing error excludes only members that know it */
}

/* Records first that the other copy is whole, and then that this one is not. */
static int record_lost(struct ht_store *s, uint32_t device) HT_REQUIRES(HT_LOCK_SUPER)
{
    int rc = outside(s) || s->data->unrecorded ? ht_store_write_super(s) : 0;

    if (rc || !(s->data->part & device))
        return rc;
    if (!has_log(s, s->data->part & ~device))
        return -EIO;
    leave_behind(s, device);
    report_left(s, device, "the log");
    return ht_store_write_super(s);
}

int ht_store_copy_lost(void *ctx, unsigned copy)
{
    struct ht_store *s = ctx;

    if (s->layout.log_device[0] == s->layout.log_device[1])
        return 0; /* both copies come and go together */
    ht_mutex_lock(ht_super_mutex(s));
    int rc = record_lost(s, 1u << s->layout.log_device[copy]);
    ht_mutex_unlock(ht_super_mutex(s));
    return rc;
}

int ht_store_copy_back(void *ctx, unsigned copy)
{
    struct ht_store *s = ctx;
    uint32_t device = 1u << s->layout.log_device[copy];

    if (s->layout.log_device[0] == s->layout.log_device[1])
        return 0;
    ht_mutex_lock(ht_super_mutex(s));
    int rc = write_super(s, device | outside(s));
    if (rc == 0 && !(s->data->part & device))
        rc = -EIO;
    ht_mutex_unlock(ht_super_mutex(s));
    return rc;
}

/* ------------------------------------------------------------------- epoch */

/* Devices with a copy of the log that is not the newest; both copies of one device count as one. */
static uint32_t log_behind(const struct ht_store *s, const struct ht_journal_report *r)
{
    uint32_t devices = 0;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        if (r->copy[c].stale || r->copy[c].state == HT_LOG_DAMAGED)
            devices |= 1u << s->layout.log_device[c];
    return devices & ~(1u << s->layout.log_device[r->chosen]);
}

static int write_epoch(struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER)
{
    ht_members_take_part(&s->sb, s->data->part);
    return write_super(s, 0); /* before the log begins no copy is known to be whole */
}

/* Copies that were stale and are not any more. */
static int take_in(struct ht_store *s, uint32_t behind)
{
    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        if (!ht_journal_copy_live(s->journal, c))
            behind &= ~(1u << s->layout.log_device[c]);
    if (!behind)
        return 0;
    ht_mutex_lock(ht_super_mutex(s));
    s->data->part |= behind & ~s->data->super_failed;
    int rc = write_epoch(s);
    ht_mutex_unlock(ht_super_mutex(s));
    return rc;
}

int ht_store_begin_epoch(struct ht_store *s, const struct ht_journal_report *report)
{
    uint32_t behind = log_behind(s, report) & present(s);
    uint8_t host[16];

    ht_mutex_lock(ht_super_mutex(s));
    s->data->part = present(s) & ~behind;
    s->sb.flags = HT_SUPER_IN_USE;
    ht_host_ids(host, s->sb.boot_id);
    if (s->opts.repair) /* later frames may have been given up */
        s->sb.durable_seq = ht_min_u64(s->sb.durable_seq, ht_journal_durable(s->journal));
    uint64_t epoch = ++s->sb.epoch; /* durable in the superblock before a frame carries the epoch */
    ht_claim_free(s->data->claim);
    s->data->claim = NULL;
    int rc = HT_MUTANT("epoch-unnamed") ? 0 : write_epoch(s);
    ht_mutex_unlock(ht_super_mutex(s));
    if (!rc)
        rc = ht_journal_start(s->journal, epoch);
    return rc ? rc : take_in(s, behind);
}

/* ------------------------------------------------------------------ claims */

int ht_store_claim(struct ht_store *s)
{
    ht_mutex_lock(ht_super_mutex(s));
    int rc = ht_claim_take(&s->sb, s->dev, s->dev_count, &s->data->claim);
    ht_mutex_unlock(ht_super_mutex(s));
    return rc;
}

void ht_store_unclaim(struct ht_store *s)
{
    ht_mutex_lock(ht_super_mutex(s));
    if (s->data->claim)
        ht_claim_undo(s->data->claim, &s->sb);
    s->data->claim = NULL;
    ht_mutex_unlock(ht_super_mutex(s));
}

/* Devices that hold the newest superblock, so that it may answer. Until a mount has written one it does not answer. */
static uint32_t claimed(const struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER)
{
    return s->data->taken || s->data->claim ? 0 : s->sb.claimed & s->data->part & ~s->data->super_failed;
}

/* A copy that is just being written reads as damaged or foreign: so it counts only with the lock. */
static void look_again(struct ht_store *s, unsigned i)
{
    ht_mutex_lock(ht_super_mutex(s));
    if (claimed(s) >> i & 1) {
        enum ht_claim_state state = ht_claim_look(&s->sb, s->dev[i], i);
        if (state == HT_CLAIM_LOST)
            stop_writes(s);
        else if (state != HT_CLAIM_OWN)
            ht_claim_answer(&s->sb, s->dev[i], i, state);
    }
    ht_mutex_unlock(ht_super_mutex(s));
}

void ht_store_look_for_claims(struct ht_store *s)
{
    ht_mutex_lock(ht_super_mutex(s));
    struct ht_super sb = s->sb;
    uint32_t devices = claimed(s);
    ht_mutex_unlock(ht_super_mutex(s));

    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && ht_claim_look(&sb, s->dev[i], i) != HT_CLAIM_OWN)
            look_again(s, i);
}
