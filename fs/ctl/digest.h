/* SPDX-License-Identifier: Apache-2.0 */
/* digest.h - digests of kept steps, computed in the background. */
#ifndef HITRAIN_FS_CTL_DIGEST_H
#define HITRAIN_FS_CTL_DIGEST_H

#include "fs/ctl/ctl.h"
#include "fs/ctl/parse.h"

/* After the mount. -ENOMEM. */
int ht_digests_begin(struct ht_ctl *c) HT_MUST_CHECK;
/* Before names and optimizer stop. Also after a begin that failed, or none. WAITS. */
void ht_digests_end(struct ht_ctl *c);
/* Why the kept step with this directory has no digest, as a text for people. False: it did not fail in this mount. */
bool ht_digest_error(struct ht_ctl *c, uint64_t kept, char out[HT_CTL_ERROR_MAX]);

#endif
