/* SPDX-License-Identifier: Apache-2.0 */
/* A logged step as a file: what is refused, and what the sender says then. */
#include <stdlib.h>

#include "mount-helpers/stream/logged.h"
#include "tests/support/suite.h"
#include "tiering/base/buf.h"
#include <hitrain/words.h>

enum { STEP = 5, LEN = sizeof(struct ht_disk_redo) };

static struct ht_redo_file header(uint32_t version)
{
    struct ht_redo_file h = {.magic = HT_REDO_FILE_MAGIC};

    ht_le32_store(&h.version, version);
    ht_le64_store(&h.step, STEP);
    ht_le64_store(&h.summary_bytes, LEN);
    return h;
}

/* Of a step without parameters. */
static int take_summary(struct ht_logged *l, uint32_t version)
{
    struct ht_disk_redo head = {.pad = {{0}}};
    uint8_t *bytes = malloc(LEN);

    ht_le32_store(&head.version, version);
    ht_le64_store(&head.step, STEP);
    memcpy(bytes, &head, LEN);
    return ht_logged_take_summary(l, bytes, LEN);
}

static void check_text(const struct ht_logged *l, int err, const char *words)
{
    char text[300];

    ht_logged_explain(l, err, text, sizeof(text));
    ck_assert_msg(strstr(text, words) != NULL, "\"%s\" lacks \"%s\"", text, words);
}

TEST(a_later_version_is_named)
{
    struct ht_redo_file now = header(HT_REDO_FILE_VERSION), later = header(HT_REDO_FILE_VERSION + 6);
    struct ht_logged l = {.step = 0};
    uint64_t len = 0;

    ck_assert_int_eq(ht_logged_take_header(&l, &later, STEP, &len), -EPROTONOSUPPORT);
    check_text(&l, -EPROTONOSUPPORT,
               "the file of this logged step is of version 7, and this program reads up to version 1");
    check_text(&l, -EPROTONOSUPPORT, "use a hitrainctl that is as new");
    ck_assert_int_eq(ht_logged_take_header(&l, &now, STEP, &len), 0);
    ck_assert_uint_eq(len, LEN);
    ck_assert_int_eq(take_summary(&l, HT_REDO_VERSION_SECTIONS + 1), -EPROTONOSUPPORT);
    check_text(&l, -EPROTONOSUPPORT, "the summary of this logged step is of version 4");
    ht_logged_free(&l);
    ck_assert_int_eq(take_summary(&l, HT_REDO_VERSION_SECTIONS), 0);
    ht_logged_free(&l);
}

TEST(what_makes_no_sense_is_no_later_version)
{
    struct ht_redo_file h = header(0);
    struct ht_logged l = {.step = 0};
    uint64_t len = 0;

    ck_assert_int_eq(ht_logged_take_header(&l, &h, STEP, &len), -EPROTO);
    h = header(HT_REDO_FILE_VERSION + 1);
    h.magic[0] = 'x';
    ck_assert_int_eq(ht_logged_take_header(&l, &h, STEP, &len), -EPROTO);
    h = header(HT_REDO_FILE_VERSION);
    ck_assert_int_eq(ht_logged_take_header(&l, &h, STEP + 1, &len), -EPROTO);
    ck_assert_int_eq(ht_logged_take_header(&l, &h, STEP, &len), 0);
    ck_assert_int_eq(take_summary(&l, 0), -EPROTO);
    check_text(&l, -EPROTO, "makes no sense");
    check_text(&l, -EPROTO, "hitrain-fsck -n");
    check_text(&l, -EIO, strerror(EIO));
    ht_logged_free(&l);
}

int main(void)
{
    return run_tests("logged");
}
