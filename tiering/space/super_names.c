/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super_names.c - names of features that this program does not know, from the text in the superblock. The text may be
 * anything: a line counts if it is one of the form that programs write.
 */
#include "tiering/space/super.h"

#include "tiering/base/buf.h"

static const char *const effect_words[HT_FEATURE_EFFECTS] = HT_FEATURE_WORDS;

const char *ht_device_class_word(unsigned device_class)
{
    return device_class == HT_DEVICE_CAPACITY ? "capacity" : "fast";
}

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
    uint8_t *block;
    bool found = false;

    if (posix_memalign((void **)&block, HT_BLOCK_BYTES, HT_BLOCK_BYTES))
        return false;
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        struct ht_super_words w;
        uint64_t at = ht_dev_size(dev) < HT_BLOCK_BYTES ? 0 : ht_super_offset(ht_dev_size(dev), i);
        if (ht_dev_size(dev) < at + HT_BLOCK_BYTES || ht_dev_read(dev, at, block, HT_BLOCK_BYTES) ||
            ht_super_peek(block, &w) != HT_SUPER_OK || (found && w.generation <= out->generation))
            continue;
        *out = w;
        found = true;
    }
    free(block);
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
