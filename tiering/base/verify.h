/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.h - checks of whole structures, in builds that look for errors (those with sanitizers).
 *
 * A check walks a structure and asserts each invariant that the headers state. Builds with HT_VERIFY_STATE check the
 * store at mount and unmount, an object when it is published or aborted, the optimizer at commits, aborts and unmount,
 * and the lanes of jobs (fs/fuse) whenever a job thread finds none. Tests call the checks
 * after each operation, in every build.
 */
#pragma once

#ifdef HT_VERIFY_STATE
#define HT_VERIFY(call) (call)
#else
#define HT_VERIFY(call) ((void)0)
#endif
