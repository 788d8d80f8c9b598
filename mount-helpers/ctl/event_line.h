/* SPDX-License-Identifier: Apache-2.0 */
/* event_line.h - one line of .hitrain/events, for people or as JSON, on stdout. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_EVENT_LINE_H
#define HITRAIN_MOUNT_HELPERS_CTL_EVENT_LINE_H

#include "mount-helpers/ctl/ctl.h"

enum ht_log_level ht_event_line_level(const struct ht_cmd_line *l);
void ht_event_line_put(const struct ht_cmd_line *l, bool with_colours);
void ht_event_line_put_json(const struct ht_cmd_line *l);

#endif
