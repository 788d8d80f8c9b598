/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super.c - superblocks: find the newest, write all copies; which members of a store may act together; names of
 * features that this program does not know.
 *
 * Invariants:
 *  1. At every moment each device holds one valid copy of the old or the new generation: the last copy
 *     of a generation is overwritten only after one of the next is flushed.
 *  2. The highest valid generation counts.
 *  3. A copy is flushed only if no flush of its device has failed since it was written, for whichever caller.
 *
 * Threads: no state of its own; a caller writes superblocks of one store from one thread at a time.
 */
#include "tiering/space/super.h"

#include "tiering/base/buf.h"
#include "tiering/base/event.h"
#include "tiering/base/fault.h"
#include "tiering/base/mutant.h"
#include "tiering/io/rings.h"

/*
 * A block inside of room, aligned for devices: a transfer then needs no memory of its own. By hand, since _Alignas does
 * not hold for the stack that the address sanitizer makes.
 */
#define ROOM_BYTES (2 * HT_BLOCK_BYTES)

static uint8_t *aligned_block(uint8_t room[ROOM_BYTES])
{
    return room + (ht_round_up((uintptr_t)room, HT_BLOCK_BYTES) - (uintptr_t)room);
}

/* ----------------------------------------------------------------- read */

/* Numbers that only grow, and stay in bounds when they do. */
static bool leaves_room(const struct ht_super *sb)
{
    uint64_t most = ht_max_u64(sb->generation, ht_max_u64(sb->epoch, sb->durable_seq));

    most = ht_max_u64(most, ht_max_u64(sb->start_pos, sb->start_seq));
    return most < HT_SUPER_COUNTER_MAX / 2;
}

enum ht_super_problem ht_super_read_copy(struct ht_dev *dev, uint64_t offset, struct ht_super *out_sb)
{
    uint8_t room[ROOM_BYTES], *block = aligned_block(room);

    if (ht_dev_size(dev) < offset + HT_BLOCK_BYTES || ht_dev_read(dev, offset, block, HT_BLOCK_BYTES))
        return HT_SUPER_UNREADABLE;
    enum ht_super_problem problem = ht_super_decode(block, out_sb);
    return problem == HT_SUPER_OK && !leaves_room(out_sb) ? HT_SUPER_BAD_FIELD : problem;
}

/* No valid copy was found: returns the most specific reason. */
static int read_error(const struct ht_super_report *r, bool io_error)
{
    bool hitrain = false;

    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        if (r->copy[i] == HT_SUPER_BAD_VERSION)
            return -EPROTONOSUPPORT;
        if (r->copy[i] == HT_SUPER_BAD_CHECKSUM || r->copy[i] == HT_SUPER_BAD_FIELD)
            hitrain = true;
    }
    if (hitrain)
        return -EUCLEAN;
    return io_error ? -EIO : -EMEDIUMTYPE;
}

int ht_super_read(struct ht_dev *dev, struct ht_super *out_sb, struct ht_super_report *out_report)
{
    struct ht_super best, sb;
    bool found = false, io_error = false;
    uint64_t size = ht_dev_size(dev);

    memset(out_report, 0, sizeof(*out_report));
    memset(&best, 0, sizeof(best));
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        /* The last copy lies where the store ended at mkfs; the device may have grown since. */
        uint64_t bytes = found ? best.device_bytes[best.device_index] : size;
        out_report->copy[i] = HT_SUPER_UNREADABLE;
        if (bytes < HT_BLOCK_BYTES)
            continue;
        uint64_t at = ht_super_offset(bytes, i);
        out_report->copy[i] = ht_super_read_copy(dev, at, &sb);
        io_error |= out_report->copy[i] == HT_SUPER_UNREADABLE && size >= at + HT_BLOCK_BYTES;
        if (out_report->copy[i] != HT_SUPER_OK)
            continue;
        out_report->generation[i] = sb.generation;
        if (!found || sb.generation > best.generation)
            best = sb;
        found = true;
    }
    if (!found)
        return read_error(out_report, io_error);
    *out_sb = best;
    return size < best.device_bytes[best.device_index] ? -ENODATA : 0;
}

/* ---------------------------------------------------------------- write */

static int write_copy(struct ht_super *sb, struct ht_dev *dev, unsigned index, unsigned copy)
{
    uint8_t room[ROOM_BYTES], *block = aligned_block(room);
    struct ht_super check;

    sb->device_index = index;
    if (sb->mine && sb->writer == sb->mine) {
        sb->writer_place = sb->places[index];
        sb->writer_flags = HT_WRITER_KNOWN | (sb->local >> index & 1 ? HT_WRITER_LOCAL : 0);
    }
    ht_super_encode(sb, block);
    assert(ht_super_decode(block, &check) == HT_SUPER_OK); /* a superblock that cannot be read back is not written */
    int rc = ht_fault(HT_FAULT_SPACE_SUPER);
    if (!rc)
        rc = ht_dev_write(dev, ht_super_offset(sb->device_bytes[index], copy), block, HT_BLOCK_BYTES);
    if (rc) {
        struct ht_event_about about = {0, ht_dev_name(dev), ht_super_offset(sb->device_bytes[index], copy), rc};
        ht_event(HT_EVENT_WRITE_ERROR, &about, "superblock copy %u on %s could not be written: %s", copy, about.device,
                 strerror(-rc));
    }
    return rc;
}

/* Notes that copies (bits) are on the medium, or, after a failed flush, perhaps not, even if reads show them. */
static int note_flushed(struct ht_super *sb, unsigned index, unsigned copies, int err)
{
    if (err)
        sb->unsure[index] |= (uint8_t)copies;
    else
        sb->unsure[index] &= (uint8_t)~copies;
    return err;
}

static int write_copy_flushed(struct ht_super *sb, struct ht_dev *dev, unsigned index, unsigned copy)
{
    uint64_t failures = ht_dev_flush_failures(dev);
    int rc = write_copy(sb, dev, index, copy);

    return rc ? rc : note_flushed(sb, index, 1u << copy, ht_dev_flush_since(dev, failures));
}

static bool same_store(const struct ht_super *sb, const struct ht_super *have)
{
    return memcmp(have->uuid, sb->uuid, sizeof(have->uuid)) == 0;
}

bool ht_super_is_foreign(const struct ht_super *sb, const struct ht_super *have)
{
    /* Our last superblock has no nonce any more. */
    bool ours = have->writer == sb->mine || (have->writer == sb->writer && have->generation <= sb->generation);

    return !HT_MUTANT("writer-unseen") && !(same_store(sb, have) && ours);
}

/*
 * The order in which to overwrite the copies of a device. Copies without the newest generation come first (after
 * damage, a failed write or flush, or a crash in between), so that one with it stays valid until another is flushed.
 * The device may have missed some generations that others took. False: another mount took the store over (claim.h).
 */
static bool write_order(const struct ht_super *sb, struct ht_dev *dev, unsigned index,
                        unsigned out_order[HT_SUPER_COPIES])
{
    bool foreign[HT_SUPER_COPIES] = {false};
    static const unsigned usual[HT_SUPER_COPIES] = {1, 0, 2};
    uint64_t generation[HT_SUPER_COPIES] = {0}, newest = 0;
    unsigned n = 0;

    for (unsigned c = 0; c < HT_SUPER_COPIES; c++) {
        struct ht_super have;
        uint64_t at = ht_super_offset(sb->device_bytes[index], c);
        bool sure = !(sb->unsure[index] >> c & 1) && ht_super_read_copy(dev, at, &have) == HT_SUPER_OK;
        foreign[c] = sure && (sb->claimed >> index & 1) && ht_super_is_foreign(sb, &have);
        if (sure && same_store(sb, &have))
            generation[c] = have.generation;
        newest = ht_max_u64(newest, generation[c]);
    }
    for (unsigned pass = 0; pass < 2; pass++)
        for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
            if (HT_MUTANT("super-order") ? pass == 0 : (generation[usual[i]] == newest) == (pass == 1))
                out_order[n++] = usual[i];
    return !(foreign[1] && foreign[2]);
}

/* The first copy is flushed: the other two may be overwritten together. */
static int write_rest(struct ht_super *sb, struct ht_dev *dev, unsigned index, const unsigned order[])
{
    uint64_t failures = ht_dev_flush_failures(dev);
    int err1 = write_copy(sb, dev, index, order[1]);
    int err2 = write_copy(sb, dev, index, order[2]);
    int rc = HT_MUTANT("super-flush") ? 0 : ht_dev_flush_since(dev, failures);

    (void)note_flushed(sb, index, 1u << order[1] | 1u << order[2], rc);
    return err1 ? err1 : err2 ? err2 : rc;
}

/* The first copy may be lost: one of the others must stay valid at every moment. */
static int write_rest_alone(struct ht_super *sb, struct ht_dev *dev, unsigned index, const unsigned order[])
{
    int rc = write_copy_flushed(sb, dev, index, order[1]);

    return rc ? rc : write_copy_flushed(sb, dev, index, order[2]);
}

/* Writes the first copy of each device, on all at once. Clears first if it is not durable. */
static void write_first(struct ht_super *sb, struct ht_dev *const devs[], unsigned dev_count,
                        unsigned order[][HT_SUPER_COPIES], bool first[])
{
    struct ht_ring *ring = ht_ring_mine(NULL);
    struct ht_dev *dev[HT_DEVICES_MAX];
    uint64_t failures[HT_DEVICES_MAX];
    int result[HT_DEVICES_MAX] = {0};
    unsigned count = 0;

    for (unsigned i = 0; i < dev_count; i++) {
        failures[i] = devs[i] ? ht_dev_flush_failures(devs[i]) : 0;
        first[i] = devs[i] && write_copy(sb, devs[i], i, order[i][0]) == 0;
        if (first[i])
            dev[count++] = devs[i];
    }
    if (HT_MUTANT("super-flush"))
        return;
    if (ring)
        ht_ring_flush(ring, dev, count, result);
    for (unsigned i = 0, k = 0; i < dev_count; i++) {
        if (!first[i])
            continue;
        bool failed = !ring || result[k++] || ht_dev_flush_failures(devs[i]) != failures[i];
        first[i] = note_flushed(sb, i, 1u << order[i][0], failed ? -EIO : 0) == 0;
    }
}

uint32_t ht_super_write(struct ht_super *sb, struct ht_dev *const devs[], unsigned dev_count, unsigned *out_partial)
{
    unsigned order[HT_DEVICES_MAX][HT_SUPER_COPIES];
    bool first[HT_DEVICES_MAX] = {false};
    uint32_t failed = 0;
    unsigned partial = 0;
    uint32_t index = sb->device_index;

    assert(dev_count == sb->device_count && dev_count <= HT_DEVICES_MAX);
    for (unsigned i = 0; i < dev_count; i++)
        sb->taken |= devs[i] && !write_order(sb, devs[i], i, order[i]);
    if (sb->taken)
        return UINT32_MAX;
    sb->generation++;
    write_first(sb, devs, dev_count, order, first);
    for (unsigned i = 0; i < dev_count; i++) {
        if (!devs[i])
            continue;
        int rc = first[i] ? write_rest(sb, devs[i], i, order[i]) : write_rest_alone(sb, devs[i], i, order[i]);
        partial += rc || !first[i];
        failed |= (uint32_t)(rc && !first[i]) << i;
    }
    sb->device_index = index;
    if (out_partial)
        *out_partial = partial;
    return failed;
}

int ht_super_rewrite(const struct ht_super *sb, struct ht_dev *dev, unsigned copy)
{
    struct ht_super same = *sb;

    return write_copy_flushed(&same, dev, sb->device_index, copy);
}

/* ---------------------------------------------------------------- scrub */

/* Does one copy on the device equal sb? */
static bool copy_sound(const struct ht_super *sb, struct ht_dev *dev, unsigned c, struct ht_super_scrub *out)
{
    struct ht_super have;

    out->problem[c] = ht_super_read_copy(dev, out->offset[c], &have);
    out->stale[c] = out->problem[c] == HT_SUPER_OK && !(same_store(sb, &have) && have.generation == sb->generation);
    return out->problem[c] == HT_SUPER_OK && !out->stale[c];
}

unsigned ht_super_scrub(const struct ht_super *sb, struct ht_dev *dev, unsigned index, bool repair,
                        struct ht_super_scrub *out)
{
    struct ht_super copy = *sb;
    unsigned bad = 0;

    memset(out, 0, sizeof(*out));
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++) {
        struct ht_super_scrub again = {.offset = {0}};
        out->offset[c] = again.offset[c] = ht_super_offset(sb->device_bytes[index], c);
        if (copy_sound(sb, dev, c, out))
            continue;
        bad++;
        out->repaired[c] = repair && write_copy_flushed(&copy, dev, index, c) == 0 && copy_sound(sb, dev, c, &again);
    }
    return bad;
}

/* -------------------------------------------------------------- members */

bool ht_members_takes_part(const struct ht_super *sb, unsigned i)
{
    return sb->member_epoch[i] == sb->epoch;
}

static bool knows(const struct ht_super *a, const struct ht_super *b)
{
    return a->member_epoch[b->device_index] >= b->member_epoch[b->device_index];
}

static int find_apart(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        for (unsigned k = 0; k < i; k++)
            if (sb[i] && sb[k] && !knows(sb[i], sb[k]) && !knows(sb[k], sb[i])) {
                out->apart[0] = k;
                out->apart[1] = i;
                return -EXDEV;
            }
    return 0;
}

static unsigned find_newest(const struct ht_super *const sb[HT_DEVICES_MAX])
{
    unsigned newest = HT_DEVICES_MAX;

    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb[i] && (newest == HT_DEVICES_MAX || sb[i]->generation > sb[newest]->generation))
            newest = i;
    return newest;
}

bool ht_members_is_stranger(const struct ht_super *newest, const struct ht_super *have)
{
    unsigned i = have->device_index;

    return i >= newest->device_count ||
        memcmp(have->device_uuid[i], newest->device_uuid[i], sizeof(have->device_uuid[i])) != 0;
}

static int find_stranger(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb[i] && ht_members_is_stranger(sb[out->newest], sb[i])) {
            out->stranger = i;
            return -ENXIO;
        }
    return 0;
}

/* Does a present copy of the log go on to the end, as far as the newest superblock knows? */
static int check_log(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    const struct ht_super *newest = sb[out->newest];
    bool present = false;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++) {
        unsigned device = newest->log_device[c];
        if (!sb[device])
            continue;
        if (ht_members_takes_part(newest, device))
            return 0;
        present = true;
        out->left_behind = device;
    }
    return present ? -ESTALE : 0; /* without any copy the journal reports that */
}

int ht_members_validate(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    out->newest = find_newest(sb);
    int rc = find_apart(sb, out);

    if (!rc)
        rc = find_stranger(sb, out);
    return rc ? rc : check_log(sb, out);
}

void ht_members_take_part(struct ht_super *sb, uint32_t devices)
{
    for (unsigned i = 0; i < sb->device_count; i++)
        if (devices >> i & 1)
            sb->member_epoch[i] = sb->epoch;
}

/* ------------------------------------------------------ unknown features */

/* By the text in the superblock, which may be anything: a line counts if it is one of the form that programs write. */
static const char *const effect_words[HT_FEATURE_EFFECTS] = HT_FEATURE_WORDS;

static bool is_word(const char *s)
{
    return *s && !s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.")];
}

bool ht_super_feature_name(const char *feature_names, enum ht_feature_effect effect, unsigned bit,
                           struct ht_super_feature *out)
{
    char line[128], word[16];
    unsigned number;

    for (const char *at = feature_names; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        snprintf(line, sizeof(line), "%.*s", (int)strcspn(at, "\n"), at);
        if (sscanf(line, "%15s %9u %31s %15s", word, &number, out->name, out->since) == 4 && number == bit &&
            strcmp(word, effect_words[effect]) == 0 && is_word(out->name) && is_word(out->since))
            return true;
    }
    return false;
}

static bool peek_newest(struct ht_dev *dev, struct ht_super_words *out)
{
    uint8_t room[ROOM_BYTES], *block = aligned_block(room);
    bool found = false;

    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        struct ht_super_words w;
        uint64_t at = ht_dev_size(dev) < HT_BLOCK_BYTES ? 0 : ht_super_offset(ht_dev_size(dev), i);
        if (ht_dev_size(dev) < at + HT_BLOCK_BYTES || ht_dev_read(dev, at, block, HT_BLOCK_BYTES) ||
            ht_super_peek(block, &w) != HT_SUPER_OK || (found && w.generation <= out->generation))
            continue;
        *out = w;
        found = true;
    }
    return found;
}

static void put_unknown(struct ht_buf *b, const struct ht_super_words *w, enum ht_feature_effect effect,
                        uint64_t unknown)
{
    for (; unknown; unknown &= unknown - 1) {
        unsigned bit = (unsigned)__builtin_ctzll(unknown);
        struct ht_super_feature f;
        ht_buf_printf(b, "%s", b->len ? ", " : "");
        if (ht_super_feature_name(w->feature_names, effect, bit, &f))
            ht_buf_printf(b, "%s (hitrain %s)", f.name, f.since);
        else
            ht_buf_printf(b, "bit-%u", bit);
    }
}

void ht_super_unknown_text(struct ht_dev *dev, char *buf, size_t cap)
{
    struct ht_buf b = HT_BUF_INIT;
    struct ht_super_words w;

    buf[0] = '\0';
    if (!peek_newest(dev, &w))
        return;
    if (w.version != HT_FORMAT_VERSION)
        ht_buf_printf(&b, "format %u", w.version);
    put_unknown(&b, &w, HT_FEATURE_REFUSES, w.feat_refuse & ~HT_FEAT_REFUSE_KNOWN);
    put_unknown(&b, &w, HT_FEATURE_READS, w.feat_ro & ~HT_FEAT_RO_KNOWN);
    snprintf(buf, cap, "%.*s", (int)b.len, (const char *)b.data);
    ht_buf_free(&b);
}
