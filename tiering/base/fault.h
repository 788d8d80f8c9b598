/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - named fault points. A test arms a point; the code under test asks at
 * the place where the real failure would show. Disarmed points cost one load.
 */
#ifndef HITRAIN_TIERING_BASE_FAULT_H
#define HITRAIN_TIERING_BASE_FAULT_H

#include "tiering/base/base.h"

/* Next: the n-th (1 = next) passage of the point fails with error (negative errno); repeat: all later ones too. */
void ht_fault_arm(const char *point, unsigned nth, int error, bool repeat);
void ht_fault_disarm_all(void);
/* 0, or the negative errno armed for this passage. */
int ht_fault(const char *point);
/* How often the point was passed since it was armed. */
unsigned ht_fault_passed(const char *point);

#endif
