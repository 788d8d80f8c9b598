/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - what several programs print: small pieces of text, and the progress of long work. */
#pragma once

#include <getopt.h>
#include <limits.h>
#include "tiering/base/log.h"

enum { HT_UUID_TEXT_MAX = 37, HT_SIZE_TEXT_MAX = 32 };

/* "1b4e28ba-2fa1-11d2-883f-0016d3cca427"; returns buf. */
const char *ht_uuid_text(const uint8_t uuid[16], char buf[HT_UUID_TEXT_MAX]);
/* "1.5 GiB", in a small ring of buffers of its own: several may stand in one printf. One thread only. */
const char *ht_size_text(uint64_t bytes);
/* "device", "devices": the word with an s unless there is one. In the same ring. */
const char *ht_plural(uint64_t count, const char *word);
/*
 * Names may hold control characters, also those above 0x7f, or be no UTF-8: prints '?' instead of characters that a
 * terminal would obey.
 */
void ht_put_printable(const char *text, FILE *to);
bool ht_text_ends_with(const char *text, const char *end);
/* The folder of this program, or one so many levels above it. False: it is not known. */
bool ht_own_folder(unsigned levels, char out[PATH_MAX]);
/* Prints "PROGRAM (hitrain) VERSION". */
void ht_print_version(const char *program);
/* Says which command explains the program, after a wrong command line; returns its exit status. */
int ht_usage_hint(const char *help_command, int status);
/* The same, and why it is wrong. */
#define ht_usage_error(help_command, status, ...) (ht_error(__VA_ARGS__), ht_usage_hint(help_command, status))
/* The exit status after option 'h', 'V' or, with the hint, a wrong one. */
int ht_option_status(int option, const char *program, const char *hint, const char *usage, int wrong);
/* For getopt_long: --help as -h, and --version as -V. */
extern const struct option ht_help_and_version[];

/* The progress of long work, on stderr: a bar on a terminal, else a line every few seconds. */
struct ht_progress {
    const char *done; /* the action on the bytes: "verified" */
    bool on, terminal;
    uint64_t total_bytes, done_bytes, began_ns, shown_ns;
};
/* wanted: also where stderr is no terminal. */
void ht_progress_begin(struct ht_progress *p, bool wanted, const char *done, uint64_t total_bytes);
void ht_progress_add(struct ht_progress *p, uint64_t bytes);
/* Removes the bar, for a message or for good. */
void ht_progress_clear(struct ht_progress *p);
void ht_progress_end(struct ht_progress *p);
