/* SPDX-License-Identifier: Apache-2.0 */
/* stdio_fds.h - descriptors 0, 1 and 2. */
#pragma once

/*
 * Opens /dev/null for standard descriptors that the caller of this program has closed. First call in main: else a
 * device could get descriptor 2, and the next message would be written to it.
 */
void ht_stdio_fds_open(void);
/* Turns all three into /dev/null: no program reads or writes there any more. */
void ht_stdio_fds_detach(void);
