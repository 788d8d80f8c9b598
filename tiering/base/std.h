/* SPDX-License-Identifier: Apache-2.0 */
/* std.h - descriptors 0, 1 and 2. */
#ifndef HITRAIN_TIERING_BASE_STD_H
#define HITRAIN_TIERING_BASE_STD_H

/*
 * Those that the caller of this program has closed become /dev/null. First thing in main: a device opened as
 * descriptor 2 would be written to by the next message.
 */
void ht_std_open(void);
/* All of them become /dev/null: nobody reads or writes there any more. */
void ht_std_detach(void);

#endif
