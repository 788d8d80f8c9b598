/* SPDX-License-Identifier: Apache-2.0 */
#include "mount-helpers/common/text.h"

#include <unistd.h>

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

/* Length of the character at p, or 0: a control character, in either range, or not UTF-8. */
static unsigned printable(const char *p)
{
    unsigned char first = (unsigned char)p[0];

    if (first < 0x20 || first == 0x7f || (first == 0xc2 && (unsigned char)p[1] < 0xa0))
        return 0;
    return ht_utf8_length(p);
}

void ht_put_printable(const char *text, FILE *to)
{
    for (const char *p = text; *p != '\0';) {
        unsigned len = printable(p);
        if (len == 0)
            fputc('?', to);
        else
            fwrite(p, 1, len, to);
        p += len != 0 ? len : 1;
    }
}

bool ht_text_ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n >= m && strcmp(text + n - m, end) == 0;
}

bool ht_own_folder(unsigned levels, char out[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    char *slash = NULL;

    out[n > 0 ? n : 0] = '\0';
    for (unsigned i = 0; i <= levels && (slash = strrchr(out, '/')); i++)
        *slash = '\0';
    return slash != NULL;
}

void ht_print_version(const char *program)
{
    printf("%s (hitrain) %s\n", program, HT_VERSION);
}

int ht_usage_hint(const char *help_command, int status)
{
    fprintf(stderr, "Try '%s'.\n", help_command);
    return status;
}

int ht_option_status(int option, const char *program, const char *hint, const char *usage, int wrong)
{
    if (option == 'h')
        fputs(usage, stdout);
    else if (option == 'V')
        ht_print_version(program);
    else
        return ht_usage_hint(hint, wrong);
    return 0;
}

const struct option ht_help_and_version[] = {
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'V'},
    {NULL, 0, NULL, 0},
};
