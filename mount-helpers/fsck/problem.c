/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c - the table of problems, and telling them. */
#include "mount-helpers/fsck/fsck.h"

#include <stdarg.h>

#include "mount-helpers/common/text.h"

enum { TEXT_MAX = HT_FSCK_PATH_MAX + 512 };

/* default_yes: what -p would answer; repair: the question. */
static const struct row {
    const char *code;
    bool default_yes;
    const char *repair;
} table[HT_FSCK_CODES] = {
    [HT_FSCK_SB_READ] = {"SB-READ", true, "rewrite it from a valid copy"},
    [HT_FSCK_SB_MAGIC] = {"SB-MAGIC", true, "rewrite it from a valid copy"},
    [HT_FSCK_SB_CSUM] = {"SB-CSUM", true, "rewrite it from a valid copy"},
    [HT_FSCK_SB_VERSION] = {"SB-VERSION", false, "rewrite it from a valid copy"},
    [HT_FSCK_SB_FIELD] = {"SB-FIELD", true, "rewrite it from a valid copy"},
    [HT_FSCK_SB_OTHER] = {"SB-OTHER", true, "rewrite it from the newest copy"},
    [HT_FSCK_SB_NONE] = {"SB-NONE", false, "search the device for the log"},
    [HT_FSCK_SB_SHORT] = {"SB-SHORT", false, "drop what was stored beyond the end"},
    [HT_FSCK_LOG_FRAME] = {"LOG-FRAME", true, "rewrite it from the other copy"},
    [HT_FSCK_LOG_READ] = {"LOG-READ", true, "rewrite it from the other copy"},
    [HT_FSCK_LOG_DIFFER] = {"LOG-DIFFER", true, "rewrite it from the copy that mounts use"},
    [HT_FSCK_LOG_ALL] = {"LOG-ALL", false, "end the log before the damage, losing what came after"},
    [HT_FSCK_LOG_RECORD] = {"LOG-RECORD", false, "leave the record out"},
    [HT_FSCK_REF_RANGE] = {"REF-RANGE", true, "mark the range unreadable"},
    [HT_FSCK_REF_META] = {"REF-META", true, "mark the range unreadable"},
    [HT_FSCK_REF_OVERLAP] = {"REF-OVERLAP", true, "keep the one whose checksum holds"},
    [HT_FSCK_REF_ORPHAN] = {"REF-ORPHAN", true, "move it to lost+found"},
    [HT_FSCK_DATA_READ] = {"DATA-READ", true, "mark the range unreadable"},
    [HT_FSCK_DATA_CSUM] = {"DATA-CSUM", true, "mark the range unreadable"},
    [HT_FSCK_NAME] = {"NAME", true, "correct it"},
};

static void put_string(struct ht_json *j, const char *key, const char *value)
{
    if (value != NULL)
        ht_json_str(j, key, value);
}

static void put_number(struct ht_json *j, const char *key, uint64_t value)
{
    if (value != HT_FSCK_NONE)
        ht_json_u64(j, key, value);
}

static void tell_json(struct ht_fsck *f, const char *code, const struct ht_fsck_where *w, const char *text)
{
    struct ht_json *j = &f->json;

    ht_json_object(j, NULL);
    ht_json_str(j, "code", code);
    ht_json_str(j, "text", text);
    ht_json_bool(j, "repaired", false);
    put_string(j, "device", w->device);
    put_number(j, "copy", w->copy);
    put_number(j, "offset", w->offset);
    put_number(j, "bytes", w->bytes);
    put_number(j, "position", w->position);
    put_number(j, "frame", w->frame);
    put_number(j, "object", w->object);
    put_string(j, "path", w->path);
    put_string(j, "state", w->state);
    put_number(j, "chunk", w->chunk);
    put_number(j, "first_byte", w->first_byte);
    ht_json_end(j);
}

static void tell(struct ht_fsck *f, const struct row *row, const char *code, const struct ht_fsck_where *w,
                 const char *text)
{
    f->problems++;
    if (f->opt.json) {
        tell_json(f, code, w, text);
        return;
    }
    printf("%s: ", code);
    ht_put_printable(text, stdout);
    putchar('\n');
    if (f->opt.mode == HT_FSCK_YES || (f->opt.mode == HT_FSCK_PREEN && row->default_yes))
        printf("    not repaired: this version cannot %s\n", row->repair);
    else if (f->opt.mode == HT_FSCK_PREEN)
        printf("    not repaired: it would need a decision, to %s\n", row->repair);
    fflush(stdout);
}

void ht_fsck_problem(struct ht_fsck *f, enum ht_fsck_code code, const struct ht_fsck_where *where, const char *fmt, ...)
{
    char text[TEXT_MAX];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    tell(f, &table[code], table[code].code, where, text);
}

void ht_fsck_name_problem(struct ht_fsck *f, const char *code, const char *text)
{
    const struct ht_fsck_where nowhere = {HT_FSCK_NOWHERE};

    tell(f, &table[HT_FSCK_NAME], code, &nowhere, text);
}
