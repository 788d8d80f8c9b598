/* SPDX-License-Identifier: Apache-2.0 */
/* trim.c - `hitrainctl trim`: the devices discard all free space. */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

static int discarded(const char *point, uint64_t *out)
{
    char *text;
    int rc = ht_cmd_attribute(point, "device_discarded_bytes", false, &text);

    if (rc == -ENODATA)
        ht_error("%s: its daemon is of another version and does not discard", point);
    if (rc < 0)
        return rc;
    *out = strtoull(text, NULL, 10);
    free(text);
    return 0;
}

int ht_cmd_trim(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX];
    uint64_t before, after;

    if (ht_cmd_mount_point(path, point) < 0 || discarded(point, &before) < 0 ||
        ht_cmd_command(path, point, "trim") < 0 || discarded(point, &after) < 0)
        return HT_CMD_FAILED;
    if (o->json) {
        struct ht_json j;
        ht_json_init(&j, stdout);
        ht_json_object(&j, NULL);
        ht_json_str(&j, "mount", point);
        ht_json_u64(&j, "discarded_bytes", after - before);
        ht_json_end(&j);
    } else {
        printf("%s: %s discarded\n", point, ht_size_text(after - before));
    }
    return HT_CMD_OK;
}
