/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two kinds of options: those for readers of fstab, which are dropped, and all others, which the daemon accepts or
 * refuses by name.
 */
#include "mount-helpers/mount/options.h"

/* Words of mount(8), fstab and systemd that mean nothing to a file system, or ask for its usual behaviour. */
static const char *const dropped[] = {
    "defaults", "auto",       "noauto",   "user",       "nouser", "users",  "owner", "group",  "nofail", "_netdev",
    "lazytime", "nolazytime", "iversion", "noiversion", "mand",   "nomand", "loud",  "silent", "nomtab",
};
/* The same, up to a value or a name that follows. */
static const char *const dropped_prefixes[] = {"x-", "X-", "comment=", "user=", "uhelper=", "helper="};

static bool is_word(const char *option, size_t len, const char *word)
{
    return strlen(word) == len && memcmp(option, word, len) == 0;
}

static bool is_dropped(const char *option, size_t len)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(dropped); i++)
        if (is_word(option, len, dropped[i]))
            return true;
    for (size_t i = 0; i < HT_ARRAY_SIZE(dropped_prefixes); i++) {
        size_t n = strlen(dropped_prefixes[i]);
        if (len >= n && memcmp(option, dropped_prefixes[i], n) == 0)
            return true;
    }
    return false;
}

static size_t option_length(const char *text)
{
    bool quoted = false;
    size_t n = 0;

    while (text[n] != '\0' && (quoted || text[n] != ',')) {
        if (text[n] == '\\' && text[n + 1] != '\0')
            n++; /* libfuse takes a comma after a backslash as part of the option */
        else if (text[n] == '"')
            quoted = !quoted;
        n++;
    }
    return n;
}

int ht_mount_options(const char *text, struct ht_buf *out)
{
    while (*text != '\0') {
        size_t len = option_length(text);
        if (is_word(text, len, "loop")) /* mount(8) passes it on, and no FUSE file system can follow it */
            return -ENOTSUP;
        if (len > 0 && !is_dropped(text, len)) {
            if (out->len > 0)
                out->data[out->len - 1] = ','; /* in place of the NUL */
            ht_buf_put(out, text, len);
            ht_buf_put(out, "", 1);
        }
        text += len;
        text += *text == ',';
    }
    return out->err;
}
