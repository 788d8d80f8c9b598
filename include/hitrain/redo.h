/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo.h - .hitrain/redo/STEP: a logged step as a file. The header is followed by the summary (struct ht_disk_redo in
 * format.h) and by the bytes of the gradients, in which its pieces have places. docs/vault-format.md describes it.
 */
#pragma once

#include <hitrain/format.h>

#define HT_REDO_FILE_MAGIC "HTredo\r\n"
#define HT_REDO_FILE_VERSION 1u
struct ht_redo_file {
    uint8_t magic[8];       /*  0 HT_REDO_FILE_MAGIC, without its NUL */
    ht_le32 version;        /*  8 HT_REDO_FILE_VERSION */
    ht_le32 pad;            /* 12 zero */
    ht_le64 step;           /* 16 its number */
    ht_le64 lineage;        /* 24 of the history that it belongs to */
    ht_le64 summary_bytes;  /* 32 */
    ht_le64 gradient_bytes; /* 40 */
    uint8_t pad2[16];       /* 48 zero */
};
static_assert(sizeof(struct ht_redo_file) == 64, "as read by clients");
