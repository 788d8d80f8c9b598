/* SPDX-License-Identifier: Apache-2.0 */
/* version.h - the version that every program prints. */
#ifndef HITRAIN_VERSION_H
#define HITRAIN_VERSION_H

#define HT_VERSION "0.1.0"

#endif
