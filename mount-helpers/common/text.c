/* SPDX-License-Identifier: Apache-2.0 */
/* text.c - see text.h. */
#include "mount-helpers/common/text.h"

#include <hitrain/version.h>

enum { RING = 8 };

static char *next_buf(void)
{
    static char ring[RING][HT_SIZE_TEXT_MAX];
    static unsigned next;

    return ring[next++ % RING];
}

const char *ht_uuid_text(const uint8_t uuid[16], char buf[HT_UUID_TEXT_MAX])
{
    char *p = buf;

    for (unsigned i = 0; i < 16; i++)
        p += sprintf(p, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    return buf;
}

const char *ht_size_text(uint64_t bytes)
{
    return ht_format_size(bytes, next_buf(), HT_SIZE_TEXT_MAX);
}

const char *ht_plural(uint64_t count, const char *word)
{
    char *buf = next_buf();

    snprintf(buf, HT_SIZE_TEXT_MAX, "%s%s", word, count == 1 ? "" : "s");
    return buf;
}

void ht_put_printable(const char *text, FILE *to)
{
    for (const char *p = text; *p != '\0'; p++)
        fputc((unsigned char)*p < 0x20 || *p == 0x7f ? '?' : *p, to);
}

void ht_print_version(const char *program)
{
    printf("%s (hitrain) %s\n", program, HT_VERSION);
}
