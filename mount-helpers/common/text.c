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

/* ----------------------------------------------------------------- progress */

enum { BAR_WIDTH = 24, TERMINAL_MS = 200, LINES_MS = 5000 };

static void put_bar(unsigned permille)
{
    unsigned full = permille * BAR_WIDTH / 1000;

    fputc('[', stderr);
    for (unsigned i = 0; i < BAR_WIDTH; i++)
        fputc(i < full ? '#' : '.', stderr);
    fputs("] ", stderr);
}

static void show_progress(struct ht_progress *p, uint64_t now_ns)
{
    double seconds = (double)(now_ns - p->began_ns) / 1e9;
    double rate = seconds > 0 ? (double)p->done_bytes / seconds : 0;
    unsigned permille = p->total_bytes != 0 ? (unsigned)(p->done_bytes * 1000.0 / p->total_bytes) : 1000;

    if (p->terminal) {
        fputc('\r', stderr);
        put_bar(permille);
    }
    fprintf(stderr, "%u.%u %%  %s of %s %s, %s/s", permille / 10, permille % 10, ht_size_text(p->done_bytes),
            ht_size_text(p->total_bytes), p->done, ht_size_text((uint64_t)rate));
    if (p->done_bytes < p->total_bytes && rate > 0)
        fprintf(stderr, ", %.0f s left", (double)(p->total_bytes - p->done_bytes) / rate);
    fputs(p->terminal ? "\033[K" : "\n", stderr);
    fflush(stderr);
    p->shown_ns = now_ns;
}

void ht_progress_begin(struct ht_progress *p, bool wanted, const char *done, uint64_t total_bytes)
{
    *p = (struct ht_progress){.done = done, .total_bytes = total_bytes, .began_ns = ht_now_ns()};
    p->terminal = isatty(STDERR_FILENO);
    p->on = wanted || p->terminal;
    p->shown_ns = p->began_ns;
}

void ht_progress_add(struct ht_progress *p, uint64_t bytes)
{
    p->done_bytes += bytes;
    if (!p->on)
        return;
    uint64_t now_ns = ht_now_ns();
    if (now_ns - p->shown_ns >= (p->terminal ? TERMINAL_MS : LINES_MS) * 1000000ull)
        show_progress(p, now_ns);
}

void ht_progress_clear(struct ht_progress *p)
{
    if (p->on && p->terminal) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}

void ht_progress_end(struct ht_progress *p)
{
    if (!p->on)
        return;
    show_progress(p, ht_now_ns());
    if (p->terminal)
        fputc('\n', stderr);
    p->on = false;
}
