/* SPDX-License-Identifier: Apache-2.0 */
/* version.h - what every program says it is. */
#ifndef HITRAIN_VERSION_H
#define HITRAIN_VERSION_H

#define HT_VERSION "0.1.0"

#endif
