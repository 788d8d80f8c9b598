/* SPDX-License-Identifier: Apache-2.0 */
/* background.c - `hitrainctl background`: pauses engines that work in the background, and shows them (show.c). */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>

int ht_cmd_background(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX], line[128];

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    snprintf(line, sizeof(line), "background %s%s%s", o->verb, o->engine ? " engine=" : "", o->engine ? o->engine : "");
    if (strcmp(o->verb, "status") != 0 && ht_cmd_command(path, point, line) < 0)
        return HT_CMD_FAILED;
    return ht_cmd_show(path, o);
}
