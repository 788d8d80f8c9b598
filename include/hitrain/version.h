/* SPDX-License-Identifier: Apache-2.0 */
/* version.h - the version that every program prints. */
#pragma once

#define HT_VERSION "0.1.0"
