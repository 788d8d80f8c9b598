/* SPDX-License-Identifier: Apache-2.0 */
/* line.c - lines of fields, as the daemon tells events and devices. */
#include "mount-helpers/ctl/ctl.h"

#include <stdlib.h>

void ht_ctl_parse_line(char *text, struct ht_ctl_line *out)
{
    char *save, *word = strtok_r(text, "\t", &save);

    for (out->count = 0; word != NULL && out->count < HT_CTL_FIELDS_MAX; word = strtok_r(NULL, "\t", &save)) {
        char *equal = strchr(word, '=');

        if (equal == NULL)
            continue;
        *equal = '\0';
        out->field[out->count++] = (struct ht_ctl_field){word, equal + 1};
    }
}

const char *ht_ctl_value(const struct ht_ctl_line *l, const char *key)
{
    for (unsigned i = 0; i < l->count; i++)
        if (strcmp(l->field[i].key, key) == 0)
            return l->field[i].value;
    return "";
}

uint64_t ht_ctl_number(const struct ht_ctl_line *l, const char *key)
{
    return strtoull(ht_ctl_value(l, key), NULL, 10);
}
