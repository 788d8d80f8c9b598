/* SPDX-License-Identifier: Apache-2.0 */
/* report.c - output of hitrain-fsck apart from problems: where chunks lie, and the sums. */
#include "mount-helpers/fsck/fsck.h"

#include "mount-helpers/common/text.h"

/* ------------------------------------------------------------------- extents */

static void list_piece(struct ht_fsck *f, const struct ht_fsck_item *it, const struct ht_fsck_owner *owner,
                       const struct ht_extent *e)
{
    const char *device = ht_fsck_member_name(f, e->device);
    uint64_t offset = e->block * HT_BLOCK_BYTES, bytes = (uint64_t)e->blocks * HT_BLOCK_BYTES;

    if (!f->opt.json) {
        ht_put_printable(owner->path, f->out);
        fprintf(f->out, "%s%s  chunk %u  %s  offset %llu  bytes %llu\n", owner->state ? "  state " : "",
                owner->state ? owner->state : "", it->index, device, (unsigned long long)offset,
                (unsigned long long)bytes);
        return;
    }
    ht_json_object(&f->json, NULL);
    ht_json_u64(&f->json, "object", it->oid);
    ht_json_str(&f->json, "path", owner->path);
    if (owner->state)
        ht_json_str(&f->json, "state", owner->state);
    ht_json_u64(&f->json, "chunk", it->index);
    ht_json_str(&f->json, "device", device);
    ht_json_u64(&f->json, "offset", offset);
    ht_json_u64(&f->json, "bytes", bytes);
    ht_json_u64(&f->json, "stored", it->stored);
    if (it->codec == HT_CODEC_PLANES)
        ht_json_str(&f->json, "codec", "planes");
    ht_json_end(&f->json);
}

void ht_fsck_list_extents(struct ht_fsck *f)
{
    static struct ht_fsck_owner owner;

    if (f->opt.json)
        ht_json_array(&f->json, "extents");
    for (size_t i = 0; i < f->item_count; i++) {
        ht_fsck_owner(f, f->items[i].oid, &owner);
        for (unsigned k = 0; k < f->items[i].frag_count; k++) {
            struct ht_extent e = ht_fsck_item_extent(f, &f->items[i], k);
            list_piece(f, &f->items[i], &owner, &e);
        }
    }
    if (f->opt.json)
        ht_json_end(&f->json);
}

/* ------------------------------------------------------------------- summary */

static const char *state_text(enum ht_log_state s)
{
    return s == HT_LOG_MISSING ? "missing" : s == HT_LOG_ENDED ? "whole" : "damaged";
}

static void log_json(struct ht_fsck *f)
{
    const struct ht_super *sb = &f->super;
    struct ht_json *j = &f->json;

    ht_json_array(j, "log");
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        ht_json_object(j, NULL);
        ht_json_u64(j, "copy", i);
        ht_json_str(j, "state", state_text(f->log.copy[i].state));
        ht_json_str(j, "device", ht_fsck_member_name(f, sb->log_device[i]));
        ht_json_u64(j, "offset", sb->log_offset[i]);
        ht_json_u64(j, "bytes", sb->log_bytes);
        ht_json_u64(j, "start_position", sb->start_pos);
        ht_json_u64(j, "end_position", f->log.copy[i].end_pos);
        ht_json_u64(j, "last_frame", f->log.copy[i].last_seq);
        ht_json_end(j);
    }
    ht_json_end(j);
}

static void store_json(struct ht_fsck *f)
{
    char uuid[HT_UUID_TEXT_MAX];

    ht_json_str(&f->json, "uuid", ht_uuid_text(f->super.uuid, uuid));
    ht_json_str(&f->json, "label", f->super.label);
    ht_json_u64(&f->json, "generation", f->super.generation);
    ht_json_bool(&f->json, "clean", (f->super.flags & HT_SUPER_CLEAN) != 0);
    ht_json_array(&f->json, "classes");
    for (unsigned i = 0; i < f->super.device_count; i++)
        ht_json_str(&f->json, NULL, ht_device_class_word(f->super.device_class[i]));
    ht_json_end(&f->json);
}

static void summary_json(struct ht_fsck *f, int status)
{
    struct ht_json *j = &f->json;

    if (f->super.device_count != 0)
        store_json(f);
    if (f->log_known)
        log_json(f);
    ht_json_object(j, "summary");
    ht_json_u64(j, "exit", (uint64_t)status);
    ht_json_u64(j, "problems", f->problems);
    ht_json_u64(j, "repaired", f->repaired);
    ht_json_u64(j, "unlisted", f->unlisted);
    ht_json_u64(j, "objects", f->objects);
    ht_json_u64(j, "chunks", f->item_count);
    ht_json_u64(j, "lost_chunks", f->lost_chunks);
    ht_json_u64(j, "missing_chunks", f->missing_chunks);
    ht_json_u64(j, "cold_chunks", f->cold_chunks);
    ht_json_u64(j, "cold_bytes", f->cold_bytes);
    ht_json_u64(j, "stored_bytes", f->stored_bytes);
    ht_json_u64(j, "verified_bytes", f->verified_bytes);
    ht_json_u64(j, "replay_lacks_bytes", f->replay_lacks_bytes);
    ht_json_u64(j, "log_frames", f->log.frames);
    ht_json_u64(j, "log_records", f->log.records);
    ht_json_end(j);
    ht_json_end(j);
}

/* Counts of unread data, as text. */
static const char *unread_text(const struct ht_fsck *f)
{
    static char text[192];
    int used = 0;

    text[0] = '\0';
    if (f->lost_chunks != 0)
        used = snprintf(text, sizeof(text), "; %llu %s marked lost", (unsigned long long)f->lost_chunks,
                        ht_plural(f->lost_chunks, "chunk"));
    if (f->cold_chunks != 0 && !f->opt.vault)
        used += snprintf(text + used, sizeof(text) - (size_t)used, "; %llu %s, %llu MiB, in the vault and not read",
                         (unsigned long long)f->cold_chunks, ht_plural(f->cold_chunks, "chunk"),
                         (unsigned long long)ht_div_up(f->cold_bytes, HT_MIB));
    if (f->missing_chunks != 0)
        snprintf(text + used, sizeof(text) - (size_t)used, "; %llu %s on missing devices",
                 (unsigned long long)f->missing_chunks, ht_plural(f->missing_chunks, "chunk"));
    return text;
}

static void summary_text(struct ht_fsck *f, const char *name)
{
    unsigned long long problems = f->problems, repaired = f->repaired;

    ht_fsck_sum_up(f);
    fprintf(f->out, "%s: ", name);
    if (f->problems == 0 && !f->failed)
        fprintf(f->out, "clean, %llu %s in %zu %s, %s %s%s\n", (unsigned long long)f->objects,
                ht_plural(f->objects, "object"), f->item_count, ht_plural(f->item_count, "chunk"),
                ht_size_text(f->opt.no_data ? f->stored_bytes : f->verified_bytes),
                f->opt.no_data ? "not read" : "verified", unread_text(f));
    else if (f->problems == 0)
        fputs("not checked to the end\n", f->out);
    else if (f->opt.mode == HT_FSCK_CHECK)
        fprintf(f->out, "%llu %s left", problems, ht_plural(f->problems, "problem"));
    else
        fprintf(f->out, "%llu %s, %llu repaired, %llu left", problems, ht_plural(f->problems, "problem"), repaired,
                problems - repaired);
    if (f->problems != 0)
        fprintf(f->out, "%s\n", f->failed ? ", and not everything could be checked" : "");
    else if (f->replay_lacks_bytes != 0)
        fprintf(f->out, "%s: a mount may wait until %llu bytes more are free, to compute logged steps again\n", name,
                (unsigned long long)f->replay_lacks_bytes);
}

void ht_fsck_summary(struct ht_fsck *f, const char *name, int status)
{
    if (f->opt.json)
        summary_json(f, status);
    else
        summary_text(f, name);
}
