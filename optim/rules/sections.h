/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sections.h - words for ranges of a parameter's elements, in the text of user.hitrain.optimizer of its file:
 *
 *   words of the file  0:32 weight_decay=0  8224:8736 lr=1e-4 weight_decay=0  ...
 *
 * A section amends the words of its file for elements [begin, end). All sections of a file have its rule and its state,
 * and words of the whole step stay those of the file. Pure functions, any thread.
 */
#pragma once

#include "optim/rules/config.h"

enum { HT_OPTIM_SECTIONS_TEXT_MAX = 65536 };

struct ht_optim_section {
    uint64_t begin, end; /* begin < end */
    struct ht_optim_config config;
};
struct ht_optim_sections {
    struct ht_optim_section *section; /* owned: ascending, apart from each other; NULL if count is 0 */
    size_t count;
};

/* Where the first section begins; len: there is none. */
size_t ht_optim_sections_at(const char *text, size_t len);
/* Do these bytes, all those before the first section, have no word? */
bool ht_optim_sections_alone(const char *text, size_t own);
/*
 * text: of sections alone; base: the words of the file. -EINVAL with a message that names the range and what is wrong.
 * The caller frees *out, also after an error.
 */
int ht_optim_sections_parse(const char *text, size_t len, const struct ht_optim_config *base,
                            struct ht_optim_sections *out, char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
void ht_optim_sections_free(struct ht_optim_sections *s);
