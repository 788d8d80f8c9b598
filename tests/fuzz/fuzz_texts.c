/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Texts that people and programs give: the first byte picks the parser (optimizer configuration, dtype, shape, number,
 * command of .hitrain/ctl, size, options of mount.hitrain, command line of hitrain), the rest is its text.
 */
#include <unistd.h>

#include "fs/ctl/parse.h"
#include "fs/daemon/options.h"
#include "mount-helpers/mount/options.h"
#include "optim/rules/config.h"
#include "tests/fuzz/fuzz.h"
#include "tiering/base/log.h"
#include "tiering/base/shards.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    opterr = 0;
    return 0;
}

/* Of a file, as if it had no other words. */
static void sections(const char *text, size_t len)
{
    static const char base_text[] = "sgd momentum=0.5";
    struct ht_optim_config base;
    struct ht_optim_sections s;
    char err[HT_OPTIM_ERROR_MAX] = "";
    size_t at = ht_optim_sections_at(text, len);

    MUST(at <= len && ht_optim_config_parse(base_text, strlen(base_text), &base, err) == 0);
    if (ht_optim_sections_parse(text, len, &base, &s, err))
        MUST(err[0] && memchr(err, '\0', sizeof(err)));
    else
        MUST((s.count == 0) == (at == len));
    for (size_t i = 0; i < s.count; i++)
        MUST(s.section[i].begin < s.section[i].end && (!i || s.section[i - 1].end <= s.section[i].begin) &&
             s.section[i].config.rule == HT_RULE_SGD && s.section[i].config.momentum > 0);
    ht_optim_sections_free(&s);
}

static void optimizer(const uint8_t *text, size_t len)
{
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX] = "";

    if (ht_optim_config_parse((const char *)text, len, &config, err))
        MUST(err[0] && memchr(err, '\0', sizeof(err)));
    else
        MUST(config.lr >= 0 && config.durable_every >= 1 && !config.frozen && !config.missed);
    sections((const char *)text, len);
}

static void shards(const uint8_t *text, size_t len)
{
    char again[HT_SHARDS_TEXT_MAX];
    struct ht_shards s;

    if (ht_shards_parse((const char *)text, len, &s))
        return;
    MUST(s.changes >= 1 && s.changes <= HT_SHARDS_CHANGES_MAX && ht_shards_ranks(&s) <= HT_SHARDS_RANKS_MAX);
    ht_shards_format(&s, again);
    MUST(strlen(again) == len && memcmp(again, text, len) == 0);
}

static void shape(const uint8_t *text, size_t len)
{
    struct ht_shape s;
    uint64_t product = 1, n;

    (void)ht_parse_dtype((const char *)text, len);
    int rc = ht_parse_u64((const char *)text, len, &n);
    (void)rc;
    shards(text, len);
    if (ht_parse_shape((const char *)text, len, &s))
        return;
    MUST(s.count <= HT_SHAPE_DIMS_MAX);
    for (unsigned i = 0; i < s.count; i++)
        MUST(!__builtin_mul_overflow(product, s.dim[i], &product));
    MUST(product == s.elements && s.elements <= HT_FILE_BYTES_MAX);
}

static void command(const uint8_t *text, size_t len)
{
    char err[HT_CTL_ERROR_MAX] = "", name[HT_NAME_BYTES_MAX + 1];
    struct ht_command c;

    if (ht_parse_command((const char *)text, len, &c, err)) {
        MUST(err[0] && memchr(err, '\0', sizeof(err)));
        return;
    }
    const char *path = c.path;
    size_t left = c.path_len;
    MUST(!left || ((const uint8_t *)path >= text && (const uint8_t *)path + left <= text + len));
    while (ht_parse_component(&path, &left, name) > 0)
        MUST(name[0] && memchr(name, '\0', sizeof(name)));
}

static void size_word(const uint8_t *data, size_t len)
{
    char *text = fuzz_text(data, len);
    uint64_t bytes;
    int rc = ht_parse_size(text, &bytes);

    (void)rc;
    free(text);
}

static void mount_options(const uint8_t *data, size_t len)
{
    char *text = fuzz_text(data, len);
    struct ht_buf out = HT_BUF_INIT;
    int rc = ht_mount_options(text, &out);

    MUST(rc || !out.len || out.data[out.len - 1] == '\0');
    ht_buf_free(&out);
    free(text);
}

/* Lines are arguments. */
static void command_line(const uint8_t *data, size_t len)
{
    enum { ARGUMENTS_MAX = 40 };
    char *text = fuzz_text(data, len), *argv[ARGUMENTS_MAX + 1] = {(char[]){"hitrain"}}, *save = NULL;
    struct ht_options o, other;
    int argc = 1;

    for (char *line = strtok_r(text, "\n", &save); line && argc < ARGUMENTS_MAX; line = strtok_r(NULL, "\n", &save))
        argv[argc++] = line;
    int rc = ht_options_parse(argc, argv, false, &o);
    MUST(rc || o.help || o.version || (o.device_count && o.device_count <= HT_DEVICES_MAX && o.mountpoint));
    if (!rc && !ht_options_parse(argc, argv, false, &other)) {
        (void)ht_options_changed(&o, &other);
        ht_options_free(&other);
    }
    ht_options_free(&o);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const parser[])(const uint8_t *text, size_t len) = {
        optimizer, shape, command, size_word, mount_options, command_line,
    };

    if (size < 1)
        return -1;
    parser[data[0] % HT_ARRAY_SIZE(parser)](data + 1, size - 1);
    return 0;
}
